"""A glance at a run at one moment, from its projection and what is recent: pure."""

from collections import Counter
from enum import StrEnum

import msgspec

from kinlog.lineage.state import GroupState, Projection
from kinlog.replay.watch.followed_log import Tail
from kinlog.replay.watch.kill_cost import KillCost, kill_cost
from kinlog.replay.watch.recent import Recent

__all__ = [
    "RunState",
    "OldestSibling",
    "Staleness",
    "LastCheckpoint",
    "LogLag",
    "RunView",
    "Configured",
    "view_run",
]


class RunState(StrEnum):
    """How a run is, as far as it can be known from outside."""

    RUNNING = "running"
    """Its log is open, and its process lives, or is on another machine."""
    DIED = "died"
    """Its log is open, and its process is gone."""
    STOPPED = "stopped"
    """Its log was closed in order, before its last step as far as is known: it was preempted, or ran out of prompts."""
    DONE = "done"
    """Its log was closed in order, and every step is trained."""


class Configured(msgspec.Struct, frozen=True, kw_only=True):
    """What the run's configuration says; all ``None`` where it cannot be read."""

    max_steps: int | None = None
    max_live_groups: int | None = None
    row_journal: bool | None = None


class OldestSibling(msgspec.Struct, frozen=True, kw_only=True):
    """The sibling in flight that was sent first."""

    group_id: int
    generation: int
    attempt: int
    worker: str
    age_s: float


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Of live groups: how many weight versions the oldest tokens of each are behind the current weights."""

    min: int
    mean: float
    max: int


class LastCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The last checkpoint that was committed."""

    name: str
    kind: str
    train_step: int
    age_s: float
    duration_s: float | None
    """``None``: its log does not say."""
    held_s: float | None
    """How long no cut was open anywhere."""


