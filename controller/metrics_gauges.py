"""What metrics say of a running controller at a moment: looked at once a second, and never on the way of the work."""

from collections import Counter

from kinlog.controller import metrics as m
from kinlog.controller.metrics_values import MetricValues
from kinlog.controller.runtime import Runtime
from kinlog.lineage.state import LIVE_PHASES

__all__ = ["measure_gauges"]


def measure_gauges(values: MetricValues, runtime: Runtime, tokens_per_second: float) -> None:
    """Set every gauge of a controller that is not set by an event, and the counters that the barrier keeps."""
    p, config, writer = runtime.projection, runtime.config, runtime.ledger.writer
    live = list(p.live_groups())
    values.set(m.TRAIN_STEP, p.train_step)
    values.set(m.MAX_STEPS, config.trainer.max_steps)
    values.set(m.WEIGHT_VERSION, p.weight_version)
    values.set(m.TOKENS_PER_SECOND, tokens_per_second)
    phases = Counter(group.phase for group in live)
    for phase in LIVE_PHASES:
        values.set(m.LIVE_GROUPS, phases[phase], phase.value)
    values.set(m.PERMITS, config.rollout.max_live_groups)
    behind = [p.weight_version - group.min_weight_version for group in live] or [0]
    values.set(m.STALENESS, min(behind), "min")
    values.set(m.STALENESS, sum(behind) / len(behind), "mean")
    values.set(m.STALENESS, max(behind), "max")
    siblings = [sibling for group in live for sibling in group.siblings.values()]
    values.set(m.IN_FLIGHT, sum(sibling.running for sibling in siblings))
    values.set(m.WAITING, sum(sibling.waiting for sibling in siblings))
    values.set(m.WORKER_SLOTS, config.rollout.max_inflight_siblings)
    values.set(m.WORKER_SLOTS_IN_USE, runtime.budget.in_use)
    for work, requests in runtime.budget.waiting.items():
        values.set(m.WORKER_REQUESTS_WAITING, requests, work.value)
    values.set(m.LOG_SEQ, writer.last_seq)
    values.set(m.LOG_LAG, writer.last_seq - writer.acknowledged_seq)
    values.set(m.LOG_EPOCH, writer.epoch)
    for kind, stats in runtime.barrier.stats.items():
        values.set(m.CUTS, stats.count, kind)
        values.set(m.CUT_WAITS, stats.waited, kind)
        values.set(m.CUT_WAIT_SECONDS, stats.waited_s, kind)
        values.set(m.CUT_MAX_WAIT_SECONDS, stats.max_waited_s, kind)
        values.set(m.CUT_HELD_SECONDS, stats.held_s, kind)
