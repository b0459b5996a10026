"""A point in time on the command line."""

import click

from kinlog.replay.times import parse_time_us

__all__ = ["time_value"]


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
