"""``kinlog timeline``: a run as a picture. It needs the base install only, and Pillow for ``--png``."""

import gzip
from collections.abc import Callable
from pathlib import Path

import click

from kinlog.controller.command_parameters import echo_json, json_option, run_argument
from kinlog.lineage.scan import scan_log
from kinlog.lineage.store import LocalStore, replace_durably
from kinlog.replay.inspection import locate_run
from kinlog.replay.plain_text import format_bytes
from kinlog.replay.timeline.building import build_timeline
from kinlog.replay.timeline.html_page import render_page
from kinlog.replay.timeline.perfetto import render_trace
from kinlog.replay.timeline.summary import render_summary
from kinlog.replay.timeline.timeline import Timeline
from kinlog.schemas.errors import MissingExtraError

__all__ = ["timeline_command"]

_file = click.Path(path_type=Path, dir_okay=False)


@click.command("timeline")
@run_argument()
@click.option(
    "-o",
    "--output",
    "page",
    type=_file,
    help="Write an HTML page that needs no network: zoom, search, hover.",
)
@click.option("--png", type=_file, help='Write a picture for a report. Needs: pip install "kinlog[plot]".')
@click.option(
    "--perfetto", type=_file, help="Write a trace for ui.perfetto.dev; compressed, if its name ends with .gz."
)
@json_option("Print the summary as JSON instead of text.")
def timeline_command(
    run: Path, page: Path | None, png: Path | None, perfetto: Path | None, as_json: bool
) -> None:
    """Draw a run: when each attempt ran and what became of it, steps, checkpoints, kills and restarts.

    Prints the figures of the picture. What is asked for is written and replaces what was there.

    \b
    Example
      kinlog timeline runs/first -o first.html
      kinlog timeline runs/first --png first.png --perfetto first.json.gz
      kinlog timeline runs/first --json | jq .attempts.tokens_redone
    """
    # What is missing is said before a long log is read.
    draw = _drawer() if png is not None else None
    timeline = build_timeline(scan_log(locate_run(run).log))
    written: dict[Path, bytes] = {}
    if page is not None:
        written[page] = render_page(timeline).encode()
    if png is not None and draw is not None:
        written[png] = draw(timeline)
    if perfetto is not None:
        trace = render_trace(timeline).encode()
        written[perfetto] = gzip.compress(trace, compresslevel=6) if perfetto.suffix == ".gz" else trace
    for path, content in written.items():
        replace_durably(LocalStore(), path, content)
    if as_json:
        echo_json(timeline.summary)
        return
    click.echo(render_summary(timeline.summary))
    if written:
        click.echo("")
    for path, content in written.items():
        click.echo(f"wrote {path}, {format_bytes(len(content))}")


def _drawer() -> Callable[[Timeline], bytes]:
    try:
        from kinlog.controller.timeline_png import draw_picture
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "PIL":
            raise
        raise MissingExtraError(
            'a picture needs Pillow, which is not installed. Install it with: pip install "kinlog[plot]"'
        ) from error
    return draw_picture
