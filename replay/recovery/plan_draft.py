"""A recovery plan in the making: it is told of one live group after another, and enters what becomes of each."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from kinlog.lineage.decide import retry_budget_spent, seal_placeholder
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.replay.recovery.held_rows import GivenUp, HeldRows
from kinlog.replay.recovery.inventory import RowProblem
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy, SiblingRef
from kinlog.replay.recovery.sibling_plan import SiblingPlan, plan_siblings, reused_siblings
from kinlog.schemas.events import (
    AttemptSuperseded,
    FinalizeFailed,
    GroupDropped,
    GroupParked,
    SiblingDispatched,
    SiblingSealed,
)
from kinlog.schemas.reasons import Granularity, Partition, Reason

__all__ = ["PlanDraft"]


class PlanDraft:
    """Collects decisions group by group.

    Parameters
    ----------
    p, held:
        The restored projection, and which of its rows are there.
    promised_seq, promised_finalized_seq:
        What was sealed, and what was finalized, up to here must be there.
    policy:
        The user's choices.
    is_stale:
        The sampler's judgement of a group under the restored weights.
    evicted:
        Group -> why it has to leave whatever its state is.
    """

    def __init__(
        self,
        p: Projection,
        held: HeldRows,
        *,
        promised_seq: int,
        promised_finalized_seq: int,
        policy: RecoveryPolicy,
        is_stale: Callable[[GroupState], bool],
        evicted: Mapping[int, str],
    ) -> None:
        self.p = p
        self.held = held
        self.promised_seq = promised_seq
        self.promised_finalized_seq = promised_finalized_seq
        self.policy = policy
        self.is_stale = is_stale
        self.evicted = evicted
        self.newest_version = p.weight_version if policy.future_weights == "discard" else None
        self.reused: list[SiblingRef] = []
        self.superseded: list[AttemptSuperseded] = []
        self.lost_tokens = 0
        self.finalize_failed: list[FinalizeFailed] = []
        self.refinalized: list[int] = []
        self.finalized: list[int] = []
        self.waiting: list[int] = []
        self.dropped: list[GroupDropped] = []
        self.parked: list[GroupParked] = []
        self.placeholders: list[SiblingDispatched | SiblingSealed] = []
        self.missing_promised: list[RowProblem] = []
        self.given_up: list[GivenUp] = []

    def plan_group(self, group: GroupState) -> None:
        """Decide about one group, and enter it."""
        if group.group_id in self.evicted:
            self._drop(group, Reason.EVICTED, self.evicted[group.group_id])
            return
        missed: tuple[RowProblem, ...] = ()
        taken_apart: Reason | None = None
        if group.phase is GroupPhase.FINALIZED:
            # Of what is given up by choice nothing is missed.
            problems = () if self.policy.discard_rollouts else self.held.canonical_problems(group)
            taken_apart = self._taken_apart_for(group, problems)
            if taken_apart is None:
                self._keep_finalized(group)
                return
            if group.finalized_seq <= self.promised_finalized_seq:
                missed = problems
        siblings = plan_siblings(
            self.p,
            group,
            self.held,
            newest_version=self.newest_version,
            discard_rollouts=self.policy.discard_rollouts,
            promised_seq=self.promised_seq,
            promised_finalized_seq=self.promised_finalized_seq,
            taken_apart=taken_apart,
        )
        if self._is_stale_without(group, siblings.given_up):
            self._drop(group, Reason.STALE, "at restart")
            return
        spent = self._spent_at_restarts(group, siblings.given_up)
        whole = group.granularity is Granularity.PROMPT_GROUP
        if spent and (whole or self.policy.spent_retry_budget != "train_partial"):
            self._end(group, siblings, spent[0])
            return
        missed = (*missed, *siblings.missed)
        # Of one that was stale as it was sealed nothing is missed: its prompt is all that there is to keep.
        if missed and not self.is_stale(group):
            self.missing_promised += missed
        if taken_apart is not None:
            self._fail_finalize(group, taken_apart)
        self._carry_on(group, siblings, spent)

    def gone(self) -> set[int]:
        """Return the groups that are not alive after the restart."""
        return {event.group_id for event in self.dropped} | {event.group_id for event in self.parked}

    def finish(self, checkpoint: str | None) -> RecoveryPlan:
        """Return the plan."""
        retired: dict[Partition, dict[str, int]] = {}
        unreferenced: dict[Partition, dict[str, int]] = {}
        driven_again = [self.p.groups[group_id] for group_id in self.refinalized]
        for partition, rows in self.held.left(self.given_up, driven_again).items():
            groups = {key: rows[key].group_id for key in sorted(rows)}
            retired[partition] = {key: of for key, of in groups.items() if self._is_applied(of)}
            unreferenced[partition] = {key: of for key, of in groups.items() if not self._is_applied(of)}
        return RecoveryPlan(
            checkpoint=checkpoint,
            train_step=self.p.train_step,
            weight_version=self.p.weight_version,
            reused=tuple(self.reused),
            superseded=tuple(self.superseded),
            lost_tokens=self.lost_tokens,
            finalize_failed=tuple(self.finalize_failed),
            refinalized=tuple(self.refinalized),
            finalized=tuple(self.finalized),
            waiting=tuple(self.waiting),
            dropped=tuple(self.dropped),
            parked=tuple(self.parked),
            placeholders=tuple(self.placeholders),
            missing_promised=tuple(self.missing_promised),
            retired=retired,
            unreferenced=unreferenced,
        )

    def _taken_apart_for(self, group: GroupState, problems: tuple[RowProblem, ...]) -> Reason | None:
        """Return why a finalized group cannot stay in the replay buffer, if so."""
        if self.policy.discard_rollouts:
            return Reason.DISCARDED_BY_REQUEST
        if problems:
            return problems[0].reason
        newest = self.newest_version
        future = newest is not None and any(
            s.sealed is not None and s.sealed.max_weight_version > newest for s in group.siblings.values()
        )
        return Reason.FUTURE_WEIGHTS if future else None

    def _keep_finalized(self, group: GroupState) -> None:
        if self.is_stale(group):
            self._drop(group, Reason.STALE, "at restart")
            return
        self.finalized.append(group.group_id)
        self.reused += reused_siblings(group.group_id, sorted(group.siblings.items()), ())

    def _is_stale_without(self, group: GroupState, given_up: Mapping[int, AttemptSuperseded]) -> bool:
        """Whether a group is stale by what is kept of it, or by the step that it was drawn for."""
        planned = group
        if given_up:
            siblings = dict(group.siblings)
            for generation in given_up:
                siblings[generation] = replace(siblings[generation], running=False, sealed=None)
            planned = replace(group, siblings=siblings)
        if all(s.sealed is None or s.sealed.receipt is None for s in planned.siblings.values()):
            if group.train_step is None:
                return False
            planned = replace(planned, weight_version=self.p.weight_version)
        return self.is_stale(planned)

    def _spent_at_restarts(self, group: GroupState, given_up: Iterable[int]) -> list[int]:
        """Return the generations that were under way at more deaths of the controller than they may be."""
        if group.retry_budget.restarts is None:
            return []
        return [
            generation
            for generation in sorted(given_up)
            if group.siblings[generation].running
            and retry_budget_spent(group, group.siblings[generation], Reason.CONTROLLER_RESTART)
        ]

    def _end(self, group: GroupState, siblings: SiblingPlan, generation: int) -> None:
        """Let a group leave for good: a sibling of it may be what kills the controller."""
        self.superseded.extend(siblings.superseded(group))
        deaths = 1 + group.siblings[generation].restarts
        detail = (
            f"generation {generation}: controller_restart: under way as the controller died {deaths} times"
        )
        if self.policy.spent_retry_budget == "drop":
            self._drop(group, Reason.RETRY_BUDGET, detail)
        else:
            self.parked.append(
                GroupParked(group_id=group.group_id, reason=Reason.RETRY_BUDGET, detail=detail)
            )
            self.given_up.append(GivenUp(group, group.siblings))

    def _drop(self, group: GroupState, reason: Reason, detail: str) -> None:
        self.dropped.append(GroupDropped(group_id=group.group_id, reason=reason, detail=detail))
        self.given_up.append(GivenUp(group, group.siblings))

    def _fail_finalize(self, group: GroupState, reason: Reason) -> None:
        self.finalize_failed.append(FinalizeFailed(group_id=group.group_id, reason=reason, charged=False))

    def _carry_on(self, group: GroupState, siblings: SiblingPlan, placeheld: Sequence[int]) -> None:
        """Enter what becomes of a group that stays, and is not in the replay buffer.

        Siblings in ``placeheld`` are not generated again: a placeholder stands in for them.
        """
        given_up = siblings.given_up
        self.reused += siblings.reused
        lost = [g for g in given_up if group.siblings[g].sealed is not None]
        if lost or group.rows:
            self.given_up.append(GivenUp(group, lost))
        self.lost_tokens += sum(
            s.sealed.completion_tokens for g in lost if (s := group.siblings[g]).sealed is not None
        )
        if group.phase is GroupPhase.FINALIZING and given_up:
            self._fail_finalize(group, next(iter(given_up.values())).reason)
        elif group.phase is GroupPhase.FINALIZING:
            self.refinalized.append(group.group_id)
        self.superseded.extend(siblings.superseded(group))
        for generation in placeheld:
            reason, detail = Reason.CONTROLLER_RESTART, given_up[generation].detail
            events = seal_placeholder(self.p, group.group_id, generation, reason, detail)
            self.placeholders += [e for e in events if isinstance(e, SiblingDispatched | SiblingSealed)]
        if len(siblings.reused) + len(placeheld) < group.num_generations:
            self.waiting.append(group.group_id)

    def _is_applied(self, group_id: int) -> bool:
        group = self.p.groups.get(group_id)
        return group is not None and group.phase is GroupPhase.APPLIED
