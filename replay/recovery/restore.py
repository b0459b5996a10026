"""Where a restart begins: the log, verified against what checkpoints promised, and the checkpoint to go back to."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc

from kinlog.lineage.fold import FOLD_VERSION, fold
from kinlog.lineage.reading import read_events
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan, check_marks, scan_log
from kinlog.lineage.segment import segment_name
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.replay.checkpoints import (
    DATA_PLANE_NAME,
    JOURNAL_NAME,
    LOG_NAME,
    TRAINER_NAME,
    FoundCheckpoint,
    find_checkpoints,
)
from kinlog.replay.projection import SNAPSHOT_NAME, project, read_snapshot
from kinlog.replay.recovery.anchors import Anchor, verified_anchor
from kinlog.replay.recovery.inventory import Inventory, expected_inventory
from kinlog.replay.recovery.report import SkippedCheckpoint, brief_problem
from kinlog.schemas.errors import CheckpointError, LogDamagedError, RunNotFoundError
from kinlog.schemas.events import Position, RecordedEvent, RunRestored, kind_of
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import CheckpointKind
from kinlog.schemas.rows import inventory_digest

__all__ = [
    "START",
    "RestorePoint",
    "restore_points",
    "restored_event",
    "restored_projection",
    "verify_run",
]

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
    anchor: Anchor | None = None
    """The trainer checkpoint that a rollout checkpoint goes with; ``None`` is the start of the run."""
    at_anchor: Projection = Projection()
    """The projection at the anchor, where the rows are loaded from there."""

    @property
    def name(self) -> str | None:
        return self.path.name if self.path is not None else None

    @property
    def trainer(self) -> Path | None:
        """What the trainer is loaded from. ``None``: it begins as at the start of the run."""
        if self.manifest is None or self.manifest.kind is CheckpointKind.ROLLOUT:
            return self.anchor.path / TRAINER_NAME if self.anchor is not None else None
        return self.path / TRAINER_NAME if self.path is not None else None

    @property
    def data_plane(self) -> Path | None:
        """What the data plane is loaded from. ``None``: it begins empty."""
        if self._by_journal:
            return self.anchor.path / DATA_PLANE_NAME if self.anchor is not None else None
        return self.path / DATA_PLANE_NAME if self.path is not None else None

    @property
    def journal(self) -> Path | None:
        """A row journal to put rows back from, besides the run's own."""
        return self.path / JOURNAL_NAME if self.path is not None and self._by_journal else None

    @property
    def promised(self) -> Position | None:
        """What was sealed or finalized up to here is promised."""
        return self.manifest.position if self.manifest is not None else None

    @property
    def promised_finalized_seq(self) -> int | None:
        """Of groups finalized after this place, the staged rows are promised instead; ``None``: of no group."""
        return _finalized_through_seq(self.manifest) if self.manifest is not None else None

    @property
    def loaded(self) -> Inventory:
        """What the data plane holds once it is loaded, if it agrees with lineage."""
        return expected_inventory(self.at_anchor if self._by_journal else self.at_checkpoint)

    @property
    def _by_journal(self) -> bool:
        return self.manifest is not None and self.manifest.rows_from == "journal"


def _finalized_through_seq(manifest: Manifest) -> int | None:
    if manifest.rows_from == "data_plane":
        return None
    return manifest.anchor_position.seq if manifest.anchor_position is not None else 0


def verify_run(run: RunDirectory) -> LogScan:
    """Verify a run's log, also against every complete checkpoint of it.

    Raises
    ------
    RunNotFoundError, LogDamagedError, LogUnsupportedError
        As for :func:`kinlog.lineage.log.scan_log`.
    """
    try:
        scan = scan_log(run.log)
    except RunNotFoundError:
        _refuse_lost_log(run)
        raise
    found = find_checkpoints(run.checkpoints, log_id=scan.log_id, verify=False)
    check_marks(scan, [c.manifest.position for c in found if c.manifest is not None and c.usable])
    return scan


def _refuse_lost_log(run: RunDirectory) -> None:
    """A log that was never begun has no checkpoints: with them, it is lost, and not to be begun anew."""
    for found in find_checkpoints(run.checkpoints, log_id="", verify=False):
        if found.manifest is not None:
            position = found.manifest.position
            raise LogDamagedError(
                f"the log is lost, and checkpoint {found.path.name} of it is there",
                segment=segment_name(1, 0),
                offset_bytes=0,
                seq=0,
                expected=f"a log that goes on to seq {position.seq} at least, with checksum {position.checksum:08x}",
                found="nothing that was ever written to",
            )


