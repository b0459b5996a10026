"""The commands about what was trained on: ``kinlog examples`` and ``kinlog diff``. They need the base install only."""

from pathlib import Path
from typing import Any

import click

from kinlog.controller.command_parameters import echo_json, json_option, run_argument
from kinlog.controller.example_text import render_text, text_of_step
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.replay.examples.difference import compare_examples, render_comparison
from kinlog.replay.examples.steps import StepExamples, step_examples, trained_examples
from kinlog.replay.inspection import locate_run
from kinlog.replay.plain_text import format_count, format_time, render_table
from kinlog.replay.rendering import to_json_value

__all__ = ["diff_command", "examples_command"]


@click.command("examples")
@run_argument()
@click.option("--step", type=click.IntRange(min=1), required=True, help="The optimizer step.")
@click.option("--text", is_flag=True, help="Also show the text, where the rows or the dataset are at hand.")
@json_option()
def examples_command(run: Path, step: int, text: bool, as_json: bool) -> None:
    """Show what an optimizer step was trained on: its groups in order, and their siblings.

    A step that a restart undid is not shown; the one that was applied in its place is.

    The log has no text. --text takes it from the run's row journal, which has the newest steps' tokens, and prompts from
    the dataset if it is installed; tokens are shown by number where the run's tokenizer is not.

    \b
    Exit codes
       0  shown
      27  the step is not on the surviving history

    \b
    Example
      kinlog examples runs/first --step 7
      kinlog examples runs/first --step 7 --text
    """
    directory = locate_run(run)
    found = step_examples(scan_log(directory.log), step)
    texts = text_of_step(directory, found) if text else ()
    if as_json:
        document: Any = to_json_value(found)
        echo_json(document | {"text": texts} if text else document)
        return
    click.echo(_render(found))
    if text:
        click.echo(f"\n{render_text(texts)}")


@click.command("diff")
@run_argument("run_a")
@run_argument("run_b")
@click.option("--all", "everything", is_flag=True, help="List every difference, and not only the first ten.")
@json_option()
def diff_command(run_a: Path, run_b: Path, everything: bool, as_json: bool) -> None:
    """Compare what two runs were trained on, step by step. Exit code 1 if they differ.

    \b
    Example
      kinlog diff runs/first runs/second
    """
    scans = [_scan(run) for run in (run_a, run_b)]
    comparison = compare_examples(*(trained_examples(scan.events(), scan.beginning()) for scan in scans))
    if as_json:
        document: Any = to_json_value(comparison)
        echo_json({"same": comparison.same, **document})
    else:
        click.echo(render_comparison(comparison, limit=None if everything else 10))
        for run, scan in zip((run_a, run_b), scans, strict=True):
            if _dropped(scan):
                click.echo(f"{run}: steps may be missing{_dropped(scan)}")
    if not comparison.same:
        click.get_current_context().exit(1)


def _scan(run: Path) -> LogScan:
    return scan_log(locate_run(run).log)


def _dropped(scan: LogScan) -> str:
    if scan.first_seq <= 1:
        return ""
    return f": its log's first {format_count(scan.first_seq - 1, 'event')} were dropped"


def _render(step: StepExamples) -> str:
    siblings = [(group, sibling) for group in step.groups for sibling in group.siblings]
    title = (
        f"step {step.train_step}, applied at seq {step.seq}, {format_time(step.time_us)}, by weights "
        f"{step.weight_version}: "
        f"{format_count(len(step.groups), 'group')}, {format_count(len(siblings), 'sibling')}"
    )
    rows = [
        (
            str(group.group_id),
            group.prompt.sample_id,
            str(group.prompt.draw_index),
            group.prompt.task_name,
            str(sibling.generation),
            str(sibling.attempt),
            sibling.validity.value,
            f"{sibling.raw_reward:.4f}",
            f"{sibling.shaped_reward:.4f}",
            str(sibling.model_calls),
            f"{sibling.prompt_tokens:,}",
            f"{sibling.completion_tokens:,}",
            sibling.finish_reason.value,
            _versions(sibling.min_weight_version, sibling.max_weight_version),
            str(group.staleness),
        )
        for group, sibling in siblings
    ]
    titles = (
        "group",
        "sample",
        "draw",
        "task",
        "sibling",
        "attempt",
        "validity",
        "raw reward",
        "trained on",
        "calls",
        "prompt",
        "completion",
        "finish",
        "weights",
        "staleness",
    )
    return f"{title}\n\n{render_table(titles, rows, right=(0, 2, 4, 5, 7, 8, 9, 10, 11, 14), indent=2)}"


def _versions(oldest: int, newest: int) -> str:
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"
