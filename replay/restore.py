"""Where a restart begins: the log, verified against what checkpoints promised, and the checkpoint to go back to."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc

from kinlog.lineage.fold import fold
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan, check_marks, scan_log
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.replay.checkpoints import FoundCheckpoint, find_checkpoints
from kinlog.replay.inventory import expected_inventory
from kinlog.replay.projection import SNAPSHOT_NAME, project, read_snapshot
from kinlog.replay.report import SkippedCheckpoint, brief_problem
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.events import RecordedEvent, RunRestored, kind_of
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.rows import inventory_digest

__all__ = ["START", "RestorePoint", "verify_run", "restore_points", "restored_event", "restored_projection"]

#: The name of the start of the run, where a checkpoint's name is expected.
START = "start"


class RestorePoint(NamedTuple):
    """A checkpoint that can be gone back to, or the start of the run."""

    path: Path | None
    manifest: Manifest | None
    at_checkpoint: Projection
    """The projection at the checkpoint; an empty one at the start of the run."""
    at_end: Projection
    """The projection of the whole log."""
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
    run: RunDirectory,
    scan: LogScan,
    *,
    wanted: str | None = None,
    refuse_unfit: Callable[[str, Manifest], None] = lambda name, manifest: None,
) -> Generator[RestorePoint, str | None, None]:
    """Yield the places to restart from, best first. When loading one fails, send the reason, and get the next.

    The start of the run is one of them only as long as no checkpoint was ever committed, or by explicit choice: to throw
    away what was trained is not for a restart to decide.

    Parameters
    ----------
    wanted:
        The name of an explicit checkpoint, or ``START``; by default the newest usable one.
    refuse_unfit:
        Raises when a checkpoint does not fit the configuration. That is the user's to correct: going back further
        instead would lose training for good.

    Raises
    ------
    CheckpointError
        There is nowhere left to restart from; the message says why, for each checkpoint.
    """
    skipped: list[SkippedCheckpoint] = []
    names: list[str] = []
    for found in find_checkpoints(run.checkpoints, log_id=scan.log_id):
        names.append(found.path.name)
        if wanted is not None and found.path.name != wanted:
            continue
        try:
            point = _load(found, scan, refuse_unfit)
        except CheckpointError as error:
            skipped.append(SkippedCheckpoint(found.path.name, brief_problem(found.path.name, str(error))))
        else:
            failed = yield point._replace(skipped=tuple(skipped))
            skipped.append(SkippedCheckpoint(found.path.name, failed or "it could not be loaded"))
    at_end = project(scan)
    if wanted == START or (wanted is None and not at_end.checkpoints and at_end.frontier_step == 0):
        _refuse_forgotten(0, at_end)
        yield RestorePoint(None, None, Projection(), at_end, tuple(skipped))
        return
    if wanted is not None:
        known = f"there are {', '.join(sorted(names)) or 'none'}"
        problem = (
            skipped[0].reason if skipped else f"{run.checkpoints} has no checkpoint of that name; {known}"
        )
        raise CheckpointError(f"checkpoint {wanted!r} cannot be used: {problem}. Nothing was changed.")
    reasons = "; ".join(f"{skip.name}: {skip.reason}" for skip in skipped) or "there is none"
    beginning = (
        f", or choose to begin again from the start of the run (--checkpoint {START})"
        if at_end.frontier_step == 0
        else "; the run cannot begin again, since the log has forgotten groups of its first steps"
    )
    raise CheckpointError(
        f"no checkpoint in {run.checkpoints} can be used ({reasons}). Nothing was changed. Restore a checkpoint "
        f"directory{beginning}."
    )


def _load(
    found: FoundCheckpoint, scan: LogScan, refuse_unfit: Callable[[str, Manifest], None]
) -> RestorePoint:
    """Read a checkpoint's projection, and fold it to the end of the log. Raises when it cannot be gone back to."""
    manifest = found.manifest
    if manifest is None or found.problem:
        raise CheckpointError(found.problem)
    snapshot_path = found.path / SNAPSHOT_NAME
    at_checkpoint = read_snapshot(snapshot_path, manifest.projection_digest)
    promised = expected_inventory(at_checkpoint)
    for name, rows, digest in (
        ("staging", promised.staging, manifest.staging_digest),
        ("training", promised.training, manifest.training_digest),
    ):
        if inventory_digest(rows).hex() != digest:
            raise CheckpointError(f"its projection and its manifest promise different {name} rows")
    undone = _rolled_back_since(scan, manifest)
    if undone is not None:
        raise CheckpointError(f"its steps were rolled back to step {undone} by a later restart")
    at_end = project(scan, read_snapshot(snapshot_path, manifest.projection_digest))
    _refuse_forgotten(manifest.train_step, at_end)
    refuse_unfit(found.path.name, manifest)
    return RestorePoint(found.path, manifest, at_checkpoint, at_end, ())


def _refuse_forgotten(train_step: int, at_end: Projection) -> None:
    if train_step < at_end.frontier_step:
        raise CheckpointError(
            f"newer checkpoints cover the steps from {train_step} to {at_end.frontier_step}, and the log has forgotten "
            "their groups"
        )


def _rolled_back_since(scan: LogScan, manifest: Manifest) -> int | None:
    """Return the step that a later restart went back to, before a checkpoint's: what its trainer learned from since is
    trained on again."""
    for batch in scan.batches(after_seq=manifest.position.seq):
        restores = pc.equal(batch.column("kind").dictionary_decode(), kind_of(RunRestored))
        undone = pc.and_(restores, pc.less(batch.column("train_step"), manifest.train_step))
        for step in batch.column("train_step").filter(undone).to_pylist():
            return int(step)
    return None


def restored_event(point: RestorePoint) -> RunRestored:
    """Return the event that rolls the trainer's effects back to a restore point."""
    manifest = point.manifest
    return RunRestored(
        checkpoint=point.name,
        position=manifest.position if manifest is not None else None,
        train_step=manifest.train_step if manifest is not None else 0,
        weight_version=manifest.weight_version if manifest is not None else 0,
    )


def restored_projection(point: RestorePoint) -> Projection:
    """Return the projection that a restart goes on from: the whole log, rolled back to a restore point."""
    copy = decode_projection(encode_projection(point.at_end))
    fold(copy, RecordedEvent(copy.last_seq + 1, copy.last_epoch, 0, restored_event(point)))
    return copy