def restore_points(
    run: RunDirectory,
    scan: LogScan,
    *,
    wanted: str | None = None,
    refuse_unfit: Callable[[str, Manifest], None] = lambda name, manifest: None,
) -> Generator[RestorePoint, str | None, None]:
    """Yield the places to restart from, best first. When loading one fails, send the reason, and get the next.

    The start of the run is one of them only as long as no trainer checkpoint was ever committed, or by explicit choice:
    to throw away what was trained is not for a restart to decide.

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
    for found in find_checkpoints(run.checkpoints, log_id=scan.log_id, read_archive=False):
        names.append(found.path.name)
        if wanted is not None and found.path.name != wanted:
            continue
        try:
            point = _load(found, run, scan, refuse_unfit)
        except CheckpointError as error:
            skipped.append(SkippedCheckpoint(found.path.name, brief_problem(found.path.name, str(error))))
        else:
            failed = yield point._replace(skipped=tuple(skipped))
            skipped.append(SkippedCheckpoint(found.path.name, failed or "it could not be loaded"))
    at_end = project(scan)
    trained = any(c.kind is CheckpointKind.TRAINER for c in at_end.checkpoints) or at_end.frontier_step > 0
    if wanted == START or (wanted is None and not trained):
        if scan.base is not None:
            raise CheckpointError(
                f"the run cannot begin again from its start: its events up to seq {scan.first_seq - 1} were dropped "
                "(log.history: drop). Nothing was changed. Restore a checkpoint instead."
            )
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
        if at_end.frontier_step == 0 and scan.base is None
        else "; the run cannot begin again, since the log has forgotten groups of its first steps"
    )
    raise CheckpointError(
        f"no checkpoint in {run.checkpoints} can be used ({reasons}). Nothing was changed. Restore a checkpoint "
        f"directory{beginning}."
    )


def _load(
    found: FoundCheckpoint,
    run: RunDirectory,
    scan: LogScan,
    refuse_unfit: Callable[[str, Manifest], None],
) -> RestorePoint:
    """Read a checkpoint's projection, and fold it to the end of the log. Raises when it cannot be gone back to."""
    manifest = found.manifest
    if manifest is None or found.problem:
        raise CheckpointError(found.problem)
    _refuse_dropped(manifest.position.seq, scan)
    anchor, at_anchor = None, Projection()
    if manifest.anchor is not None:
        anchor = verified_anchor(run.checkpoints / manifest.anchor, manifest, read_archive=False)
        if manifest.rows_from == "journal":
            at_anchor = _checked_projection(anchor.path, anchor.manifest)
    at_checkpoint = _checked_projection(found.path, manifest)
    _refuse_rolled_back(scan, manifest)
    at_end = project(scan, decode_projection(encode_projection(at_checkpoint)))
    _refuse_forgotten(manifest.train_step, at_end)
    refuse_unfit(found.path.name, manifest)
    return RestorePoint(found.path, manifest, at_checkpoint, at_end, (), anchor, at_anchor)


def _checked_projection(checkpoint: Path, manifest: Manifest) -> Projection:
    """Return a checkpoint's projection, from which the very rows follow that its manifest promises."""
    projection = _projection_at(checkpoint, manifest)
    promised = expected_inventory(projection, finalized_through_seq=_finalized_through_seq(manifest))
    for name, rows, digest in (
        ("staging", promised.staging, manifest.staging_digest),
        ("training", promised.training, manifest.training_digest),
    ):
        if inventory_digest(rows).hex() != digest:
            raise CheckpointError(f"its projection and its manifest promise different {name} rows")
    return projection


def _projection_at(checkpoint: Path, manifest: Manifest) -> Projection:
    if manifest.fold_version == FOLD_VERSION:
        return read_snapshot(checkpoint / SNAPSHOT_NAME, manifest.projection_digest)
    # Another kinlog's fold made the snapshot. The log that the checkpoint has as well says what ours makes of it.
    try:
        copy = scan_log(checkpoint / LOG_NAME, marks=[manifest.position])
        return project(copy, through_seq=manifest.position.seq)
    except (LogDamagedError, RunNotFoundError) as error:
        raise CheckpointError(
            f"its snapshot is of another version, and its log cannot be read: {error}"
        ) from error


def _refuse_dropped(seq: int, scan: LogScan) -> None:
    if seq + 1 < scan.first_seq:
        raise CheckpointError(
            f"it lies at seq {seq}, and the events up to seq {scan.first_seq - 1} were dropped (log.history: drop)"
        )


def _refuse_forgotten(train_step: int, at_end: Projection) -> None:
    if train_step < at_end.frontier_step:
        raise CheckpointError(
            f"newer checkpoints cover the steps from {train_step} to {at_end.frontier_step}, and the log has forgotten "
            "their groups"
        )


def _refuse_rolled_back(scan: LogScan, manifest: Manifest) -> None:
    """Raise when a later restart went back to before a checkpoint: what its trainer learned from since is trained on
    again, and what its data plane has lost since is counted on again."""
    for batch in scan.batches(after_seq=manifest.position.seq):
        restores = pc.equal(batch.column("kind").dictionary_decode(), kind_of(RunRestored))
        for record in read_events(batch.filter(restores)):
            event = record.event
            assert isinstance(event, RunRestored)
            if event.train_step < manifest.train_step:
                raise CheckpointError(
                    f"its steps were rolled back to step {event.train_step} by a later restart"
                )
            if (event.position.seq if event.position is not None else 0) < manifest.position.seq:
                raise CheckpointError(
                    f"a later restart went back to before it, to {event.checkpoint or 'the start of the run'}"
                )


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
