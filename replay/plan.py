"""The recovery plan: what a restart keeps, redoes, drops and clears, with a reason for each.

A pure function of the restored projection and the data plane's inventory. It is what ``kinlog plan`` shows, and what
the controller carries out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from kinlog.lineage.decide import retry_budget_spent, seal_placeholder
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.replay.capacity import groups_over_capacity
from kinlog.replay.inventory import Inventory, RowProblem, canonical_rows, compare_rows
from kinlog.replay.sibling_plan import SiblingPlan, plan_siblings
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import RowsMissingError
from kinlog.schemas.events import (
    AttemptSuperseded,
    Event,
    FinalizeFailed,
    GroupDropped,
    GroupParked,
    Position,
    RecoveryPlanned,
    SiblingDispatched,
    SiblingSealed,
)
from kinlog.schemas.reasons import Granularity, Partition, Reason
from kinlog.schemas.receipts import canonical_key

__all__ = ["RecoveryPolicy", "RecoveryPlan", "SiblingRef", "plan_recovery"]


class RecoveryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The choices that a user has about a restart."""

    missing_rows: Literal["refuse", "redispatch"] = "refuse"
    future_weights: Literal["reuse", "discard"] = "reuse"
    discard_rollouts: bool = False
    """Keep every prompt, and have all that was generated for it, and not trained on, generated again."""
    max_live_groups: int | None = None
    """The permits that there are now; ``None``: no group is one too many."""
    over_capacity: Literal["keep", "evict", "refuse"] = "keep"
    spent_retry_budget: Literal["park", "drop", "train_partial", "fail_run"] = "park"
    """What becomes of a group one of whose siblings was under way at too many deaths of the controller."""

    @classmethod
    def of(cls, config: RunConfig, *, discard_rollouts: bool = False) -> "RecoveryPolicy":
        """Return the choices that a configuration makes."""
        return cls(
            missing_rows=config.rollout_recovery.missing_rows,
            future_weights=config.rollout_recovery.future_weights,
            discard_rollouts=discard_rollouts,
            max_live_groups=config.rollout.max_live_groups,
            over_capacity=config.rollout_recovery.over_capacity,
            spent_retry_budget=config.rollout.spent_retry_budget,
        )


class SiblingRef(msgspec.Struct, frozen=True):
    """A sibling's attempt, and the tokens it generated."""

    group_id: int
    generation: int
    attempt: int
    completion_tokens: int


class RecoveryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a restart does."""

    checkpoint: str | None
    """``None``: from the start of the run."""
    train_step: int
    weight_version: int
    reused: tuple[SiblingRef, ...]
    """Sealed siblings whose rows are there: not generated again."""
    superseded: tuple[AttemptSuperseded, ...]
    """Attempts given up, in order: their siblings are dispatched again."""
    lost_tokens: int
    """Completion tokens of sealed siblings that are redone."""
    finalize_failed: tuple[FinalizeFailed, ...]
    """Groups whose canonical rows are gone: finalized again from staged rows, or generated again."""
    refinalized: tuple[int, ...]
    """Groups whose finalize has no known outcome: driven again."""
    finalized: tuple[int, ...]
    """Groups in the replay buffer."""
    waiting: tuple[int, ...]
    """Groups with siblings to dispatch."""
    dropped: tuple[GroupDropped, ...]
    parked: tuple[GroupParked, ...]
    placeholders: tuple[SiblingDispatched | SiblingSealed, ...]
    """Stand in for siblings that no further attempt is made of."""
    missing_promised: tuple[RowProblem, ...]
    """Rows that the checkpoint promised, and that are redone by explicit choice."""
    retired: dict[Partition, dict[str, int]]
    """Partition -> key -> group of the rows of groups that were applied at or before the restored step: the checkpoint
    holds them because it was taken before it allowed their clearing."""
    unreferenced: dict[Partition, dict[str, int]]
    """Partition -> key -> group of the rows that nobody refers to."""

    @property
    def tokens_saved(self) -> int:
        return sum(sibling.completion_tokens for sibling in self.reused)

    def events(self) -> tuple[Event, ...]:
        """Return the plan's decisions as events: the summary first, then group by group.

        What is decided about one group is to be recorded as one unit: a kill between a cohort's supersedes, or between
        a group's ``finalize_failed`` and them, would leave a group that no rule speaks of.
        """
        summary = RecoveryPlanned(
            checkpoint=self.checkpoint,
            siblings_reused=len(self.reused),
            siblings_redispatched=len(self.superseded),
            groups_reused=len(self.finalized),
            groups_rolled_back=len(self.finalize_failed),
            groups_dropped=len(self.dropped),
            rows_unreferenced=sum(len(keys) for keys in self.unreferenced.values()),
            tokens_saved=self.tokens_saved,
            tokens_redone=self.lost_tokens,
        )
        decided = (
            *self.finalize_failed,
            *self.superseded,
            *self.placeholders,
            *self.parked,
            *self.dropped,
        )
        return (summary, *sorted(decided, key=lambda event: event.group_id))


def plan_recovery(
    restored: Projection,
    inventory: Inventory,
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
        What the data plane holds after its native checkpoint was loaded.
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
    evicted: dict[int, str] = {}
    promised_seq = promised.seq if promised is not None else 0

    def drafted() -> _Draft:
        finalized_seq = promised_seq if promised_finalized_seq is None else promised_finalized_seq
        draft = _Draft(restored, inventory, promised_seq, finalized_seq, policy)
        for group in restored.live_groups():
            draft.plan_group(group, is_stale, evicted)
        return draft

    draft = drafted()
    over = groups_over_capacity(
        draft.staying(), max_live_groups=policy.max_live_groups, policy=policy.over_capacity
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


class _Draft:
    """Collects decisions group by group."""

    def __init__(
        self,
        p: Projection,
        inventory: Inventory,
        promised_seq: int,
        promised_finalized_seq: int,
        policy: RecoveryPolicy,
    ) -> None:
        self.p = p
        self.inventory = inventory
        self.promised_seq = promised_seq
        self.promised_finalized_seq = promised_finalized_seq
        self.policy = policy
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
        self.referenced: set[str] = set()

    def plan_group(
        self, group: GroupState, is_stale: Callable[[GroupState], bool], evicted: Mapping[int, str]
    ) -> None:
        if group.group_id in evicted:
            detail = evicted[group.group_id]
            self.dropped.append(GroupDropped(group_id=group.group_id, reason=Reason.EVICTED, detail=detail))
            return
        missed: tuple[RowProblem, ...] = ()
        taken_apart: Reason | None = None
        if group.phase is GroupPhase.FINALIZED:
            expected = canonical_rows(group)
            # Of what is given up by choice nothing is missed.
            problems = () if self.policy.discard_rollouts else compare_rows(expected, self.inventory.training)
            taken_apart = self._taken_apart_for(group, problems)
            if taken_apart is None:
                if is_stale(group):
                    self._drop_stale(group)
                    return
                self.referenced.update(expected)
                self.finalized.append(group.group_id)
                self._reuse(group, set(group.siblings))
                return
            if group.finalized_seq <= self.promised_finalized_seq:
                missed = problems
        siblings = plan_siblings(
            self.p,
            group,
            self.inventory.staging,
            is_future=self._is_future,
            discard_rollouts=self.policy.discard_rollouts,
            promised_seq=self.promised_seq,
            promised_finalized_seq=self.promised_finalized_seq,
            taken_apart=taken_apart,
        )
        if self._is_stale_without(group, siblings.given_up, is_stale):
            self._drop_stale(group)
            return
        spent = self._spent_at_restarts(group)
        whole = group.granularity is Granularity.PROMPT_GROUP
        if spent and (whole or self.policy.spent_retry_budget != "train_partial"):
            self._end(group, siblings, spent[0])
            return
        if not is_stale(group):
            # Of one that was stale as it was sealed nothing is missed: its prompt is all that there is to keep.
            self.missing_promised += [*missed, *siblings.missed]
        if taken_apart is not None:
            self._fail_finalize(group, taken_apart)
        self._carry_on(group, siblings, spent)

    def staying(self) -> list[GroupState]:
        """Return the groups that are alive after the restart."""
        gone = {event.group_id for event in self.dropped} | {event.group_id for event in self.parked}
        return [group for group in self.p.live_groups() if group.group_id not in gone]

    def _spent_at_restarts(self, group: GroupState) -> list[int]:
        """Return the generations that were under way at more deaths of the controller than they may be."""
        return [
            generation
            for generation, sibling in sorted(group.siblings.items())
            if sibling.running and retry_budget_spent(group, sibling, Reason.CONTROLLER_RESTART)
        ]

    def _end(self, group: GroupState, siblings: SiblingPlan, generation: int) -> None:
        """Let a group leave for good: a sibling of it may be what kills the controller."""
        self.superseded.extend(siblings.superseded(group))
        deaths = 1 + group.siblings[generation].restarts
        detail = (
            f"generation {generation}: controller_restart: under way as the controller died {deaths} times"
        )
        if self.policy.spent_retry_budget == "drop":
            self.dropped.append(
                GroupDropped(group_id=group.group_id, reason=Reason.RETRY_BUDGET, detail=detail)
            )
        else:
            self.parked.append(
                GroupParked(group_id=group.group_id, reason=Reason.RETRY_BUDGET, detail=detail)
            )

    def _taken_apart_for(self, group: GroupState, problems: tuple[RowProblem, ...]) -> Reason | None:
        """Return why a finalized group cannot stay in the replay buffer, if so."""
        if self.policy.discard_rollouts:
            return Reason.DISCARDED_BY_REQUEST
        if problems:
            return problems[0].reason
        return Reason.FUTURE_WEIGHTS if self._future(group) else None

    def _is_stale_without(
        self,
        group: GroupState,
        given_up: dict[int, AttemptSuperseded],
        is_stale: Callable[[GroupState], bool],
    ) -> bool:
        """Whether a group is stale by what is kept of it, or by the step that it was drawn for."""
        siblings = {
            generation: replace(sibling, running=False, sealed=None) if generation in given_up else sibling
            for generation, sibling in group.siblings.items()
        }
        planned = replace(group, siblings=siblings)
        if all(s.sealed is None or s.sealed.receipt is None for s in siblings.values()):
            if group.train_step is None:
                return False
            planned.weight_version = self.p.weight_version
        return is_stale(planned)

    def _drop_stale(self, group: GroupState) -> None:
        self.dropped.append(GroupDropped(group_id=group.group_id, reason=Reason.STALE, detail="at restart"))

    def _fail_finalize(self, group: GroupState, reason: Reason) -> None:
        self.finalize_failed.append(FinalizeFailed(group_id=group.group_id, reason=reason, charged=False))

    def _carry_on(self, group: GroupState, siblings: SiblingPlan, placeheld: Sequence[int]) -> None:
        """Enter what becomes of a group that stays, and is not in the replay buffer.

        Siblings in ``placeheld`` are not generated again: a placeholder stands in for them.
        """
        given_up = siblings.given_up
        kept = {g for g, s in group.siblings.items() if s.sealed is not None and g not in given_up}
        self._reuse(group, kept)
        for generation in kept:
            self.referenced.update(siblings.rows[generation])
        self.lost_tokens += sum(
            s.sealed.completion_tokens
            for g, s in group.siblings.items()
            if g in given_up and s.sealed is not None
        )
        if group.phase is GroupPhase.FINALIZING and given_up:
            self._fail_finalize(group, next(iter(given_up.values())).reason)
        elif group.phase is GroupPhase.FINALIZING:
            self.refinalized.append(group.group_id)
            self.referenced.update(
                canonical_key(group.group_id, g, s.attempt) for g, s in group.siblings.items()
            )
        self.superseded.extend(siblings.superseded(group))
        for generation in placeheld:
            reason, detail = Reason.CONTROLLER_RESTART, siblings.given_up[generation].detail
            events = seal_placeholder(self.p, group.group_id, generation, reason, detail)
            self.placeholders += [e for e in events if isinstance(e, SiblingDispatched | SiblingSealed)]
        if len(kept) + len(placeheld) < group.num_generations:
            self.waiting.append(group.group_id)

    def _reuse(self, group: GroupState, generations: set[int]) -> None:
        for generation in sorted(generations):
            sealed = group.siblings[generation].sealed
            if sealed is not None:
                self.reused.append(
                    SiblingRef(group.group_id, generation, sealed.attempt, sealed.completion_tokens)
                )

    def _future(self, group: GroupState) -> bool:
        return any(
            self._is_future(s.sealed.max_weight_version)
            for s in group.siblings.values()
            if s.sealed is not None
        )

    def _is_future(self, version: int) -> bool:
        return self.policy.future_weights == "discard" and version > self.p.weight_version

    def _is_applied(self, group_id: int) -> bool:
        group = self.p.groups.get(group_id)
        return group is not None and group.phase is GroupPhase.APPLIED

    def finish(self, checkpoint: str | None) -> RecoveryPlan:
        by_reason: dict[bool, dict[Partition, dict[str, int]]] = {True: {}, False: {}}
        for partition, rows in (
            (Partition.STAGING, self.inventory.staging),
            (Partition.TRAINING, self.inventory.training),
        ):
            left = sorted(rows.keys() - self.referenced)
            for retired in (True, False):
                by_reason[retired][partition] = {
                    key: rows[key].group_id for key in left if self._is_applied(rows[key].group_id) is retired
                }
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
            retired=by_reason[True],
            unreferenced=by_reason[False],
        )
