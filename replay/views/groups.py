"""The view of groups, of those whose histories are complete."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from kinlog.replay.views.attempts import SIBLING_EVENTS, Attempts, known_seq
from kinlog.replay.views.group_history import GroupEvents
from kinlog.replay.views.matching import Matches, match_rows, one_array
from kinlog.schemas import events as e

__all__ = ["GROUP_EVENTS", "GROUP_PAYLOADS", "Groups"]

_GROUP = ("group_id",)

#: What a group's story is made of.
GROUP_EVENTS: tuple[type[e.Event], ...] = (
    *SIBLING_EVENTS,
    e.GroupAdmitted,
    e.FinalizeStarted,
    e.GroupFinalized,
    e.FinalizeFailed,
    e.GroupClaimed,
    e.StepApplied,
)

#: Columns that reservations have in their payloads.
_RESERVED = (
    "task_name",
    "agent_name",
    "sample_id",
    "draw_index",
    "dataset_epoch",
    "num_generations",
    "granularity",
)

#: Column of the view -> which payloads it needs decoded.
GROUP_PAYLOADS: Mapping[str, Sequence[tuple[type[e.Event], str]]] = {
    **{name: ((e.GroupReserved, name),) for name in _RESERVED},
    "phase": ((e.GroupReserved, "num_generations"),),
    "detail": ((e.GroupDropped, "detail"), (e.GroupParked, "detail")),
    "completion_tokens": ((e.SiblingSealed, "completion_tokens"),),
    "valid_fraction": ((e.GroupFinalized, "valid_fraction"),),
}


class Groups:
    """Complete groups. A column is computed when it is asked for."""

    def __init__(self, events: GroupEvents) -> None:
        self._events = events
        self._reserved = events[e.GroupReserved]

    @property
    def num_rows(self) -> int:
        return int(self._reserved.num_rows)

    def column(self, name: str) -> pa.Array:
        """Return a column of the view, in the order in which the groups were reserved."""
        of = _COLUMNS.get(name)
        return of(self) if of is not None else one_array(self._reserved.column(name))

    def _last(self, event_type: type[e.Event]) -> Matches:
        return match_rows(self._reserved, self._events[event_type], _GROUP, last=True)

    @cached_property
    def _parked(self) -> Matches:
        return self._last(e.GroupParked)

    @cached_property
    def _dropped(self) -> Matches:
        return self._last(e.GroupDropped)

    @cached_property
    def _finalized(self) -> Matches:
        return self._last(e.GroupFinalized)

    @cached_property
    def _is_published(self) -> pa.Array:
        """Whether no failed finalize took the rows back."""
        return pc.greater(_seq(self._finalized), _seq(self._last(e.FinalizeFailed)))

    @cached_property
    def _applied(self) -> Matches:
        """The step of the surviving history that was trained on it."""
        steps = self._events[e.StepApplied]
        return match_rows(self._reserved, steps.filter(steps.column("surviving")), _GROUP, last=True)

    def left(self, name: str) -> pa.Array:
        return pc.coalesce(self._dropped.column(name), self._parked.column(name))

    def applied(self, name: str) -> pa.Array:
        return self._applied.column(name)

    def published(self, name: str) -> pa.Array:
        values = self._finalized.column(name)
        return pc.if_else(self._is_published, values, pa.scalar(None, values.type))

    def reserved(self, name: str) -> pa.Array:
        return one_array(self._reserved.column(name))

    @cached_property
    def _standing(self) -> pa.Table:
        """The results that stand, of all groups."""
        attempts = Attempts(self._events)
        names = ["group_id"] + ["completion_tokens"] * (
            "completion_tokens" in self._events[e.SiblingSealed].column_names
        )
        table = pa.table({name: attempts.column(name) for name in names})
        return table.filter(pc.and_not(attempts.sealed.found, attempts.superseded.found))

    def sum_of(self, table: pa.Table, column: str, how: str) -> pa.Array:
        """Return what a column amounts to for each group; 0 where the table has none of it."""
        grouped = table.group_by(list(_GROUP)).aggregate([(column, how)])
        return pc.fill_null(match_rows(self._reserved, grouped, _GROUP).column(f"{column}_{how}"), 0).cast(
            pa.int64()
        )

    @property
    def attempts(self) -> pa.Array:
        return self.sum_of(self._events[e.SiblingDispatched], "attempt", "count")

    @property
    def sealed_siblings(self) -> pa.Array:
        return self.sum_of(self._standing, "group_id", "count")

    @property
    def completion_tokens(self) -> pa.Array:
        return self.sum_of(self._standing, "completion_tokens", "sum")

    @property
    def times_undone(self) -> pa.Array:
        steps = self._events[e.StepApplied]
        return self.sum_of(steps.filter(pc.invert(steps.column("surviving"))), "train_step", "count")

    @property
    def phase(self) -> pa.Array:
        """Return the phase that the fold gives a group, or ``dropped``."""
        started = _seq(self._last(e.FinalizeStarted))
        ended = pc.max_element_wise(_seq(self._finalized), _seq(self._last(e.FinalizeFailed)))
        cases = {
            "dropped": self._dropped.found,
            "parked": self._parked.found,
            "applied": self._applied.found,
            "claimed": self._last(e.GroupClaimed).found,
            "finalized": pc.and_(self._is_published, pc.greater(ended, started)),
            "finalizing": pc.greater(started, ended),
            "ready": pc.equal(self.sealed_siblings, self.reserved("num_generations").cast(pa.int64())),
            "generating": self._last(e.SiblingDispatched).found,
            "admitted": self._last(e.GroupAdmitted).found,
        }
        conditions = pa.StructArray.from_arrays(list(cases.values()), names=list(cases))
        return pc.case_when(conditions, *cases, "reserved")


_NEVER = -1


def _seq(matches: Matches) -> pa.Array:
    return pc.fill_null(matches.column("seq"), _NEVER)


_COLUMNS: dict[str, Callable[[Groups], pa.Array]] = {
    "phase": lambda g: g.phase,
    "reason": lambda g: g.left("reason"),
    "detail": lambda g: g.left("detail"),
    "target_step": lambda g: g.reserved("train_step"),
    "reserved_seq": lambda g: known_seq(g.reserved("seq")),
    "reserved_at": lambda g: g.reserved("time"),
    "attempts": lambda g: g.attempts,
    "sealed_siblings": lambda g: g.sealed_siblings,
    "completion_tokens": lambda g: g.completion_tokens,
    "valid_fraction": lambda g: g.published("valid_fraction"),
    "finalized_seq": lambda g: known_seq(g.published("seq")),
    "finalized_at": lambda g: g.published("time"),
    "applied_step": lambda g: g.applied("train_step"),
    "place": lambda g: g.applied("place"),
    "applied_seq": lambda g: known_seq(g.applied("seq")),
    "applied_at": lambda g: g.applied("time"),
    "times_undone": lambda g: g.times_undone,
    "left_seq": lambda g: known_seq(g.left("seq")),
    "left_at": lambda g: g.left("time"),
}
