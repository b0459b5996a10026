"""The proof: what was drawn, trained on, reused and redone, counted from the log's events alone.

The counts are kept apart from the fold, which guards the same rules: a fold that let something through would be seen
here. Only the groups that are alive are taken from the projection, so that the conservation law compares two accounts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan
from kinlog.replay.plain_text import (
    format_count,
    format_time,
    render_counts,
    render_paragraph,
    render_sections,
    render_table,
)
from kinlog.replay.proof_account import Account, RestartAccount
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.events import StepApplied
from kinlog.schemas.reasons import Reason

__all__ = ["Proof", "RewardWindow", "prove", "render_proof"]


class RewardWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards over consecutive applied steps of the surviving history."""

    first_step: int
    last_step: int
    groups: int
    siblings: int
    """Valid ones: placeholders and failures are no examples."""
    mean_raw_reward: float | None
    mean_shaped_reward: float | None


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What the log proves, with the numbers."""

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
    redispatched_without_reason: int
    """Attempts dispatched while the sibling had one that was sealed or running."""
    late_rejected: int
    restarts: tuple[RestartAccount, ...]

    first_rewards: RewardWindow | None
    last_rewards: RewardWindow | None
    impossible: str
    """The first event that does not fit the state it meets; empty when the log can be folded."""

    @property
    def holds(self) -> bool:
        """Whether nothing was lost, nothing trained on twice, and everything redone has a reason."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold, in words."""
        failed = [
            (not self.conservation_holds, "drawn = applied + dropped + parked + alive does not hold"),
            (bool(self.draws_missing), f"{format_count(len(self.draws_missing), 'prompt')} lost"),
            (bool(self.draws_repeated), f"{format_count(len(self.draws_repeated), 'prompt')} drawn twice"),
            (bool(self.applied_twice), f"{format_count(len(self.applied_twice), 'group')} trained on twice"),
            (
                bool(self.redispatched_without_reason),
                f"{format_count(self.redispatched_without_reason, 'sibling')} redispatched without a reason",
            ),
            (bool(self.impossible), f"the log tells an impossible story: {self.impossible}"),
        ]
        return tuple(words for is_so, words in failed if is_so)


