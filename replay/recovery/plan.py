"""What a restart does: what it keeps, redoes, drops and clears, with a reason for each, and the choices behind it."""

from typing import Literal

import msgspec

from kinlog.replay.recovery.inventory import RowProblem
from kinlog.schemas.config import RunConfig
from kinlog.schemas.events import (
    AttemptSuperseded,
    Event,
    FinalizeFailed,
    GroupDropped,
    GroupParked,
    RecoveryPlanned,
    SiblingDispatched,
    SiblingSealed,
)
from kinlog.schemas.reasons import Partition
from kinlog.schemas.settings import RolloutRecoverySettings

__all__ = ["RecoveryPolicy", "RecoveryPlan", "SiblingRef"]


class RecoveryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The choices that a user has about a restart."""

    missing_rows: Literal["refuse", "redispatch"] = "refuse"
    future_weights: Literal["reuse", "discard"] = "reuse"
    discard_rollouts: bool = False
    """Keep every prompt, and have all that was generated for it, and not trained on, generated again."""
    max_resumes: int = RolloutRecoverySettings().resumes
    """How many attempts in a row may go on from what those before them generated. None does with ``discard_rollouts``."""
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
            max_resumes=0 if discard_rollouts else config.rollout_recovery.resumes,
            max_live_groups=config.rollout.max_live_groups,
            over_capacity=config.rollout_recovery.over_capacity,
            spent_retry_budget=config.rollout.spent_retry_budget,
        )


class SiblingRef(msgspec.Struct, frozen=True, gc=False):
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
