"""Samplers: how far generation runs ahead of training, and which groups a step takes.

Each decision is a pure function of the projection, so a sampler has no state to save, and restores after any history.
Admission is in two phases: wait outside a cut until :meth:`Sampler.may_draw` says yes, then ask again inside the cut
that reserves.
"""

import importlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import SamplerSettings

__all__ = [
    "Draw",
    "Sampler",
    "EvictingSampler",
    "PacingSampler",
    "InOrder",
    "Windowed",
    "WeightFifo",
    "ReadyFirst",
    "build_sampler",
    "evictions",
    "may_start",
]


class Draw(NamedTuple):
    """Permission to draw one group."""

    train_step: int | None
    """The step that the group is drawn for, where the sampler fixes one."""


class Sampler(Protocol):
    """Decides about drawing and selecting."""

    def may_draw(self, p: Projection) -> Draw | None:
        """Return how the next group may be drawn now, ``None`` to wait. Permits are the buffer's business."""
        ...

    def select(self, p: Projection) -> tuple[int, ...] | None:
        """Return the groups of the next step, in order and at least one, ``None`` to wait for more."""
        ...

    def is_stale(self, p: Projection, group: GroupState) -> bool:
        """Whether the group must not be trained on any more."""
        ...


@runtime_checkable
class EvictingSampler(Sampler, Protocol):
    """A sampler that also bounds the replay buffer."""

    def evict(self, p: Projection, ready: Sequence[GroupState]) -> Iterable[int]:
        """Return which of the finalized groups leave the buffer. Enough for the next step must stay."""
        ...


@runtime_checkable
class PacingSampler(Sampler, Protocol):
    """A sampler that also says when a group that was drawn before a restart may go on."""

    def may_start(self, p: Projection, group: GroupState) -> bool:
        """Whether the weights are as new as those that the group was drawn for."""
        ...


def may_start(sampler: Sampler, p: Projection, group: GroupState) -> bool:
    """Whether siblings of a group may be dispatched now. Only after a restart are there groups that have to wait."""
    return not isinstance(sampler, PacingSampler) or sampler.may_start(p, group)


def evictions(sampler: Sampler, p: Projection, ready: Sequence[GroupState]) -> list[GroupState]:
    """Return the finalized groups that a sampler does not keep: none, if it bounds nothing.

    Raises
    ------
    ConfigError
        It names a group that is not one of them.
    """
    if not isinstance(sampler, EvictingSampler):
        return []
    by_id = {group.group_id: group for group in ready}
    evicted = sorted(set(sampler.evict(p, ready)))
    unknown = [group_id for group_id in evicted if group_id not in by_id]
    if unknown:
        raise ConfigError(
            f"the sampler {type(sampler).__name__} evicts groups {unknown}, which are not among the finalized ones "
            f"{sorted(by_id)}: correct its evict()"
        )
    return [by_id[group_id] for group_id in evicted]


def _finalized(p: Projection) -> list[GroupState]:
    return [group for group in p.live_groups() if group.phase is GroupPhase.FINALIZED]


class InOrder:
    """Every group belongs to a step, and steps are trained in order: the strictest, and the most reproducible.

    The place of a group that left is drawn again (``top_up``), or its step is trained without it (``shrink``); a step
    that would be left with no group at all gets one again. Groups that belong to no step, since another sampler drew
    them, fill the next steps up; a step for which more groups were drawn than it takes now takes them all.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_lookahead_versions: int,
        *,
        shortfall: Literal["top_up", "shrink"] = "top_up",
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_lookahead = max_lookahead_versions
        self._shortfall = shortfall

    def may_draw(self, p: Projection) -> Draw | None:
        live = Counter(group.train_step for group in p.live_groups())
        unassigned = live[None]
        first = p.train_step + 1
        for step in range(first, first + self._max_lookahead + 1):
            room = self._groups_per_step - self._taken(p, step, live[step])
            if room > unassigned:
                return Draw(step)
            unassigned -= max(room, 0)
        return None

    def select(self, p: Projection) -> tuple[int, ...] | None:
        step = p.train_step + 1
        due = [group for group in p.live_groups() if group.train_step == step]
        if any(group.phase is not GroupPhase.FINALIZED for group in due):
            return None  # left behind, it would be stale as soon as it is finished
        unassigned = [group for group in _finalized(p) if group.train_step is None]
        chosen = [*due, *unassigned[: max(0, self._groups_per_step - len(due))]]
        # A group of no step takes a place of its own, beside those that need no group any more: as in may_draw, or nobody
        # would draw nor select.
        missing = self._groups_per_step - (self._taken(p, step, len(due)) + len(chosen) - len(due))
        return tuple(group.group_id for group in chosen) if chosen and missing <= 0 else None

    def _taken(self, p: Projection, step: int, live: int) -> int:
        """Return how many of a step's places need no group any more."""
        if self._shortfall == "shrink" and live:
            return max(live, min(p.places.get(step, 0), self._groups_per_step))
        return live

    def is_stale(self, p: Projection, group: GroupState) -> bool:
        return group.train_step is not None and group.train_step <= p.train_step

    def may_start(self, p: Projection, group: GroupState) -> bool:
        # When trained steps were undone, what had been drawn for steps further on would be generated by older weights than
        # in a run that nobody killed. But nobody waits for a step that has no groups, and may never get one.
        if group.train_step is None:
            return True
        steps = [other.train_step for other in p.live_groups() if other.train_step is not None]
        first = max(p.train_step + 1, min(steps, default=0))
        return group.train_step <= first + self._max_lookahead


