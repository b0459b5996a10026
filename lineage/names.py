"""The names of a log's files, and which of them stand for others.

A log is made of segments; of compacted segments, each of which stands for a run of them; and of at most one base, which
stands for everything from the beginning. Names say what they stand for, so that a file that another one has replaced, and
that a crash left behind, is known without being read.
"""

from collections.abc import Collection, Iterable
from itertools import count
from typing import Literal, NamedTuple

from kinlog.lineage.segment import parse_segment_name

__all__ = [
    "QUARANTINE_NAME",
    "TEMPORARY_PREFIX",
    "TRASH_NAME",
    "LogFile",
    "base_name",
    "compacted_name",
    "current_files",
    "log_files",
    "numbered_name",
]

QUARANTINE_NAME = "quarantine"
TRASH_NAME = "trash"

#: A compacted segment or a base is built under such a name; the rename to its own is what commits it.
TEMPORARY_PREFIX = ".building."


class LogFile(NamedTuple):
    """A file of a log, and the segments that it is or stands for, by (epoch, index). Sorts in the order of history."""

    first: tuple[int, int]
    last: tuple[int, int]
    kind: Literal["base", "compacted", "segment"]
    name: str

    def stands_for(self, other: "LogFile") -> bool:
        """Whether everything in ``other`` is in this file as well."""
        if self.kind == "segment" or self.name == other.name:
            return False
        return self.first <= other.first and other.last <= self.last


def compacted_name(first: tuple[int, int], last: tuple[int, int]) -> str:
    """Return the file name of what stands for the segments from ``first`` to ``last``, each (epoch, index)."""
    return f"compacted-{first[0]:08d}-{first[1]:08d}-{last[0]:08d}-{last[1]:08d}.arrows"


def base_name(last: tuple[int, int]) -> str:
    """Return the file name of what stands for all segments up to ``last``, (epoch, index)."""
    return f"base-{last[0]:08d}-{last[1]:08d}.kinlog"


def log_files(names: Iterable[str]) -> list[LogFile]:
    """Return the files of a log among ``names``, in the order of history."""
    return sorted(file for name in names if (file := _parse(name)) is not None)


def current_files(files: Iterable[LogFile]) -> tuple[list[LogFile], list[LogFile]]:
    """Return the files that make up the log, and those that another one has replaced."""
    files = list(files)
    standing = [file for file in files if file.kind != "segment"]
    current: list[LogFile] = []
    replaced: list[LogFile] = []
    for file in files:
        (replaced if any(other.stands_for(file) for other in standing) else current).append(file)
    return current, replaced


def numbered_name(stem: str, taken: Collection[str]) -> str:
    """Return the stem with the first number that makes it a name not ``taken``: a crash may have lost any of them."""
    return next(name for number in count() if (name := f"{stem}.{number}") not in taken)


def _parse(name: str) -> LogFile | None:
    segment = parse_segment_name(name)
    if segment is not None:
        return LogFile(segment, segment, "segment", name)
    kind, *parts = name.partition(".")[0].split("-")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return None
    match kind, [int(part) for part in parts]:
        case "base", [epoch, index]:
            file = LogFile((0, 0), (epoch, index), "base", base_name((epoch, index)))
        case "compacted", [first_epoch, first_index, last_epoch, last_index]:
            first, last = (first_epoch, first_index), (last_epoch, last_index)
            file = LogFile(first, last, "compacted", compacted_name(first, last))
        case _:
            return None
    return file if file.name == name else None