class LogLag(msgspec.Struct, frozen=True, kw_only=True):
    """What was appended and may not be durable yet, as far as the log's files say.

    Each frame says up to which event everything was durable before it was written. So the newest frame's own events are
    never proven, until the next one is written or the segment ends in order: with ``log.durability: fsync`` they are
    durable within one sync all the same. What waits in the controller's memory cannot be seen from outside.
    """

    last_seq: int
    durable_seq: int
    unproven_events: int
    newest_event_age_s: float


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kinlog watch`` shows."""

    run_id: str
    state: RunState
    as_of_us: int
    """Now; of a run that has ended, its last event."""
    host: str
    pid: int
    life: int
    """The number of this life: its writer epoch."""
    life_s: float
    restarts: int
    """How often trainer and data plane were restored."""
    train_step: int
    max_steps: int | None
    weight_version: int
    seconds_per_step: float | None
    last_step_age_s: float | None
    eta_s: float | None
    groups: dict[str, int]
    """Phase -> live groups."""
    live_groups: int
    max_live_groups: int | None
    drawn: int
    applied: int
    parked: int
    dropped: dict[str, int]
    """By reason."""
    siblings_in_flight: int
    siblings_waiting: int
    siblings_sealed: int
    """Those three of live groups."""
    superseded: dict[str, int]
    """Attempts given up in the whole run, by reason."""
    oldest: OldestSibling | None
    tokens_per_second: float
    """Completion tokens sealed over the last minute."""
    sealed_tokens: int
    """In the whole run."""
    staleness: Staleness | None
    """``None``: no group is live."""
    log_lag: LogLag
    checkpoint: LastCheckpoint | None
    checkpoints_failed: int
    """Since that one."""
    kill: KillCost
    row_journal: bool | None


def view_run(
    p: Projection,
    recent: Recent,
    tail: Tail,
    *,
    configured: Configured,
    is_alive: bool | None,
    now_us: int,
) -> RunView:
    """Say how a run is.

    Parameters
    ----------
    is_alive:
        Whether the process that wrote the last event lives; ``None`` where that cannot be known.
    now_us:
        Wall clock, microseconds since 1970-01-01 UTC.
    """
    state = _state(p, configured, is_alive=is_alive)
    # The clock of the run's machine may be ahead of this one's.
    as_of_us = max(now_us, recent.last_us) if state is RunState.RUNNING else recent.last_us
    live = list(p.live_groups())
    siblings = [sibling for group in live for sibling in group.siblings.values()]
    max_steps, last_step_us = configured.max_steps, recent.pace.last_us
    eta_s = None
    if state is RunState.RUNNING and max_steps is not None:
        eta_s = recent.pace.seconds_to(max_steps, now_us=as_of_us)
    return RunView(
        run_id=p.run_id,
        state=state,
        as_of_us=as_of_us,
        host=recent.host,
        pid=recent.pid,
        life=p.last_epoch,
        life_s=(as_of_us - recent.began_us) / 1e6,
        restarts=p.restarts,
        train_step=p.train_step,
        max_steps=max_steps,
        weight_version=p.weight_version,
        seconds_per_step=recent.pace.seconds_per_step,
        last_step_age_s=None if last_step_us is None else (as_of_us - last_step_us) / 1e6,
        eta_s=eta_s,
        groups=dict(Counter(group.phase.value for group in live)),
        live_groups=len(live),
        max_live_groups=configured.max_live_groups,
        drawn=p.drawn_total,
        applied=p.applied_total,
        parked=p.parked_total,
        dropped={reason.value: count for reason, count in p.dropped.items()},
        siblings_in_flight=sum(sibling.running for sibling in siblings),
        siblings_waiting=sum(sibling.waiting for sibling in siblings),
        siblings_sealed=sum(sibling.sealed is not None for sibling in siblings),
        superseded={reason.value: count for reason, count in p.superseded.items()},
        oldest=_oldest(live, recent, as_of_us),
        tokens_per_second=recent.tokens.per_second(
            as_of_us, since_us=max(recent.began_us, recent.tokens_since_us)
        ),
        sealed_tokens=p.sealed_tokens_total,
        staleness=_staleness(p, live),
        log_lag=LogLag(
            last_seq=tail.last.seq,
            durable_seq=tail.durable_seq,
            unproven_events=tail.unproven_events,
            newest_event_age_s=(max(now_us, recent.last_us) - recent.last_us) / 1e6,
        ),
        checkpoint=_checkpoint(recent, as_of_us),
        checkpoints_failed=recent.failed_checkpoints,
        kill=kill_cost(p, recent.dispatched, now_us=as_of_us),
        row_journal=configured.row_journal,
    )


def _state(p: Projection, configured: Configured, *, is_alive: bool | None) -> RunState:
    if p.cleanly_closed:
        done = configured.max_steps is not None and p.train_step >= configured.max_steps
        return RunState.DONE if done else RunState.STOPPED
    return RunState.DIED if is_alive is False else RunState.RUNNING


def _oldest(live: list[GroupState], recent: Recent, as_of_us: int) -> OldestSibling | None:
    running = [
        (sent.time_us, group.group_id, generation, sent)
        for group in live
        for generation, sibling in group.siblings.items()
        if sibling.running and (sent := recent.dispatched.get((group.group_id, generation))) is not None
    ]
    if not running:
        return None
    time_us, group_id, generation, sent = min(running, key=lambda one: one[:3])
    age_s = max(0, as_of_us - time_us) / 1e6
    return OldestSibling(
        group_id=group_id, generation=generation, attempt=sent.attempt, worker=sent.worker, age_s=age_s
    )


def _staleness(p: Projection, live: list[GroupState]) -> Staleness | None:
    behind = [p.weight_version - group.min_weight_version for group in live]
    return Staleness(min=min(behind), mean=sum(behind) / len(behind), max=max(behind)) if behind else None


def _checkpoint(recent: Recent, as_of_us: int) -> LastCheckpoint | None:
    if recent.saved is None:
        return None
    time_us, event = recent.saved
    return LastCheckpoint(
        name=event.name,
        kind=event.checkpoint_kind.value,
        train_step=event.train_step,
        age_s=max(0, as_of_us - time_us) / 1e6,
        duration_s=None if event.duration_us is None else event.duration_us / 1e6,
        held_s=None if event.held_us is None else event.held_us / 1e6,
    )
