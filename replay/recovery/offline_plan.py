"""What a restart would do, from files only: the log is verified and read, nothing is locked or changed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import GroupState, Projection
from kinlog.lineage.store import LocalStore
from kinlog.replay.inspection import stray_content_bytes
from kinlog.replay.recovery.journal import rows_in_journal, rows_to_put_back
from kinlog.replay.recovery.kill_loss import KillLoss, kill_loss
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.replay.recovery.progress import resumed_by
from kinlog.replay.recovery.report import RecoveryReport, build_report
from kinlog.replay.recovery.restore import RestorePoint, restore_points, restored_projection, verify_run
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
from kinlog.schemas.rows import RowTag

__all__ = ["OfflinePlan", "plan_offline"]


class OfflinePlan(NamedTuple):
    """A plan that was made without a data plane: it takes its content to be what the checkpoint's lineage says."""

    plan: RecoveryPlan
    report: RecoveryReport
    loss: KillLoss
    """What a kill at the end of the log costs."""


def plan_offline(
    run: RunDirectory,
    *,
    policy: RecoveryPolicy,
    checkpoint: str | None = None,
    is_stale: Callable[[Projection, GroupState], bool] | None = None,
    evict: Callable[[Projection, Sequence[GroupState]], Sequence[GroupState]] = lambda p, ready: (),
    clock_s: Callable[[], float] = time.perf_counter,
) -> OfflinePlan:
    """Decide what a restart would do now. Works on the log of a running controller as well.

    Parameters
    ----------
    run:
        The run. It may have no checkpoints.
    policy:
        The user's choices.
    checkpoint:
        Name of an explicit checkpoint, or ``start``; by default the newest usable one.
    is_stale:
        The sampler's judgement of a group, given the restored projection. ``None``: not judged, and the report says so.
    evict:
        The sampler's choice, of the groups in the replay buffer, of those that it does not keep.
    clock_s:
        Monotonic seconds, for the report.

    Raises
    ------
    LogDamagedError, LogUnsupportedError
        The log cannot be trusted, or not be read; so would a restart say.
    ConfigError
        More groups are alive than there are permits, and the policy is to refuse.
    CheckpointError
        The explicit checkpoint cannot be used, or none can and the run cannot begin again from its start.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began_s = clock_s()
        yield
        seconds[name] = clock_s() - began_s

    with phase("verify log"):
        scan = _verify(run)
    if scan.end.seq == 0:
        raise RunNotFoundError(f"the run in {run.path} was never begun: there is nothing to restart")
    with phase("choose checkpoint"):
        point = next(restore_points(run, scan, wanted=checkpoint))
        inventory = point.loaded
        restored = restored_projection(point)
    with phase("read row journal"):
        wanted = {} if policy.discard_rollouts else rows_to_put_back(restored, inventory)
        put_back: dict[str, RowTag] = {}
        for journal in (run.journal, *([point.journal] if point.journal is not None else [])):
            lacking = {key: tag for key, tag in wanted.items() if key not in put_back}
            put_back |= rows_in_journal(LocalStore(), journal, lacking) if lacking else {}
        inventory.staging.update(put_back)
    with phase("plan"):
        plan = plan_recovery(
            restored,
            inventory,
            checkpoint=point.name,
            promised=point.promised,
            promised_finalized_seq=point.promised_finalized_seq,
            policy=policy,
            is_stale=lambda group: is_stale is not None and is_stale(restored, group),
            # Of an exhausted dataset nothing fresher would come instead. A restart asks the dataset itself.
            evict=lambda ready: () if restored.exhausted else evict(restored, ready),
        )
    with phase("read progress"):
        resumed = resumed_by(plan, restored, LocalStore(), run.progress, max_resumes=policy.max_resumes)
    report = build_report(
        plan,
        restored,
        executed=False,
        checkpoint_position=point.manifest.position if point.manifest is not None else None,
        skipped=point.skipped,
        log_end=scan.end,
        step_before=point.at_end.train_step,
        quarantined_bytes=sum(stray_content_bytes(stray) for stray in scan.torn + scan.fenced),
        rows_put_back=len(put_back),
        resumed=resumed,
        seconds=seconds,
        notes=_notes(point, judged=is_stale is not None),
    )
    loss = kill_loss(plan, restored, at_end=point.at_end, put_back=put_back.values(), resumed=resumed)
    return OfflinePlan(plan, report, loss)


def _verify(run: RunDirectory) -> LogScan:
    try:
        return verify_run(run)
    except LogDamagedError:
        # A live log grows between the reading of its segments and that of its checkpoints. Damage is there to stay.
        return verify_run(run)


def _notes(point: RestorePoint, *, judged: bool) -> tuple[str, ...]:
    notes = []
    if point.manifest is None:
        notes.append("without a checkpoint the data plane starts empty: everything sealed is generated again")
    else:
        notes.append(
            "the data plane is taken to hold what the log says of it at the checkpoint; a restart looks for itself"
        )
    if not judged:
        notes.append("staleness was not judged: a restart may drop groups that its sampler calls stale")
    return tuple(notes)
