"""Verification of a whole run: every frame, the chain, the story that the events tell, and the checkpoints against it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kinlog.lineage.fold import fold
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan, StrayBytes, scan_log
from kinlog.lineage.state import Projection, projection_digest
from kinlog.replay.checkpoints import FoundCheckpoint, find_checkpoints
from kinlog.replay.inspection import (
    SegmentSummary,
    list_segments,
    stray_content_bytes,
    survey_segments,
)
from kinlog.replay.lives import Life, LivesTally
from kinlog.replay.report import brief_problem
from kinlog.schemas.errors import LogDamagedError, TransitionError
from kinlog.schemas.events import Position, TailTruncated
from kinlog.schemas.reasons import CheckpointKind

__all__ = ["CheckpointCheck", "Damage", "Repair", "Stray", "Verification", "holds_mark", "verify_everything"]


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Where trust in the log ends. The fields are those of ``LogDamagedError``."""

    what: str
    segment: str
    offset_bytes: int
    seq: int
    expected: str
    found: str


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """A torn or fenced tail that an opening for writing cut off."""

    seq: int
    epoch: int
    segment: str
    offset_bytes: int
    quarantined_bytes: int
    quarantined_to: str
    kept: bool
    """Whether the quarantined copy is still there, in its full size."""


class Stray(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are no part of history now: the next opening for writing copies them aside."""

    segment: str
    offset_bytes: int
    content_bytes: int
    fenced: bool
    """Written by an older writer past a take-over; otherwise the tail of a write that a crash cut short."""


class CheckpointCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A directory under ``checkpoints/``, compared with its manifest and with the log."""

    name: str
    kind: CheckpointKind | None
    """``None`` when it has no manifest: a checkpoint that was never committed."""
    train_step: int | None
    position: Position | None
    in_log: bool | None
    """Whether the log holds the frame that the manifest names. ``None``: not its log, or not compared."""
    projection_equal: bool | None
    """Whether folding the log up to its position gives the projection that the manifest promises."""
    problem: str
    """What is wrong with its files; empty when all are as its manifest says."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The story of a whole log."""

    log: str
    run_id: str
    log_id: str
    segments: tuple[SegmentSummary, ...]
    events: int
    end: Position | None
    """The last event. ``None`` when the log is damaged."""
    lives: tuple[Life, ...]
    repairs: tuple[Repair, ...]
    stray: tuple[Stray, ...]
    checkpoints: tuple[CheckpointCheck, ...]
    damage: Damage | None
    impossible: str
    """The first event that does not fit the state it meets; empty when the whole log can be folded."""

    @property
    def sound(self) -> bool:
        """Whether the log is whole, and tells a possible story."""
        return self.damage is None and not self.impossible

    @property
    def broken_checkpoints(self) -> tuple[CheckpointCheck, ...]:
        """Committed checkpoints that are not what their manifest or the log says."""
        return tuple(
            check
            for check in self.checkpoints
            if check.kind is not None and (check.problem or check.projection_equal is False)
        )


def holds_mark(scan: LogScan, mark: Position) -> bool:
    """Whether the log has a frame that ends at the mark, with its checksum."""
    if mark.seq == 0:
        return True
    return any(
        frame.last_seq == mark.seq and frame.checksum == mark.checksum
        for segment in scan.segments
        if mark.seq <= segment.through_seq
        for frame in segment.scan.frames
    )


def verify_everything(run: RunDirectory) -> Verification:
    """Verify a run's log and compare its checkpoints with it. Changes nothing; also for a log that is being written.

    Damage and impossible events are in the result, not raised.

    Raises
    ------
    LogUnsupportedError
        The log was written by a newer kinlog.
    """
    try:
        scan = scan_log(run.log)
    except LogDamagedError as error:
        return _damaged(run, error)
    found = tuple(find_checkpoints(run.checkpoints, log_id=scan.log_id))
    marks = [f.manifest.position for f in found if f.manifest and f.manifest.log_id == scan.log_id]
    if not all(holds_mark(scan, mark) for mark in marks):
        try:
            # A live log may have grown since it was read. If that is not why, this says what is wrong.
            scan = scan_log(run.log, marks=marks)
        except LogDamagedError as error:
            return _damaged(run, error, scan, found)
    return _tell(scan, run, found)


def _tell(scan: LogScan, run: RunDirectory, found: Sequence[FoundCheckpoint]) -> Verification:
    projection, lives, impossible = Projection(), LivesTally(), ""
    repairs: list[Repair] = []
    wanted = {f.manifest.position.seq for f in found if f.manifest and f.manifest.log_id == scan.log_id}
    digests: dict[int, str] = {}
    for record in scan.events():
        lives.add(record)
        if isinstance(record.event, TailTruncated):
            repairs.append(_repair(run.log, record.seq, record.epoch, record.event))
        if not impossible:
            try:
                fold(projection, record)
            except TransitionError as error:
                impossible = str(error)
            else:
                if record.seq in wanted:
                    digests[record.seq] = projection_digest(projection).hex()
    return Verification(
        log=str(run.log),
        run_id=scan.run_id,
        log_id=scan.log_id,
        segments=list_segments(scan),
        events=scan.end.seq,
        end=scan.end,
        lives=lives.lives(),
        repairs=tuple(repairs),
        stray=(*_strays(scan.torn, fenced=False), *_strays(scan.fenced, fenced=True)),
        checkpoints=tuple(_check(f, scan, digests) for f in found),
        damage=None,
        impossible=impossible,
    )


def _damaged(
    run: RunDirectory,
    error: LogDamagedError,
    scan: LogScan | None = None,
    found: Sequence[FoundCheckpoint] = (),
) -> Verification:
    segments = survey_segments(run.log) if scan is None else list_segments(scan)
    first = next((segment for segment in segments if segment.log_id), None)
    if scan is None and first is not None:
        found = tuple(find_checkpoints(run.checkpoints, log_id=first.log_id))
    return Verification(
        log=str(run.log),
        run_id=first.run_id if first is not None else "",
        log_id=first.log_id if first is not None else "",
        segments=segments,
        events=sum(segment.events for segment in segments),
        end=None,
        lives=(),
        repairs=(),
        stray=(),
        checkpoints=tuple(_check(f, scan, {}) if scan is not None else _uncompared(f) for f in found),
        damage=Damage(
            what=error.what,
            segment=error.segment,
            offset_bytes=error.offset_bytes,
            seq=error.seq,
            expected=error.expected,
            found=error.found,
        ),
        impossible="",
    )


def _check(found: FoundCheckpoint, scan: LogScan, digests: dict[int, str]) -> CheckpointCheck:
    manifest = found.manifest
    if manifest is None or manifest.log_id != scan.log_id:
        return _uncompared(found)
    digest = digests.get(manifest.position.seq)
    return CheckpointCheck(
        name=found.path.name,
        kind=manifest.kind,
        train_step=manifest.train_step,
        position=manifest.position,
        in_log=holds_mark(scan, manifest.position),
        projection_equal=None if digest is None else digest == manifest.projection_digest,
        problem=brief_problem(found.path.name, found.problem),
    )


def _uncompared(found: FoundCheckpoint) -> CheckpointCheck:
    manifest = found.manifest
    return CheckpointCheck(
        name=found.path.name,
        kind=manifest.kind if manifest is not None else None,
        train_step=manifest.train_step if manifest is not None else None,
        position=manifest.position if manifest is not None else None,
        in_log=None,
        projection_equal=None,
        problem=brief_problem(found.path.name, found.problem),
    )


def _repair(log: Path, seq: int, epoch: int, event: TailTruncated) -> Repair:
    kept = log / event.quarantined_to
    return Repair(
        seq=seq,
        epoch=epoch,
        segment=event.segment,
        offset_bytes=event.offset_bytes,
        quarantined_bytes=event.quarantined_bytes,
        quarantined_to=event.quarantined_to,
        kept=kept.is_file() and kept.stat().st_size == event.quarantined_bytes,
    )


def _strays(strays: Sequence[StrayBytes], *, fenced: bool) -> list[Stray]:
    measured = [(stray, stray_content_bytes(stray)) for stray in strays]
    return [
        Stray(segment=s.path.name, offset_bytes=s.offset_bytes, content_bytes=size, fenced=fenced)
        for s, size in measured
        if size
    ]
