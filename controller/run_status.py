"""A glance at a running controller, for those who show progress."""

from collections import Counter

import msgspec

from kinlog.controller.metrics_run import RunMetrics
from kinlog.controller.runtime import Runtime

__all__ = ["RunStatus", "status_of"]


class RunStatus(msgspec.Struct, frozen=True):
    """How a run is at one moment."""

    train_step: int
    max_steps: int
    weight_version: int
    phases: dict[str, int]
    """Group phase -> live groups."""
    running_siblings: int
    sealed_siblings: int
    """In live groups."""
    drawn: int
    applied: int
    dropped: int
    sealed_tokens_total: int
    appended_seq: int
    durable_seq: int
    mean_staleness: float
    max_staleness: int
    """Weight versions that the oldest tokens of live groups are behind."""
    tokens_per_second: float
    """Completion tokens sealed over the last minute."""
    seconds_per_step: float | None
    eta_s: float | None
    """Until the last step; ``None`` while the pace is not known."""


def status_of(runtime: Runtime, metrics: RunMetrics) -> RunStatus:
    """Look at a run."""
    p, writer = runtime.projection, runtime.ledger.writer
    live = list(p.live_groups())
    siblings = [sibling for group in live for sibling in group.siblings.values()]
    behind = [p.weight_version - group.min_weight_version for group in live]
    now_us, max_steps = runtime.clock_us(), runtime.config.trainer.max_steps
    return RunStatus(
        train_step=p.train_step,
        max_steps=max_steps,
        weight_version=p.weight_version,
        phases=dict(Counter(group.phase.value for group in live)),
        running_siblings=sum(sibling.running for sibling in siblings),
        sealed_siblings=sum(sibling.sealed is not None for sibling in siblings),
        drawn=p.drawn_total,
        applied=p.applied_total,
        dropped=p.dropped_total,
        sealed_tokens_total=p.sealed_tokens_total,
        appended_seq=writer.last_seq,
        durable_seq=writer.acknowledged_seq,
        mean_staleness=sum(behind) / len(behind) if behind else 0.0,
        max_staleness=max(behind, default=0),
        tokens_per_second=metrics.tokens_per_second(now_us),
        seconds_per_step=metrics.pace.seconds_per_step,
        eta_s=metrics.pace.seconds_to(max_steps, now_us=now_us),
    )
