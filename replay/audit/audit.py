"""The audit: what was drawn, trained on, reused, redone and lost, counted from the log's events alone.

The counts are kept apart from the fold, which guards the same rules: a fold that let something through would be seen
here. Only the groups that are alive are taken from the projection, so that the conservation law compares two accounts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan
from kinlog.replay.audit.account import Account, GivenUp, RestartAccount
from kinlog.replay.audit.length_bias import LengthBias, measure_length_bias
from kinlog.replay.plain_text import format_count, some
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.events import StepApplied
from kinlog.schemas.reasons import Reason

__all__ = ["Audit", "RewardWindow", "audit_log"]


class RewardWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards over consecutive applied steps of the surviving history."""

    first_step: int
    last_step: int
    groups: int
    siblings: int
    """Valid ones: placeholders and failures are no examples."""
    mean_raw_reward: float | None
    mean_shaped_reward: float | None


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What the log says for itself, with the numbers."""

    run_id: str
    events: int
    dropped_events: int
    """The first of them, of which only the sum is left: what it says of groups and draws is taken as it is, and seals that
    were redone and restarts are counted after them."""
    lives: int
    drawn: int
    applied: int
    """Groups trained on, on the surviving history."""
    dropped: dict[str, int]
    parked: dict[str, int]
    alive: int | None
    """By the fold; ``None`` when the log cannot be folded."""
    unaccounted: tuple[int, ...]
    """Groups that were drawn and are in none of the four."""
    counted_twice: tuple[int, ...]
    """Groups that are in more than one of the four."""
    conservation_holds: bool

    draw_cursor: int
    draws_missing: tuple[int, ...]
    """Prompts before the cursor that no group was reserved for: lost."""
    draws_repeated: tuple[int, ...]

    steps: int
    """Optimizer steps on the surviving history."""
    steps_rolled_back: int
    applied_twice: tuple[int, ...]
    """Groups that the surviving history trains on more than once."""

    sealed: int
    sealed_redone: dict[str, int]
    """Sealed attempts that were given up, by reason, at restarts and between them."""
    redispatched_without_reason: tuple[str, ...]
    """Attempts (group/generation attempt) dispatched while the sibling had one that was sealed or running."""
    late_rejected: int
    restarts: tuple[RestartAccount, ...]
    given_up: tuple[GivenUp, ...]
    """Every sibling that was redone, and every one that left untrained with its group, in the log's order."""
    length_bias: LengthBias

    first_rewards: RewardWindow | None
    last_rewards: RewardWindow | None
    impossible: str
    """The first event that does not fit the state it meets; empty when the log can be folded."""

    @property
    def holds(self) -> bool:
        """Whether nothing was lost or trained on twice, everything redone has a reason, and what left was not the long ones."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold, in words, with what offends."""
        conserved = "drawn = applied + dropped + parked + alive does not hold"
        named = (
            ("prompt", "lost", self.draws_missing),
            ("prompt", "drawn twice", self.draws_repeated),
            ("group", "unaccounted for", self.unaccounted),
            ("group", "counted twice", self.counted_twice),
            ("group", "trained on twice", self.applied_twice),
            ("sibling", "redispatched without a reason", self.redispatched_without_reason),
        )
        failed = [] if self.conservation_holds else [conserved]
        failed += [f"{format_count(len(ids), noun)} {what}: {some(ids)}" for noun, what, ids in named if ids]
        if self.length_bias.found:
            bias = self.length_bias
            failed.append(
                f"length bias: {format_count(bias.lost, 'group')} left untrained, median {bias.median_lost:,.1f} tokens, and "
                f"{bias.trained:,} were trained on, median {bias.median_trained:,.1f}: one that left is longer {bias.statistic}"
            )
        if self.impossible:
            failed.append(f"the log tells an impossible story: {self.impossible}")
        return tuple(failed)

    def given_up_by_reason(self, *, dropped: bool) -> dict[str, int]:
        """Count the siblings that left with their group, or those that were redone."""
        return _counts(g.reason for g in self.given_up if g.with_group is dropped)


