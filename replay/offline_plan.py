"""What a restart would do, from files only: the log is verified and read, nothing is locked or changed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import GroupState, Projection
from kinlog.replay.inspection import stray_content_bytes
from kinlog.replay.inventory import expected_inventory
from kinlog.replay.plan import RecoveryPlan, RecoveryPolicy, plan_recovery
from kinlog.replay.report import RecoveryReport, build_report
from kinlog.replay.restore import RestorePoint, restore_points, restored_projection, verify_run
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError

__all__ = ["OfflinePlan", "plan_offline"]


class OfflinePlan(NamedTuple):
    """A plan that was made without a data plane: it takes its content to be what the checkpoint's lineage says."""

    plan: RecoveryPlan
    report: RecoveryReport


def plan_offline(
    run: RunDirectory,
    *,
    policy: RecoveryPolicy,
    checkpoint: str | None = None,
    is_stale: Callable[[Projection, GroupState], bool] | None = None,
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
    clock_s:
        Monotonic seconds, for the report.

    Raises
    ------
    LogDamagedError, LogUnsupportedError
        The log cannot be trusted, or not be read; so would a restart say.
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
        inventory = expected_inventory(point.at_checkpoint)
        restored = restored_projection(point)
    with phase("plan"):
        plan = plan_recovery(
            restored,
            inventory,
            checkpoint=point.name,
            promised=point.manifest.position if point.manifest is not None else None,
            policy=policy,
            is_stale=lambda group: is_stale is not None and is_stale(restored, group),
        )
    report = build_report(
        plan,
        restored,
        executed=False,
        checkpoint_position=point.manifest.position if point.manifest is not None else None,
        skipped=point.skipped,
        log_end=scan.end,
        step_before=point.at_end.train_step,
        quarantined_bytes=sum(stray_content_bytes(stray) for stray in scan.torn + scan.fenced),
        seconds=seconds,
        notes=_notes(point, judged=is_stale is not None),
    )
    return OfflinePlan(plan, report)


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
