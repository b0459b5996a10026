"""The views of attempts and siblings, of groups whose histories are complete."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat

import pyarrow as pa
import pyarrow.compute as pc

from kinlog.replay.views.group_history import UNKNOWN_SEQ, GroupEvents
from kinlog.replay.views.matching import Matches, match_rows, one_array
from kinlog.schemas import events as e

__all__ = ["ATTEMPT_PAYLOADS", "SIBLING_EVENTS", "SIBLING_PAYLOADS", "Attempts", "Siblings", "known_seq"]

_GROUP = ("group_id",)
_SIBLING = ("group_id", "generation")
_ATTEMPT = ("group_id", "generation", "attempt")

#: What a sibling's story is made of.
SIBLING_EVENTS: tuple[type[e.Event], ...] = (
    e.GroupReserved,
    e.SiblingDispatched,
    e.SiblingSealed,
    e.AttemptSuperseded,
    e.GroupDropped,
    e.GroupParked,
)

#: Columns that seals have in their payloads.
_SEALED = {
    name: ((e.SiblingSealed, name),)
    for name in (
        "validity",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "model_calls",
        "raw_reward",
        "shaped_reward",
        "max_weight_version",
        "resumed_tokens",
    )
}

#: Column of the view -> which payloads it needs decoded.
ATTEMPT_PAYLOADS: Mapping[str, Sequence[tuple[type[e.Event], str]]] = {
    **_SEALED,
    "worker": ((e.SiblingDispatched, "worker"),),
    "seed": ((e.SiblingDispatched, "seed"),),
    "resumes_attempt": ((e.SiblingDispatched, "resumes_attempt"),),
    "detail": ((e.AttemptSuperseded, "detail"), (e.GroupDropped, "detail"), (e.GroupParked, "detail")),
    "late_tokens": ((e.LateResultRejected, "completion_tokens"),),
}
SIBLING_PAYLOADS: Mapping[str, Sequence[tuple[type[e.Event], str]]] = _SEALED


class Attempts:
    """The attempts of complete groups. A column is computed when it is asked for."""

    def __init__(self, events: GroupEvents) -> None:
        self._dispatched = events[e.SiblingDispatched]
        self._events = events

    @property
    def num_rows(self) -> int:
        return int(self._dispatched.num_rows)

    @cached_property
    def sealed(self) -> Matches:
        return self._match(e.SiblingSealed, _ATTEMPT)

    @cached_property
    def superseded(self) -> Matches:
        return self._match(e.AttemptSuperseded, _ATTEMPT)

    @cached_property
    def _late(self) -> Matches:
        return self._match(e.LateResultRejected, _ATTEMPT)

    @cached_property
    def _parked(self) -> Matches:
        return self._match(e.GroupParked, _GROUP)

    @cached_property
    def _dropped(self) -> Matches:
        return self._match(e.GroupDropped, _GROUP)

    @cached_property
    def abandoned(self) -> pa.Array:
        """Whether the group left while it ran."""
        ended = pc.or_(self.sealed.found, self.superseded.found)
        return pc.and_not(pc.or_(self._parked.found, self._dropped.found), ended)

    def _match(self, event_type: type[e.Event], keys: tuple[str, ...]) -> Matches:
        return match_rows(self._dispatched, self._events[event_type], keys)

    def column(self, name: str) -> pa.Array:
        """Return a column of the view, in the order in which the attempts were dispatched."""
        if name in _SEALED:
            return self.sealed.column(name)
        of = _ATTEMPT_COLUMNS.get(name)
        return of(self) if of is not None else one_array(self._dispatched.column(name))

    def dispatched(self, name: str) -> pa.Array:
        """Return a column of the dispatch, null where that is in dropped history."""
        return _known(one_array(self._dispatched.column(name)), self._dispatched.column("seq"))

    @property
    def outcome(self) -> pa.Array:
        cases = pa.StructArray.from_arrays(
            [self.superseded.found, self.sealed.found, self.abandoned], names=["0", "1", "2"]
        )
        return pc.case_when(cases, "superseded", "sealed", "abandoned", "running")

    def why(self, name: str) -> pa.Array:
        """Return what the event says that ended it without a result that stands."""
        by_group = pc.coalesce(self._parked.column(name), self._dropped.column(name))
        return pc.coalesce(self.superseded.column(name), _where(self.abandoned, by_group))

    def ended(self, name: str) -> pa.Array:
        by_group = pc.coalesce(self._parked.column(name), self._dropped.column(name))
        own = _where(self.superseded.found, self.superseded.column(name), self.sealed.column(name))
        return _where(self.abandoned, by_group, own)

    def late(self, name: str) -> pa.Array:
        return self._late.column(name)


_ATTEMPT_COLUMNS: dict[str, Callable[[Attempts], pa.Array]] = {
    "outcome": lambda a: a.outcome,
    "reason": lambda a: a.why("reason"),
    "detail": lambda a: a.why("detail"),
    "worker": lambda a: a.dispatched("worker"),
    "seed": lambda a: a.dispatched("seed"),
    "resumes_attempt": lambda a: a.dispatched("resumes_attempt"),
    "epoch": lambda a: a.dispatched("epoch"),
    "dispatched_weight_version": lambda a: a.dispatched("weight_version"),
    "dispatched_seq": lambda a: a.dispatched("seq"),
    "dispatched_at": lambda a: a.dispatched("time"),
    "sealed_seq": lambda a: known_seq(a.sealed.column("seq")),
    "sealed_at": lambda a: a.sealed.column("time"),
    "min_weight_version": lambda a: a.sealed.column("weight_version"),
    "ended_seq": lambda a: known_seq(a.ended("seq")),
    "ended_at": lambda a: a.ended("time"),
    "late_seq": lambda a: a.late("seq"),
    "late_tokens": lambda a: a.late("completion_tokens"),
}


class Siblings:
    """The siblings of complete groups. A column is computed when it is asked for."""

    def __init__(self, events: GroupEvents) -> None:
        self._events = events
        self._attempts = Attempts(events)
        reserved = events[e.GroupReserved]
        group_ids, sizes = (
            reserved.column("group_id").to_pylist(),
            reserved.column("num_generations").to_pylist(),
        )
        self._siblings = pa.table(
            {
                "group_id": pa.array(
                    chain.from_iterable(repeat(g, n) for g, n in zip(group_ids, sizes, strict=True)),
                    pa.int64(),
                ),
                "generation": pa.array(chain.from_iterable(map(range, sizes)), pa.int32()),
            }
        )

    @property
    def num_rows(self) -> int:
        return int(self._siblings.num_rows)

    @cached_property
    def _newest(self) -> Matches:
        """The newest attempt, with whatever of it was asked for."""
        dispatched = self._events[e.SiblingDispatched]
        places = pa.array(range(dispatched.num_rows), pa.int64())
        return match_rows(self._siblings, dispatched.append_column("place", places), _SIBLING, last=True)

    @cached_property
    def _redone(self) -> Matches:
        return match_rows(self._siblings, self._events[e.AttemptSuperseded], _SIBLING, last=True)

    @cached_property
    def _standing(self) -> pa.Array:
        """Whether the newest attempt's result stands."""
        stands = pc.and_not(self._attempts.sealed.found, self._attempts.superseded.found)
        return pc.fill_null(stands.take(self._newest.column("place")), False)

    def of_newest(self, name: str) -> pa.Array:
        """Return a column of the newest attempt, null before the first."""
        return self._attempts.column(name).take(self._newest.column("place"))

    def column(self, name: str) -> pa.Array:
        """Return a column of the view."""
        of = _SIBLING_COLUMNS.get(name)
        if of is not None:
            return of(self)
        if name in self._siblings.column_names:
            return one_array(self._siblings.column(name))
        return _where(self._standing, self.of_newest(name))

    @property
    def state(self) -> pa.Array:
        outcome = pc.fill_null(self.of_newest("outcome"), "waiting")
        return pc.if_else(pc.equal(outcome, "superseded"), "waiting", outcome)

    @property
    def attempts(self) -> pa.Array:
        dispatched = self._events[e.SiblingDispatched]
        counted = dispatched.group_by(list(_SIBLING)).aggregate([("attempt", "count")])
        matches = match_rows(self._siblings, counted, _SIBLING)
        return pc.fill_null(matches.column("attempt_count"), 0).cast(pa.int64())

    @property
    def redone_reason(self) -> pa.Array:
        return self._redone.column("reason")


_SIBLING_COLUMNS: dict[str, Callable[[Siblings], pa.Array]] = {
    "state": lambda s: s.state,
    "attempt": lambda s: pc.fill_null(s.of_newest("attempt"), 0),
    "attempts": lambda s: s.attempts,
    "redone_reason": lambda s: s.redone_reason,
}


def known_seq(seqs: pa.Array) -> pa.Array:
    """Return null for what happened in dropped history."""
    return _known(seqs, seqs)


def _known(values: pa.Array, seqs: pa.ChunkedArray | pa.Array) -> pa.Array:
    array = seqs if isinstance(seqs, pa.Array) else one_array(seqs)
    return _where(pc.not_equal(array, UNKNOWN_SEQ), values)


def _where(condition: pa.Array, values: pa.Array, otherwise: pa.Array | None = None) -> pa.Array:
    return pc.if_else(condition, values, pa.scalar(None, values.type) if otherwise is None else otherwise)