def audit_log(scan: LogScan, *, reward_steps: int = 3) -> Audit:
    """Audit a verified log.

    Parameters
    ----------
    scan:
        The log.
    reward_steps:
        Steps in the first and in the last reward window; fewer when the run has fewer than twice as many.

    Raises
    ------
    LogUnsupportedError
        An event was written by a newer kinlog.
    """
    projection = scan.beginning()
    account, impossible = Account(projection), ""
    for record in scan.events():
        account.add(record)
        if not impossible:
            try:
                fold(projection, record)
            except TransitionError as error:
                impossible = str(error)
    account.finish()
    alive = None if impossible else {group.group_id for group in projection.live_groups()}
    applied = account.applied_groups()
    classes = [set(applied), set(account.dropped), set(account.parked), alive or set()]
    everywhere = set().union(*classes)
    unaccounted = account.drawn - everywhere if alive is not None else set()
    counted_twice = {group_id for group_id in everywhere if sum(group_id in c for c in classes) > 1}
    conserved = (
        alive is not None
        and not unaccounted
        and not counted_twice
        and everywhere <= account.drawn
        and len(account.drawn) == sum(len(c) for c in classes)
        and account.drawn_total == projection.drawn_total
    )
    first, last = _reward_windows(account, reward_steps)
    return Audit(
        run_id=scan.run_id,
        events=scan.end.seq,
        dropped_events=scan.first_seq - 1,
        lives=account.lives,
        drawn=account.drawn_total,
        applied=len(set(applied)) + account.settled_applied,
        dropped=dict(account.settled_dropped + Counter(_counts(account.dropped.values()))),
        parked=_counts(account.parked.values()),
        alive=None if alive is None else len(alive),
        unaccounted=tuple(sorted(unaccounted)),
        counted_twice=tuple(sorted(counted_twice)),
        conservation_holds=conserved,
        draw_cursor=account.draw_cursor,
        draws_missing=tuple(
            i for i in range(account.first_draw, account.draw_cursor) if not account.draws[i]
        ),
        draws_repeated=tuple(sorted(i for i, times in account.draws.items() if times > 1)),
        steps=len(account.steps) + account.settled_steps,
        steps_rolled_back=account.steps_rolled_back,
        applied_twice=tuple(sorted(g for g, times in applied.items() if times > 1)),
        sealed=account.sealed_total,
        sealed_redone=dict(account.sealed_redone),
        redispatched_without_reason=tuple(account.redispatched_without_reason),
        late_rejected=account.late_rejected,
        restarts=tuple(account.restarts),
        given_up=tuple(account.given_up),
        length_bias=_length_bias(account, applied),
        first_rewards=first,
        last_rewards=last,
        impossible=impossible,
    )


def _counts(reasons: Iterable[Reason]) -> dict[str, int]:
    return dict(Counter(reason.value for reason in reasons))


def _length_bias(account: Account, applied: Iterable[int]) -> LengthBias:
    trained = [length for group_id in applied if (length := account.length_of(group_id)) is not None]
    left = [
        length
        for group_id, length in account.lengths_at_leaving.items()
        if group_id in account.dropped or group_id in account.parked
    ]
    unsealed = sum(g.with_group and g.attempt > 0 and not g.was_sealed for g in account.given_up)
    return measure_length_bias(left, trained, unknown=unsealed)


def _reward_windows(account: Account, wanted: int) -> tuple[RewardWindow | None, RewardWindow | None]:
    steps = account.steps
    size = min(wanted, max(1, len(steps) // 2))
    if not steps or size < 1:
        return None, None
    return _window(account, steps[:size]), _window(account, steps[-size:])


def _window(account: Account, steps: Sequence[StepApplied]) -> RewardWindow:
    groups = [group_id for step in steps for group_id in step.group_ids]
    seals = [seal for group_id in groups for seal in account.sealed.get(group_id, {}).values() if seal.valid]
    return RewardWindow(
        first_step=steps[0].train_step,
        last_step=steps[-1].train_step,
        groups=len(groups),
        siblings=len(seals),
        mean_raw_reward=fmean(seal.raw_reward for seal in seals) if seals else None,
        mean_shaped_reward=fmean(seal.shaped_reward for seal in seals) if seals else None,
    )
