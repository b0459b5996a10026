"""``kinlog why``: the story of a group in plain sentences. It needs the base install only."""

from pathlib import Path

import click

from kinlog.controller.command_parameters import echo_json, json_option, run_argument
from kinlog.lineage.scan import scan_log
from kinlog.replay.inspection import locate_run
from kinlog.replay.plain_text import format_time, render_paragraph
from kinlog.replay.story.story import Story, tell_story
from kinlog.schemas.config import load_config

__all__ = ["why_command"]


def _group_and_generation(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int | None]:
    group, slash, generation = value.partition("/")
    if not group.isdecimal() or (slash and not generation.isdecimal()):
        raise click.BadParameter(
            f"{value!r} is neither a group, such as 17, nor a sibling of one, such as 17/3", ctx, param
        )
    return int(group), int(generation) if slash else None


@click.command("why")
@run_argument()
@click.argument("sibling", metavar="GROUP[/GENERATION]", callback=_group_and_generation)
@json_option()
def why_command(run: Path, sibling: tuple[int, int | None], as_json: bool) -> None:
    """Tell what became of a group, or of one of its siblings, and why: event by event, in plain sentences.

    Restarts are told as far as the group was alive. The last line says how it stands now.

    \b
    Exit codes
       0  told
      27  the run has no such group, or nothing of it any more

    \b
    Example
      kinlog why runs/first 17
      kinlog why runs/first 17/3
    """
    directory = locate_run(run)
    config = load_config(directory.config) if directory.config.is_file() else None
    recovery = config.rollout_recovery if config is not None else None
    story = tell_story(scan_log(directory.log), *sibling, recovery=recovery)
    if as_json:
        echo_json(story)
    else:
        click.echo(_render(story))


def _render(story: Story) -> str:
    sibling = "" if story.generation is None else f", sibling {story.generation}"
    parts = [f"run {story.run_id}: group {story.group_id}{sibling}", ""]
    if story.dropped_events:
        parts.append(
            f"  The events up to seq {story.dropped_events} were dropped: what they say is not told."
        )
    width = max((len(f"{line.seq}") for line in story.lines), default=0)
    for line in story.lines:
        begin = f"  {line.seq:>{width}}  {format_time(line.time_us)}  "
        parts.append(render_paragraph(line.text, first=begin, rest=" " * len(begin)))
    return "\n".join([*parts, "", render_paragraph(story.present, first="  ", rest="  ")])
