"""Eviction: finalized groups beyond what the sampler keeps leave the replay buffer."""

from kinlog.controller.runtime import Runtime
from kinlog.controller.samplers import evictions
from kinlog.lineage.ledger import Cut
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.schemas.events import GroupDropped
from kinlog.schemas.reasons import Reason

__all__ = ["commit_evictions"]


def commit_evictions(runtime: Runtime, cut: Cut) -> list[GroupState]:
    """Record that groups leave which the sampler does not keep, and return them: their rows are to be cleared.

    Once the dataset is exhausted nothing is evicted, since nothing fresher would come instead.
    """
    if runtime.exhausted:
        return []
    p = runtime.projection
    ready = [group for group in p.live_groups() if group.phase is GroupPhase.FINALIZED]
    evicted = evictions(runtime.sampler, p, ready)
    if evicted:
        runtime.ledger.commit(cut, *(_evicted(p, group) for group in evicted))
    return evicted


def _evicted(p: Projection, group: GroupState) -> GroupDropped:
    detail = f"weight version {p.weight_version}, oldest {group.min_weight_version}"
    return GroupDropped(group_id=group.group_id, reason=Reason.EVICTED, detail=detail)
