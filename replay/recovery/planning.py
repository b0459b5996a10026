"""The recovery plan, from the restored projection and the data plane's inventory alone.

A pure function: what it returns is what ``kinlog plan`` shows, and what the controller carries out.
"""

from collections.abc import Callable, Sequence

from kinlog.lineage.state import GroupState, Projection
from kinlog.replay.recovery.capacity import groups_over_capacity
from kinlog.replay.recovery.held_rows import HeldRows
from kinlog.replay.recovery.inventory import Inventory
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.plan_draft import PlanDraft
from kinlog.schemas.errors import RowsMissingError
from kinlog.schemas.events import Position

__all__ = ["plan_recovery"]


def plan_recovery(
    restored: Projection,
    inventory: Inventory | HeldRows,
    *,
    checkpoint: str | None,
    promised: Position | None,
    promised_finalized_seq: int | None = None,
    policy: RecoveryPolicy,
    is_stale: Callable[[GroupState], bool] = lambda group: False,
    evict: Callable[[Sequence[GroupState]], Sequence[GroupState]] = lambda ready: (),
) -> RecoveryPlan:
    """Decide what a restart does.

    Parameters
    ----------
    restored:
        The projection of the whole log, with the trainer's effects rolled back (``run_restored`` folded).
    inventory:
        What the data plane holds after its native checkpoint was loaded; or the comparison of it with ``restored``, if
        one was begun.
    checkpoint, promised:
        The checkpoint in use and its place in the log: what was sealed or finalized at or before it must be there.
    promised_finalized_seq:
        Of groups finalized after this place, the staged rows must be there instead of the canonical ones; ``None``: of
        no group.
    is_stale:
        The sampler's judgement of a group under the restored weights. It is asked about the group as the plan leaves
        it: what is generated again is as fresh as the weights.
    evict:
        The sampler's choice, of the groups in the replay buffer, of those that it does not keep.

    Raises
    ------
    ConfigError
        More groups are alive than there are permits, and the policy is ``refuse``.
    RowsMissingError
        Promised rows are missing or differ, and the policy is ``refuse``. The message names them.
    """
    held = HeldRows.of(inventory)
    promised_seq = promised.seq if promised is not None else 0
    live = list(restored.live_groups())
    evicted: dict[int, str] = {}

    def drafted() -> PlanDraft:
        draft = PlanDraft(
            restored,
            held,
            promised_seq=promised_seq,
            promised_finalized_seq=(
                promised_seq if promised_finalized_seq is None else promised_finalized_seq
            ),
            policy=policy,
            is_stale=is_stale,
            evicted=evicted,
        )
        for group in live:
            draft.plan_group(group)
        return draft

    draft = drafted()
    gone = draft.gone()
    over = groups_over_capacity(
        [group for group in live if group.group_id not in gone],
        max_live_groups=policy.max_live_groups,
        policy=policy.over_capacity,
    )
    if over:
        detail = f"rollout.max_live_groups is {policy.max_live_groups} now"
        evicted.update((group.group_id, detail) for group in over)
        draft = drafted()
    beyond = evict([restored.groups[group_id] for group_id in draft.finalized])
    if beyond:
        evicted.update((group.group_id, "the sampler keeps no more finalized groups") for group in beyond)
        draft = drafted()
    if draft.missing_promised and policy.missing_rows == "refuse":
        named = ", ".join(f"{problem.key} ({problem.reason})" for problem in draft.missing_promised[:8])
        more = f" and {len(draft.missing_promised) - 8} more" if len(draft.missing_promised) > 8 else ""
        raise RowsMissingError(
            f"checkpoint {checkpoint} promised {len(draft.missing_promised)} rows that the data plane lacks: {named}"
            f"{more}. Nothing was changed. Resume from an older checkpoint, or set "
            "rollout_recovery.missing_rows: redispatch to generate them again."
        )
    return draft.finish(checkpoint)
