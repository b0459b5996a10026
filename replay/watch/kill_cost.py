"""What a kill would cost a live run at this moment: what is redone, and what is rolled back."""

from collections.abc import Mapping

import msgspec

from kinlog.lineage.state import CheckpointState, GroupPhase, GroupState, Projection, SiblingState
from kinlog.replay.watch.recent import Dispatched
from kinlog.schemas.reasons import Granularity

__all__ = ["KillCost", "kill_cost"]


class KillCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a restart from the newest checkpoint would redo, as far as the log can tell.

    It takes the rows that lineage promises to be there. What the restored sampler would call stale, or a changed
    configuration would drop, is for ``kinlog plan`` to say.
    """

    checkpoint: str | None
    """Where the restart would begin; ``None``: at the start of the run."""
    siblings_in_flight: int
    """Redone in any case. What they have generated so far is in no log: only how long they have run is known."""
    seconds_in_flight: float
    """The sum of how long each has run."""
    steps_rolled_back: int
    """Applied since that checkpoint: trained again, on the same groups."""
    siblings_redone_without_journal: int
    """Sealed since that checkpoint: put back by the row journal, and generated again without it."""
    tokens_redone_without_journal: int
    """Their completion tokens. With the row journal: none."""


def kill_cost(p: Projection, dispatched: Mapping[tuple[int, int], Dispatched], *, now_us: int) -> KillCost:
    """Say what a kill at ``now_us`` would cost."""
    newest = max(p.checkpoints, key=lambda checkpoint: checkpoint.position.seq, default=None)
    restored_step = newest.train_step if newest is not None else 0
    sealed = [
        sibling
        for group in p.groups.values()
        if group.live or (group.phase is GroupPhase.APPLIED and (group.claimed_step or 0) > restored_step)
        for sibling in _redone(group, newest)
    ]
    flying = [
        (group.group_id, generation)
        for group in p.live_groups()
        for generation, sibling in group.siblings.items()
        if sibling.running
    ]
    since_us = [now_us - dispatched[key].time_us for key in flying if key in dispatched]
    return KillCost(
        checkpoint=newest.name if newest is not None else None,
        siblings_in_flight=len(flying),
        seconds_in_flight=sum(max(0, run_us) for run_us in since_us) / 1e6,
        steps_rolled_back=p.train_step - restored_step,
        siblings_redone_without_journal=len(sealed),
        tokens_redone_without_journal=sum(
            sibling.sealed.completion_tokens for sibling in sealed if sibling.sealed is not None
        ),
    )


def _redone(group: GroupState, newest: CheckpointState | None) -> list[SiblingState]:
    """Return the sealed siblings of a group whose rows are in no checkpoint."""
    position_seq = newest.position.seq if newest is not None else 0
    sealed = [sibling for sibling in group.siblings.values() if sibling.sealed is not None]
    lost = [sibling for sibling in sealed if sibling.sealed_seq > position_seq]
    # A cohort is redone whole.
    return sealed if lost and group.granularity is Granularity.PROMPT_GROUP else lost
