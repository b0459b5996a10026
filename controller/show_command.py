"""``kinlog log show``: the events of a log, filtered, and followed while it grows. It needs the base install only."""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import click

from kinlog.controller.command_parameters import json_option, run_argument, time_value
from kinlog.controller.ctrl_c import sleep_until_ctrl_c
from kinlog.lineage.scan import scan_log
from kinlog.replay.inspection import locate_run
from kinlog.replay.rendering import LINE_COLUMNS, event_line, event_object
from kinlog.replay.selection import EventFilter, select_events
from kinlog.replay.watch.following import follow_events
from kinlog.schemas.events import EVENT_TYPES, RecordedEvent
from kinlog.schemas.reasons import Reason

__all__ = ["show_command"]

_POLL_S = 0.5


@click.command("show")
@run_argument()
@click.option("--group", "group_id", type=click.IntRange(min=0), help="Only this group, with its steps.")
@click.option("--generation", type=click.IntRange(min=0), help="Only this sibling of a group.")
@click.option(
    "--sample", "sample_id", metavar="ID", help="Only groups drawn from this sample of the dataset."
)
@click.option("--step", "train_step", type=click.IntRange(min=0), help="Only this optimizer step.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only this kind, such as sibling_sealed. Repeatable.",
)
@click.option(
    "--reason",
    "reasons",
    multiple=True,
    metavar="REASON",
    help="Only this reason, such as timeout. Repeatable.",
)
@click.option("--epoch", type=click.IntRange(min=1), help="Only this life of the run.")
@click.option("--from", "first_seq", type=click.IntRange(min=1), default=1, help="From this seq on.")
@click.option("--to", "last_seq", type=click.IntRange(min=1), help="Up to this seq, included.")
@click.option(
    "--since",
    "since_us",
    metavar="TIME",
    callback=time_value,
    help="Recorded at this time or later: ISO 8601, UTC.",
)
@click.option(
    "--until", "until_us", metavar="TIME", callback=time_value, help="Recorded at this time or earlier."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is recorded from now on. Ctrl-C ends it.")
@json_option("Print one JSON object a line, with every field.")
def show_command(
    run: Path,
    group_id: int | None,
    generation: int | None,
    sample_id: str | None,
    train_step: int | None,
    kinds: tuple[str, ...],
    reasons: tuple[str, ...],
    epoch: int | None,
    first_seq: int,
    last_seq: int | None,
    since_us: int | None,
    until_us: int | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Show events, oldest first. An event is shown if it fits every option.

    Text is cut at the edge of a terminal, and abbreviates long fields; --json has everything. The checksum of every frame
    that is read is verified; whether the events fit each other is for log verify to say.

    \b
    Exit codes
      0  shown, or ended by Ctrl-C

    \b
    Example
      kinlog log show runs/first --group 17
      kinlog log show runs/first --kind attempt_superseded --reason timeout
      kinlog log show runs/first --since 2026-01-31T22:00 --until 2026-01-31T22:05
      kinlog log show runs/first --sample sums/41 --json | head
      kinlog log show runs/first --follow --kind step_applied
    """
    _refuse_unknown("--kind", kinds, tuple(EVENT_TYPES))
    _refuse_unknown("--reason", reasons, tuple(reason.value for reason in Reason))
    selection = EventFilter(
        kinds=frozenset(kinds),
        group_id=group_id,
        sample_id=sample_id,
        generation=generation,
        train_step=train_step,
        reasons=frozenset(Reason(reason) for reason in reasons),
        epoch=epoch,
        first_seq=first_seq,
        last_seq=last_seq,
        since_us=since_us,
        until_us=until_us,
    )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not as_json else None
    log = locate_run(run).log
    if not follow:
        _show(_records(log, selection), as_json=as_json, width=width)
        return
    with suppress(KeyboardInterrupt), sleep_until_ctrl_c() as sleep:
        records = follow_events(log, selection, pause=lambda: sleep(_POLL_S), tell=_tell)
        _show(records, as_json=as_json, width=width)


def _show(records: Iterable[RecordedEvent], *, as_json: bool, width: int | None) -> None:
    if not as_json:
        click.echo(LINE_COLUMNS[:width])
    for record in records:
        line = json.dumps(event_object(record), ensure_ascii=False) if as_json else event_line(record)
        click.echo(line[:width])


def _records(log: Path, selection: EventFilter) -> Iterator[RecordedEvent]:
    scan = scan_log(log)
    if scan.base is not None:
        _tell(f"the events up to seq {scan.first_seq - 1} were dropped (log.history: drop)")
    return select_events(scan, selection)


def _tell(sentence: str) -> None:
    click.echo(sentence, err=True)


def _refuse_unknown(option: str, wanted: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in wanted:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of: {', '.join(known)}", param_hint=option)
