"""The recovery plan: what a restart keeps, redoes, drops and clears, with a reason for each.

A pure function of the restored projection and the data plane's inventory. It is what ``kinlog plan`` shows, and what
the controller carries out.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from kinlog.lineage.decide import supersede_attempt
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.replay.inventory import Inventory, RowProblem, canonical_rows, compare_rows, staged_rows
from kinlog.schemas.errors import RowsMissingError
from kinlog.schemas.events import (
    AttemptSuperseded,
    Event,
    FinalizeFailed,
    GroupDropped,
    Position,
    RecoveryPlanned,
)
from kinlog.schemas.reasons import Granularity, Partition, Reason
from kinlog.schemas.receipts import canonical_key
from kinlog.schemas.rows import RowTag

__all__ = ["RecoveryPolicy", "RecoveryPlan", "SiblingRef", "plan_recovery"]


class RecoveryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The choices that a user has about a restart."""

    missing_rows: Literal["refuse", "redispatch"] = "refuse"
    future_weights: Literal["reuse", "discard"] = "reuse"
    discard_rollouts: bool = False
    """Keep every prompt, and have all that was generated for it, and not trained on, generated again."""


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
        """Return the plan's decisions as events, the summary first."""
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
        return (summary, *self.finalize_failed, *self.superseded, *self.dropped)


def plan_recovery(
    restored: Projection,
    inventory: Inventory,
    *,
    checkpoint: str | None,
    promised: Position | None,
    policy: RecoveryPolicy,
    is_stale: Callable[[GroupState], bool] = lambda group: False,
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
    is_stale:
        The sampler's judgement of a group under the restored weights.

    Raises
    ------
    RowsMissingError
        Promised rows are missing or differ, and the policy is ``refuse``. The message names them.
    """
    draft = _Draft(restored, inventory, promised.seq if promised is not None else 0, policy)
    for group in restored.live_groups():
        draft.plan_group(group, is_stale(group))
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
        self, p: Projection, inventory: Inventory, promised_seq: int, policy: RecoveryPolicy
    ) -> None:
        self.p = p
        self.inventory = inventory
        self.promised_seq = promised_seq
        self.policy = policy
        self.reused: list[SiblingRef] = []
        self.superseded: list[AttemptSuperseded] = []
        self.lost_tokens = 0
        self.finalize_failed: list[FinalizeFailed] = []
        self.refinalized: list[int] = []
        self.finalized: list[int] = []
        self.waiting: list[int] = []
        self.dropped: list[GroupDropped] = []
        self.missing_promised: list[RowProblem] = []
        self.referenced: set[str] = set()

    def plan_group(self, group: GroupState, stale: bool) -> None:
        if stale and not (self.policy.discard_rollouts and group.train_step is None):
            # What is generated again is as fresh as the weights; a group of a step that is past stays late.
            self.dropped.append(
                GroupDropped(group_id=group.group_id, reason=Reason.STALE, detail="at restart")
            )
            return
        if group.phase is GroupPhase.FINALIZED:
            expected = canonical_rows(group)
            problems = self._compare(expected, self.inventory.training)
            if not problems and not self._future(group) and not self.policy.discard_rollouts:
                self.referenced.update(expected)
                self.finalized.append(group.group_id)
                self._reuse(group, set(group.siblings))
                return
            if problems and group.finalized_seq <= self.promised_seq:
                self.missing_promised.extend(problems)
            reason = problems[0].reason if problems else Reason.FUTURE_WEIGHTS
            if self.policy.discard_rollouts:
                reason = Reason.DISCARDED_BY_REQUEST
            self.finalize_failed.append(FinalizeFailed(group_id=group.group_id, reason=reason, charged=False))
        self._plan_siblings(group)

    def _plan_siblings(self, group: GroupState) -> None:
        given_up: dict[int, AttemptSuperseded] = {}
        kept_rows: dict[int, set[str]] = {}
        for generation, sibling in sorted(group.siblings.items()):
            reason, detail = None, ""
            if sibling.running:
                reason = Reason.CONTROLLER_RESTART
            elif sibling.sealed is not None:
                expected = staged_rows(group, sibling)
                kept_rows[generation] = set(expected)
                problems = self._compare(expected, self.inventory.staging)
                if self.policy.discard_rollouts:
                    reason = Reason.DISCARDED_BY_REQUEST
                elif problems:
                    reason, detail = problems[0].reason, problems[0].key
                    # A group that was finalized at the checkpoint is promised by its canonical rows instead.
                    if (
                        sibling.sealed_seq
                        <= self.promised_seq
                        < (group.finalized_seq or self.promised_seq + 1)
                    ):
                        self.missing_promised.extend(problems)
                elif self._is_future(sibling.sealed.max_weight_version):
                    reason, detail = (
                        Reason.FUTURE_WEIGHTS,
                        f"generated by version {sibling.sealed.max_weight_version}",
                    )
            if reason is not None and generation not in given_up:
                for event in supersede_attempt(self.p, group.group_id, generation, reason, detail):
                    given_up.setdefault(event.generation, event)
        kept = {g for g, s in group.siblings.items() if s.sealed is not None and g not in given_up}
        self._reuse(group, kept)
        for generation in kept:
            self.referenced.update(kept_rows[generation])
        self.lost_tokens += sum(
            s.sealed.completion_tokens
            for g, s in group.siblings.items()
            if g in given_up and s.sealed is not None
        )
        if group.phase is GroupPhase.FINALIZING and given_up:
            reason = next(iter(given_up.values())).reason
            self.finalize_failed.append(FinalizeFailed(group_id=group.group_id, reason=reason, charged=False))
        elif group.phase is GroupPhase.FINALIZING:
            self.refinalized.append(group.group_id)
            self.referenced.update(
                canonical_key(group.group_id, g, s.attempt) for g, s in group.siblings.items()
            )
        self.superseded.extend(_ordered(group, given_up))
        if len(kept) < group.num_generations:
            self.waiting.append(group.group_id)

    def _reuse(self, group: GroupState, generations: set[int]) -> None:
        for generation in sorted(generations):
            sealed = group.siblings[generation].sealed
            if sealed is not None:
                self.reused.append(
                    SiblingRef(group.group_id, generation, sealed.attempt, sealed.completion_tokens)
                )

    def _compare(self, expected: dict[str, RowTag], found: dict[str, RowTag]) -> tuple[RowProblem, ...]:
        """Compare rows, unless all are given up anyway: then none is missed."""
        return () if self.policy.discard_rollouts else compare_rows(expected, found)

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
            for retired in (True, False):
                by_reason[retired][partition] = {
                    key: tag.group_id
                    for key, tag in sorted(rows.items())
                    if key not in self.referenced and self._is_applied(tag.group_id) is retired
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
            missing_promised=tuple(self.missing_promised),
            retired=by_reason[True],
            unreferenced=by_reason[False],
        )


def _ordered(group: GroupState, given_up: dict[int, AttemptSuperseded]) -> list[AttemptSuperseded]:
    """The attempt that a cohort restarts for comes first: the others refer to it."""
    events = [given_up[generation] for generation in sorted(given_up)]
    if group.granularity is Granularity.PROMPT_GROUP:
        events.sort(key=lambda event: event.reason is Reason.COHORT_RESTART)
    return events