class _Bounded:
    """What all but ``in_order`` share: a bound on staleness, judged by a group's oldest tokens, and one on how many
    finalized groups are kept.
    """

    def __init__(
        self, groups_per_step: int, max_staleness_versions: int, *, max_ready_groups: int | None = None
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness_versions
        self._max_ready = max_ready_groups

    def may_draw(self, p: Projection) -> Draw | None:
        if self._max_ready is not None and self._of_newest_weights(p) >= self._max_ready:
            # A group drawn now would take the place of one that is as fresh: prompts would be burnt for nothing.
            return None
        # A group drawn now is trained after all that is alive: more than this ahead, and it would come out stale. What
        # is being trained counts: the weights are one version older now than they will be after it.
        ahead = p.alive_total
        return Draw(None) if ahead < self._groups_per_step * (self._max_staleness + 1) else None

    def is_stale(self, p: Projection, group: GroupState) -> bool:
        return p.weight_version - group.min_weight_version > self._max_staleness

    def evict(self, p: Projection, ready: Sequence[GroupState]) -> tuple[int, ...]:
        if self._max_ready is None:
            return ()
        oldest_first = sorted(ready, key=lambda group: (group.min_weight_version, group.group_id))
        return tuple(group.group_id for group in oldest_first[: max(0, len(ready) - self._max_ready)])

    def _of_newest_weights(self, p: Projection) -> int:
        """Return how many groups are, or will be, in the buffer that no group drawn now could be fresher than."""
        return sum(
            group.min_weight_version >= p.weight_version
            for group in p.live_groups()
            if group.phase is not GroupPhase.CLAIMED
        )

    def _fresh(self, p: Projection) -> list[GroupState]:
        return [group for group in _finalized(p) if not self.is_stale(p, group)]


class Windowed(_Bounded):
    """Any finalized group within the staleness window, oldest or freshest first."""

    def __init__(
        self,
        groups_per_step: int,
        max_staleness_versions: int,
        *,
        max_ready_groups: int | None = None,
        freshest_first: bool,
    ) -> None:
        super().__init__(groups_per_step, max_staleness_versions, max_ready_groups=max_ready_groups)
        self._freshest_first = freshest_first

    def select(self, p: Projection) -> tuple[int, ...] | None:
        ready = sorted(self._fresh(p), key=lambda group: (group.min_weight_version, group.group_id))
        if len(ready) < self._groups_per_step:
            return None
        if self._freshest_first:
            ready = ready[-self._groups_per_step :]
        return tuple(group.group_id for group in ready[: self._groups_per_step])


class WeightFifo(_Bounded):
    """First in, first out by weights: no step overtakes a group that was started under older weights.

    A step waits for unfinished groups of an older version than the newest group it would take.
    """

    def select(self, p: Projection) -> tuple[int, ...] | None:
        ready = sorted(self._fresh(p), key=lambda group: (group.weight_version, group.group_id))
        chosen = ready[: self._groups_per_step]
        if len(chosen) < self._groups_per_step:
            return None
        newest = chosen[-1].weight_version
        unfinished = {
            group.weight_version for group in p.live_groups() if group.phase is not GroupPhase.FINALIZED
        }
        if any(version < newest for version in unfinished):
            return None
        return tuple(group.group_id for group in chosen)


class ReadyFirst(_Bounded):
    """Whatever is finalized first is trained first, within the staleness bound: the least waiting."""

    def select(self, p: Projection) -> tuple[int, ...] | None:
        ready = sorted(self._fresh(p), key=lambda group: group.finalized_seq)
        if len(ready) < self._groups_per_step:
            return None
        return tuple(group.group_id for group in ready[: self._groups_per_step])


def build_sampler(settings: SamplerSettings, *, groups_per_step: int) -> Sampler:
    """Return the configured sampler.

    Raises
    ------
    ConfigError
        There is no sampler of that name, or the named class cannot be imported or made.
    """
    max_staleness, max_ready = settings.max_staleness_versions, settings.max_ready_groups
    match settings.name:
        case "in_order":
            return InOrder(groups_per_step, settings.max_lookahead_versions, shortfall=settings.shortfall)
        case "windowed":
            return Windowed(
                groups_per_step,
                max_staleness,
                max_ready_groups=max_ready,
                freshest_first=settings.freshest_first,
            )
        case "weight_fifo":
            return WeightFifo(groups_per_step, max_staleness, max_ready_groups=max_ready)
        case "ready_first":
            return ReadyFirst(groups_per_step, max_staleness, max_ready_groups=max_ready)
    return _custom_sampler(settings, groups_per_step)


def _custom_sampler(settings: SamplerSettings, groups_per_step: int) -> Sampler:
    module, _, name = settings.name.partition(":")
    if not name:
        raise ConfigError(
            f"sampler.name: expected in_order, windowed, weight_fifo, ready_first or module:Class, found {settings.name!r}"
        )
    try:
        made: Sampler = getattr(importlib.import_module(module), name)(
            settings, groups_per_step=groups_per_step
        )
    except Exception as error:
        raise ConfigError(f"sampler.name: {settings.name!r} cannot be made: {error}") from error
    missing = [verb for verb in ("may_draw", "select", "is_stale") if not callable(getattr(made, verb, None))]
    if missing:
        raise ConfigError(f"sampler.name: {settings.name!r} has no {', '.join(missing)}")
    return made
