"""What several commands have in common: the run that they read, JSON instead of text, and points in time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kinlog.replay.rendering import to_json_value
from kinlog.replay.times import parse_time_us

__all__ = ["echo_json", "json_option", "run_argument", "time_value"]

Command = TypeVar("Command", bound=Callable[..., Any] | click.Command)


def run_argument(name: str = "run") -> Callable[[Command], Command]:
    """Declare the argument RUN: a run's directory, or its log directory."""
    return click.argument(name, metavar=name.upper(), type=click.Path(path_type=Path))


def json_option(help_text: str = "Print JSON instead of text.") -> Callable[[Command], Command]:
    """Declare ``--json``, which the command gets as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def echo_json(value: object) -> None:
    """Print a value as one JSON document, with every field named."""
    click.echo(json.dumps(to_json_value(value), indent=2, ensure_ascii=False))


def time_value(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return an option's ISO 8601 time, UTC unless it says otherwise, in microseconds since 1970-01-01 UTC.

    Raises
    ------
    click.BadParameter
        It is none.
    """
    if value is None:
        return None
    try:
        return parse_time_us(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no time such as 2026-01-31T23:59:59, with an offset or in UTC", ctx, param
        ) from None
