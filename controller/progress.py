"""What ``kinlog train`` says of a run as it goes on, as text: one line for each thing that happened."""

from kinlog.controller.checkpoint import SavedCheckpoint
from kinlog.controller.run_status import RunStatus
from kinlog.replay.plain_text import format_count, format_duration, render_counts
from kinlog.replay.recovery.report import RecoveryReport
from kinlog.schemas.orders import TrainMetrics

__all__ = ["checkpoint_line", "restart_line", "status_line", "step_line"]


def step_line(metrics: TrainMetrics, status: RunStatus) -> str:
    """Return the line of an optimizer step that was applied; columns stand under each other."""
    width = len(str(status.max_steps))
    pace = "" if status.seconds_per_step is None else f"  {format_duration(status.seconds_per_step)}/step"
    eta = "" if status.eta_s is None else f"  ETA {format_duration(status.eta_s)}"
    return (
        f"step {metrics.train_step:{width}d}/{status.max_steps}  reward {metrics.mean_raw_reward:.3f}  "
        f"shaped {metrics.mean_shaped_reward:.3f}  loss {metrics.loss:+.4f}  "
        f"{status.tokens_per_second:7,.0f} tok/s  stale {status.mean_staleness:.1f} (max {status.max_staleness})  "
        f"{sum(status.phases.values()):3d} live, {status.running_siblings:3d} in flight{pace}{eta}"
    )


def checkpoint_line(saved: SavedCheckpoint) -> str:
    """Return the line of a checkpoint that was taken, or that failed."""
    if saved.problem:
        return f"checkpoint {saved.name} FAILED, the previous one stands: {saved.problem}"
    held = f"{1000 * saved.held_s:.0f} ms"
    return f"checkpoint {saved.name} in {saved.seconds:.2f} s, of which everything was held for {held}"


def restart_line(report: RecoveryReport) -> str:
    """Return a restart's report in one line."""
    redone = sum(report.siblings_redispatched.values())
    return (
        f"restarted from {report.checkpoint or 'the start of the run'}, step {report.train_step}: "
        f"{format_count(report.siblings_reused, 'sibling')} reused ({format_count(report.tokens_saved, 'token')}), "
        f"{redone:,} redone ({render_counts(report.siblings_redispatched)}), "
        f"{format_count(report.steps_undone, 'step')} rolled back, in {sum(report.seconds.values()):.1f} s"
    )


def status_line(status: RunStatus) -> str:
    """Return how the run is at this moment, for a line that is written over."""
    phases = ", ".join(f"{count} {phase}" for phase, count in status.phases.items()) or "no live group"
    lag = status.appended_seq - status.durable_seq
    eta = "" if status.eta_s is None else f"  |  ETA {format_duration(status.eta_s)}"
    return (
        f"step {status.train_step}/{status.max_steps}  |  {phases}  |  {status.running_siblings} in flight  |  "
        f"{status.tokens_per_second:,.0f} tok/s  |  {format_count(lag, 'event')} not durable yet{eta}"
    )
