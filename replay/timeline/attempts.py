"""Every attempt of a run as one row of a table: when it ran, on which worker, how it ended, and why.

The table is held in columns of integers, so that a run of millions of attempts fits into memory.
"""

from array import array
from collections.abc import Iterable
from enum import IntEnum
from heapq import heappop, heappush

from kinlog.schemas.reasons import Reason

__all__ = ["REASONS", "UNKNOWN_TOKENS", "AttemptTable", "Outcome", "pack_slots"]

#: What the columns ``reason`` and ``late_reason`` count from 1; 0 is none.
REASONS: tuple[Reason, ...] = tuple(Reason)

UNKNOWN_TOKENS = -1


class Outcome(IntEnum):
    """What became of an attempt by the end of the log."""

    TRAINED = 0
    """Sealed, and an applied step of the surviving history was trained on it."""
    WAITING = 1
    """Sealed; its group is alive."""
    RUNNING = 2
    """In flight at the end of the log."""
    SUPERSEDED = 3
    """Given up before it was sealed."""
    REDONE = 4
    """Sealed, then given up: finished work that was lost."""
    LATE = 5
    """Given up before it was sealed, by itself or with its group, and its result came after that: rejected."""
    DROPPED = 6
    """Its group was dropped."""
    PARKED = 7
    """Its group is parked."""

    @property
    def words(self) -> str:
        """What a legend calls it."""
        return _WORDS[self]


_WORDS = {
    Outcome.TRAINED: "sealed and trained on",
    Outcome.WAITING: "sealed, waiting",
    Outcome.RUNNING: "running at the end",
    Outcome.SUPERSEDED: "superseded",
    Outcome.REDONE: "sealed, then superseded",
    Outcome.LATE: "result rejected late",
    Outcome.DROPPED: "dropped with its group",
    Outcome.PARKED: "parked with its group",
}


class AttemptTable:
    """Attempts in the order in which they were dispatched. Times are microseconds since 1970-01-01 UTC, 0 where there is none."""

    def __init__(self) -> None:
        self.group_id = array("q")
        self.generation = array("q")
        self.attempt = array("q")
        self.worker = array("q")
        """Place in the timeline's workers."""
        self.slot = array("q")
        """Which of its worker's rows it is drawn in: attempts that overlap have different ones."""
        self.begin_us = array("q")
        self.end_us = array("q")
        """When it was sealed or given up, or when the life ended that it was running in."""
        self.verdict_us = array("q")
        """When it was superseded, or its group was dropped or parked."""
        self.late_us = array("q")
        self.begin_seq = array("q")
        """Of its dispatch; 0 when that is in dropped history."""
        self.seal_seq = array("q")
        self.verdict_seq = array("q")
        self.late_seq = array("q")
        self.outcome = array("q")
        self.superseded = array("b")
        """Whether it was given up by itself, and not with its group."""
        self.reason = array("q")
        """Why it was superseded or its group left: a place in ``REASONS``, from 1."""
        self.late_reason = array("q")
        self.detail = array("q")
        """Place in the timeline's details; 0 is none."""
        self.tokens = array("q")
        """Completion tokens, or ``UNKNOWN_TOKENS``."""
        self.weight_version = array("q")
        """At its dispatch; once it is sealed, the oldest weights that generated a token of it."""
        self._zero_at_first = (
            self.slot, self.end_us, self.verdict_us, self.late_us, self.seal_seq, self.verdict_seq, self.late_seq,
            self.superseded, self.reason, self.late_reason, self.detail,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.group_id)

    def add(
        self,
        *,
        group_id: int,
        generation: int,
        attempt: int,
        worker: int,
        begin_us: int,
        begin_seq: int,
        weight_version: int,
    ) -> int:
        """Append an attempt that is running from ``begin_us`` on, and return its place."""
        self.group_id.append(group_id)
        self.generation.append(generation)
        self.attempt.append(attempt)
        self.worker.append(worker)
        self.begin_us.append(begin_us)
        self.begin_seq.append(begin_seq)
        self.outcome.append(Outcome.RUNNING)
        self.tokens.append(UNKNOWN_TOKENS)
        self.weight_version.append(weight_version)
        for column in self._zero_at_first:
            column.append(0)
        return len(self) - 1

    def outcome_of(self, place: int) -> Outcome:
        """Return what became of the attempt."""
        return Outcome(self.outcome[place])

    def reason_of(self, place: int) -> Reason | None:
        """Return why the attempt was superseded, or its group left."""
        return REASONS[self.reason[place] - 1] if self.reason[place] else None

    def late_reason_of(self, place: int) -> Reason | None:
        """Return why its late result was rejected."""
        return REASONS[self.late_reason[place] - 1] if self.late_reason[place] else None


def pack_slots(rows: Iterable[tuple[int, int, int]]) -> tuple[list[int], dict[int, int]]:
    """Give each span the lowest row of its lane that is free when it begins.

    Parameters
    ----------
    rows:
        (lane, begin, end) of each span, by begin.

    Returns
    -------
    The row of each span, from 0, and how many rows each lane needs.
    """
    slots: list[int] = []
    busy: dict[int, list[tuple[int, int]]] = {}
    free: dict[int, list[int]] = {}
    needed: dict[int, int] = {}
    for lane, begin, end in rows:
        running, idle = busy.setdefault(lane, []), free.setdefault(lane, [])
        while running and running[0][0] <= begin:
            heappush(idle, heappop(running)[1])
        if idle:
            slot = heappop(idle)
        else:
            slot = needed.get(lane, 0)
            needed[lane] = slot + 1
        heappush(running, (end, slot))
        slots.append(slot)
    return slots, needed
