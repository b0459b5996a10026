"""Plain text for people: aligned columns that read as well in a log file as on a terminal."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta

__all__ = [
    "render_table",
    "render_sections",
    "render_paragraph",
    "render_counts",
    "format_count",
    "format_bytes",
    "utc_time",
    "format_time",
    "format_clock",
    "format_duration",
    "some",
]

_LINE_WIDTH = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def render_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: int = 0
) -> str:
    """Return rows under their titles, each column as wide as its widest cell.

    Parameters
    ----------
    titles:
        One for each column.
    rows:
        Cells as text; every row has as many as there are titles.
    right:
        Columns (from 0) that are aligned to the right: numbers.
    indent:
        Spaces before each line.
    """
    lines = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join(
        " " * indent
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def render_sections(sections: Sequence[Sequence[tuple[str, str]]], *, indent: int = 0) -> str:
    """Return ``name  value`` lines, the values aligned over all sections, with an empty line between sections.

    A value that is too long for a line of 100 characters goes on under its own beginning.
    """
    width = max((len(name) for section in sections for name, _ in section), default=0)
    return "\n\n".join(
        "\n".join(_fact(name.ljust(width), value, indent) for name, value in section) for section in sections
    )


def _fact(name: str, value: str, indent: int) -> str:
    begin = f"{' ' * indent}{name}  "
    return render_paragraph(value, first=begin, rest=" " * len(begin)).rstrip()


def render_paragraph(text: str, *, first: str = "", rest: str = "") -> str:
    """Return text in lines of at most 100 characters, unless a word is longer. Each begins with a prefix."""
    return (
        textwrap.fill(
            text,
            _LINE_WIDTH,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or first
    )


def render_counts(counts: Mapping[str, int]) -> str:
    """Return ``timeout 3, worker_lost 1``: the largest count first, then by name. ``none`` when there are none."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered if count) or "none"


def format_count(count: int, singular: str, plural: str | None = None) -> str:
    """Return ``1 group``, ``1,024 groups``."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def format_bytes(size_bytes: int) -> str:
    """Return ``812 B``, ``14.2 KiB``, ``3.0 GiB``."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def utc_time(time_us: int) -> datetime:
    """Return a wall-clock time (microseconds since 1970-01-01 UTC), to the microsecond."""
    return _EPOCH + timedelta(microseconds=time_us)  # not by way of a float, which rounds


def format_time(time_us: int) -> str:
    """Return a wall-clock time (microseconds since 1970-01-01 UTC) as ``2026-01-31 23:59:59 UTC``."""
    return f"{utc_time(time_us):%Y-%m-%d %H:%M:%S} UTC"


def format_clock(time_us: int) -> str:
    """Return the time of day of it, in UTC, as ``23:59:59.123``."""
    return f"{utc_time(time_us):%H:%M:%S.%f}"[:-3]


def format_duration(seconds: float) -> str:
    """Return ``12.3 s``, ``4.5 min``, ``2.1 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 60 else f"{minutes / 60:.1f} h"


def some(ids: Sequence[object]) -> str:
    """Return the first eight, and that there are more."""
    return ", ".join(str(i) for i in ids[:8]) + (", ..." if len(ids) > 8 else "")
