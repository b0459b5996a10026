"""Points in time as people write them, and as the log has them."""

from datetime import UTC, datetime

__all__ = ["parse_time_us"]


def parse_time_us(text: str) -> int:
    """Return an ISO 8601 time as microseconds since 1970-01-01 UTC. Without an offset it is UTC, as all times are shown.

    Raises
    ------
    ValueError
        It is no ISO 8601 time.
    """
    time = datetime.fromisoformat(text.removesuffix(" UTC"))
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    # Not by way of a float, which rounds microseconds.
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