def prove(scan: LogScan, *, reward_steps: int = 3) -> Proof:
    """Compute the proof from a verified log.

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
    return Proof(
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
        redispatched_without_reason=account.redispatched_without_reason,
        late_rejected=account.late_rejected,
        restarts=tuple(account.restarts),
        first_rewards=first,
        last_rewards=last,
        impossible=impossible,
    )


def _counts(reasons: Iterable[Reason]) -> dict[str, int]:
    return dict(Counter(reason.value for reason in reasons))


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


def render_proof(proof: Proof) -> str:
    """Return the proof as text."""
    text = render_sections(
        [_conservation(proof), _draws(proof), _training(proof), _siblings(proof), _rewards(proof)], indent=2
    )
    title = f"proof from the log: run {proof.run_id}, {proof.events:,} events, {_lives(proof.lives)}"
    verdict = (
        "HOLDS: nothing lost, nothing trained on twice, a reason for everything redone"
        if proof.holds
        else "DOES NOT HOLD: " + "; ".join(proof.failures)
    )
    return "\n\n".join([title, *_dropped_history(proof), text, *_restarts(proof.restarts), verdict])


def _dropped_history(proof: Proof) -> list[str]:
    if not proof.dropped_events:
        return []
    return [
        render_paragraph(
            f"The first {format_count(proof.dropped_events, 'event')} were dropped, and only what they amounted to is "
            "left: that is taken as it is. What was redone, restarts and rewards are counted after them.",
            first="  ",
            rest="  ",
        )
    ]


def _lives(lives: int) -> str:
    return format_count(lives, "life", "lives")


def _conservation(proof: Proof) -> list[tuple[str, str]]:
    lines = [
        ("groups drawn", f"{proof.drawn:,}"),
        ("  = applied", f"{proof.applied:,}"),
        ("  + dropped", _total(proof.dropped)),
        ("  + parked", _total(proof.parked)),
        ("  + alive", "unknown" if proof.alive is None else f"{proof.alive:,}"),
    ]
    if proof.unaccounted:
        lines.append(("  unaccounted for", f"{len(proof.unaccounted):,}: {_some(proof.unaccounted)}"))
    if proof.counted_twice:
        lines.append(("  in two of these", f"{len(proof.counted_twice):,}: {_some(proof.counted_twice)}"))
    return lines


def _draws(proof: Proof) -> list[tuple[str, str]]:
    return [
        ("prompts drawn", f"{proof.draw_cursor:,}"),
        ("  lost", _number_of(proof.draws_missing)),
        ("  drawn twice", _number_of(proof.draws_repeated)),
    ]


def _training(proof: Proof) -> list[tuple[str, str]]:
    undone = f"; {proof.steps_rolled_back:,} more undone by restarts" if proof.steps_rolled_back else ""
    return [
        ("optimizer steps", f"{proof.steps:,}{undone}"),
        ("  applied twice", _number_of(proof.applied_twice)),
    ]


def _siblings(proof: Proof) -> list[tuple[str, str]]:
    return [
        ("siblings sealed", f"{proof.sealed:,}"),
        ("  redone", _total(proof.sealed_redone)),
        ("  redone, no reason", f"{proof.redispatched_without_reason:,}"),
        ("late results rejected", f"{proof.late_rejected:,}"),
    ]


def _rewards(proof: Proof) -> list[tuple[str, str]]:
    if proof.first_rewards is None or proof.last_rewards is None:
        return [("mean reward", "no step was applied")]
    return [
        ("mean reward", "raw (shaped)"),
        *(
            (f"  {_step_range(window)}", _mean(window))
            for window in dict.fromkeys((proof.first_rewards, proof.last_rewards))
        ),
    ]


def _step_range(window: RewardWindow) -> str:
    if window.first_step == window.last_step:
        return f"step {window.first_step}"
    return f"steps {window.first_step} to {window.last_step}"


def _mean(window: RewardWindow) -> str:
    if window.mean_raw_reward is None or window.mean_shaped_reward is None:
        return "no valid sibling"
    return (
        f"{window.mean_raw_reward:.4f} ({window.mean_shaped_reward:.4f}) "
        f"over {format_count(window.siblings, 'sibling')} of {format_count(window.groups, 'group')}"
    )


def _restarts(restarts: Sequence[RestartAccount]) -> list[str]:
    if not restarts:
        return ["  no restart"]
    rows = [
        (
            str(r.epoch),
            format_time(r.began_us),
            _came_from(r),
            f"{r.sealed_before:,}",
            f"{r.reused:,}",
            f"{sum(r.regenerated.values()):,}",
            f"{sum(r.left_with_group.values()):,}",
            f"{sum(r.in_flight_redispatched.values()):,}",
        )
        for r in restarts
    ]
    titles = ("life", "restarted", "from", "sealed", "reused", "redone", "dropped", "in flight")
    table = render_table(titles, rows, right=(0, 3, 4, 5, 6, 7), indent=2)
    return [
        render_paragraph(
            f"{format_count(len(restarts), 'restart')}: of the sealed siblings that each found, how many it reused, "
            "redid, or dropped with their group; and how many attempts in flight it gave up, to redo them",
            first="  ",
            rest="  ",
        )
        + "\n\n"
        + table
    ]


def _came_from(restart: RestartAccount) -> str:
    if not restart.restored:
        return "never restored"
    return restart.checkpoint or "the start"


def _total(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{total:,} ({render_counts(counts)})" if total else "0"


def _number_of(ids: Sequence[int]) -> str:
    return f"{len(ids):,}: {_some(ids)}" if ids else "0"


def _some(ids: Sequence[int]) -> str:
    return ", ".join(str(i) for i in ids[:8]) + (", ..." if len(ids) > 8 else "")
