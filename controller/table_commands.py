"""The commands that show a run as tables: ``kinlog sql`` and ``kinlog export``."""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Literal

import click
import msgspec

from kinlog.controller.command_parameters import echo_json, json_option, run_argument
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.replay.inspection import locate_run
from kinlog.replay.plain_text import format_bytes, format_count, render_table
from kinlog.replay.views.catalogue import VIEWS, describe_views
from kinlog.replay.views.export import EXPORT_FORMATS, export_views
from kinlog.replay.views.reading import dropped_note
from kinlog.schemas.errors import MissingExtraError

__all__ = ["export_command", "sql_command"]

#: More rows are no text for people.
_MAX_TEXT_ROWS = 1000


def _show_views(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        rows = describe_views()
        parts = [f"{view.name}: {view.meaning}" for view in VIEWS.values()]
        table = render_table(("view", "column", "type", "meaning"), rows)
        click.echo("\n".join(parts) + f"\n\n{table}")
        context.exit()


@click.command("sql")
@run_argument()
@click.argument("query", metavar="QUERY")
@json_option("Print a JSON array with an object for each row.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, with a header.")
@click.option(
    "--allow-files", is_flag=True, help="Let the query read and write files, and spill to disk what is large."
)
@click.option(
    "--views",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_views,
    help="List the views with their columns, and exit.",
)
def sql_command(run: Path, query: str, as_json: bool, as_csv: bool, allow_files: bool) -> None:
    """Ask a run anything in SQL. QUERY is read from the standard input if it is '-'.

    \b
    The views (--views lists their columns)
      events       every event of the log
      groups       every group that was drawn, and what became of it
      siblings     every sibling, as it is at the end of the log
      attempts     every attempt, and why it was redone or dropped
      steps        every optimizer step; surviving: no restart undid it
      step_groups  every group of every step, in order
      checkpoints  every checkpoint, committed or given up
      lives        every life of the controller

    A query reads the log, of which views and columns as it names, and nothing else. The rows have the order that it
    asks for. Times are UTC. Text has the first 1,000 rows.

    \b
    Exit codes
       0  the rows are printed
      20  DuckDB is not installed: pip install "kinlog[sql]"
      26  the query cannot be answered; the message says why

    \b
    Example
      kinlog sql runs/first "select reason, count(*) from attempts group by all"
      kinlog sql runs/first "select train_step, avg(shaped_reward) from step_groups join siblings using (group_id) where surviving group by all order by all"
      kinlog sql runs/first "select worker, median(ended_at - dispatched_at) from attempts where outcome = 'sealed' group by all"
      kinlog sql runs/first "select * from groups where phase = 'parked'" --csv > parked.csv
      echo "from lives" | kinlog sql runs/first - --json
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv are two ways of printing the same: choose one")
    engine = _engine()
    asked = sys.stdin.read() if query == "-" else query
    scan = _scan(run)
    answer = engine.run_query(scan, asked, allow_files=allow_files)
    show = _show_json if as_json else _show_csv if as_csv else _show_text
    show(answer.columns, answer.rows)


@click.command("export")
@run_argument()
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory that the files go to.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(list(EXPORT_FORMATS)),
    default="parquet",
    show_default=True,
    help="What is written.",
)
@click.option(
    "--view",
    "names",
    multiple=True,
    type=click.Choice(list(VIEWS)),
    help="Only this view. Repeatable.",
)
@json_option()
def export_command(
    run: Path,
    target: Path,
    file_format: Literal["parquet", "jsonl", "jsonl.zst"],
    names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a run's views as files, one for each: Parquet, or JSON Lines. 'kinlog sql --views' says what is in them.

    A file that has its name is complete. What exists is not overwritten: exit code 1.

    \b
    Example
      kinlog export runs/first -o exported
      kinlog export runs/first -o exported --format jsonl.zst --view attempts --view groups
    """
    exported = export_views(
        _scan(run), target, names=tuple(dict.fromkeys(names)) or tuple(VIEWS), file_format=file_format
    )
    if as_json:
        echo_json(exported)
        return
    rows = [(str(one.path), f"{one.rows:,}", format_bytes(one.size_bytes)) for one in exported]
    click.echo(render_table(("file", "rows", "size"), rows, right=(1, 2)))


def _scan(run: Path) -> LogScan:
    scan = scan_log(locate_run(run).log)
    note = dropped_note(scan)
    if note:
        click.echo(note, err=True)
    return scan


def _engine() -> ModuleType:
    try:
        from kinlog.controller import sql_engine
    except ModuleNotFoundError as error:
        if error.name != "duckdb":
            raise
        raise MissingExtraError(
            'SQL needs duckdb, which is not installed. Install it with: pip install "kinlog[sql]"'
        ) from error
    return sql_engine


# ---- printing ----------------------------------------------------------------------------------------------------


def _show_text(columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    shown = list(islice(rows, _MAX_TEXT_ROWS))
    right = [
        place
        for place in range(len(columns))
        if all(isinstance(row[place], int | float | Decimal | NoneType) for row in shown)
    ]
    click.echo(render_table(columns, [[_text(value) for value in row] for row in shown], right=right))
    if next(rows, None) is not None:
        click.echo(
            f"and more than these {format_count(_MAX_TEXT_ROWS, 'row')}: --csv and --json print all", err=True
        )


def _show_csv(columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow("" if value is None else _cell(value) for value in row)
        if line.tell() > 65_536:
            _flush(line)
    _flush(line)


def _flush(line: io.StringIO) -> None:
    click.echo(line.getvalue(), nl=False)
    line.seek(0)
    line.truncate()


def _show_json(columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    before = "["
    for row in rows:
        named = dict(zip(columns, map(_plain, row), strict=True))
        click.echo(f"{before}\n  {msgspec.json.encode(named).decode()}", nl=False)
        before = ","
    click.echo("[]" if before == "[" else "\n]")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S.%f}"[:-3]
    return str(_cell(value))


def _cell(value: Any) -> Any:
    plain = _plain(value)
    return msgspec.json.encode(plain).decode() if isinstance(plain, list | dict) else plain


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
