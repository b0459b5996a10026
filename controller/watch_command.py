"""The command that shows a run as it goes on: ``kinlog watch``. It needs the base install only, and only reads."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
from rich.live import Live
from rich.text import Text

from kinlog.controller.command_parameters import echo_json, json_option, run_argument
from kinlog.controller.ctrl_c import sleep_until_ctrl_c
from kinlog.controller.watch_text import render_view
from kinlog.replay.watch.run import WatchedRun
from kinlog.schemas.errors import RunNotFoundError

__all__ = ["watch_command"]

_REFRESH_S = 1.0


@click.command("watch")
@run_argument()
@click.option("--once", is_flag=True, help="Show how it is now, and end.")
@json_option("Print one JSON document with how it is now, and end.")
def watch_command(run: Path, once: bool, as_json: bool) -> None:
    """Show a run as it goes on: where it is, how fast, what is in flight, and what a kill would cost now.

    The view is refreshed each second, until Ctrl-C, also over the run's end, death and restart. Where the output is no
    terminal, it is shown once. Each refresh reads only what was appended to the log since.

    What was appended and may not be durable yet is told by the log's own marks, and each frame is marked durable by the
    next one. What is still in the controller's memory is not seen from outside.

    \b
    Example
      kinlog watch runs/first
      kinlog watch runs/first --json | jq .kill
    """
    if as_json:
        echo_json(WatchedRun(run).look())
    elif once or not sys.stdout.isatty():
        click.echo(render_view(WatchedRun(run).look()))
    else:
        with suppress(KeyboardInterrupt), sleep_until_ctrl_c() as sleep:
            _watch(run, sleep)


def _watch(run: Path, sleep: Callable[[float], None]) -> None:
    watched: WatchedRun | None = None
    with Live(Text(f"looking at {run}"), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            try:
                watched = watched or WatchedRun(run)
                text = f"{render_view(watched.look())}\n\nCtrl-C ends this view, not the run"
            except RunNotFoundError as error:
                watched, text = None, f"no run yet: {error}"
            live.update(Text(text), refresh=True)
            sleep(_REFRESH_S)
