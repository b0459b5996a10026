"""Where a restart begins: the log, verified against what checkpoints promised, and the checkpoint to go back to."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc

from kinlog.lineage.fold import fold
from kinlog.lineage.log import LogScan, check_marks, scan_log
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.replay.checkpoints import find_checkpoints
from kinlog.replay.projection import SNAPSHOT_NAME, project, read_snapshot
from kinlog.replay.report import SkippedCheckpoint
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.events import RecordedEvent, RunRestored, kind_of
from kinlog.schemas.manifest import Manifest

__all__ = ["RestorePoint", "verify_run", "restore_points", "restored_event", "restored_projection"]


class RestorePoint(NamedTuple):
    """A checkpoint that can be gone back to, or the start of the run."""

    path: Path | None
    manifest: Manifest | None
    snapshot: Projection | None
    """The projection at the checkpoint; the caller may go on folding it."""
    skipped: tuple[SkippedCheckpoint, ...]
    """Why newer checkpoints are not used."""

    @property
    def name(self) -> str | None:
        return self.path.name if self.path is not None else None


def verify_run(run: RunDirectory) -> LogScan:
    """Verify a run's log, also against every complete checkpoint of it.

    Raises
    ------
    RunNotFoundError, LogDamagedError, LogUnsupportedError
        As for :func:`kinlog.lineage.log.scan_log`.
    """
    scan = scan_log(run.log)
    found = find_checkpoints(run.checkpoints, log_id=scan.log_id, verify=False)
    check_marks(scan, [c.manifest.position for c in found if c.manifest is not None and c.usable])
    return scan


def restore_points(
    run: RunDirectory, scan: LogScan, *, incompatible: Callable[[Manifest], str] = lambda manifest: ""
) -> Iterator[RestorePoint]:
    """Yield the places to restart from, best first: usable checkpoints by age, then the start of the run.

    Each comes with the reasons why those before it are not used, as far as files can tell; the caller goes on to the
    next one when loading fails. The start of the run is left out once the log has forgotten groups of it.

    Parameters
    ----------
    incompatible:
        Says why a checkpoint does not fit this configuration; an empty text when it does.
    """
    skipped: list[SkippedCheckpoint] = []
    for found in find_checkpoints(run.checkpoints, log_id=scan.log_id):
        problem = found.problem or (incompatible(found.manifest) if found.manifest is not None else "")
        if not problem and found.manifest is not None:
            problem = _rolled_back_since(scan, found.manifest)
        if not problem and found.manifest is not None:
            try:
                snapshot = read_snapshot(found.path / SNAPSHOT_NAME, found.manifest.projection_digest)
            except CheckpointError as error:
                problem = str(error)
            else:
                yield RestorePoint(found.path, found.manifest, snapshot, tuple(skipped))
                problem = "the data plane could not load it"
        skipped.append(SkippedCheckpoint(found.path.name, problem))
    if project(scan).frontier_step == 0:
        yield RestorePoint(None, None, None, tuple(skipped))


def _rolled_back_since(scan: LogScan, manifest: Manifest) -> str:
    """Say that a later restart undid a checkpoint's steps: what its trainer learned from is trained on again."""
    for batch in scan.batches(after_seq=manifest.position.seq):
        restores = pc.equal(batch.column("kind").dictionary_decode(), kind_of(RunRestored))
        undone = pc.and_(restores, pc.less(batch.column("train_step"), manifest.train_step))
        for step in batch.column("train_step").filter(undone).to_pylist():
            return f"its steps were rolled back to step {step} by a later restart"
    return ""


def restored_event(point: RestorePoint) -> RunRestored:
    """Return the event that rolls the trainer's effects back to a restore point."""
    manifest = point.manifest
    return RunRestored(
        checkpoint=point.name,
        position=manifest.position if manifest is not None else None,
        train_step=manifest.train_step if manifest is not None else 0,
        weight_version=manifest.weight_version if manifest is not None else 0,
    )


def restored_projection(projection: Projection, point: RestorePoint) -> Projection:
    """Return a copy of a projection, rolled back to a restore point: what a restart would go on from."""
    copy = decode_projection(encode_projection(projection))
    fold(copy, RecordedEvent(copy.last_seq + 1, copy.last_epoch, 0, restored_event(point)))
    return copy
