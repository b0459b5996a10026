"""Verification of a whole run: every frame, the chain, the story that the events tell, and the checkpoints against it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kinlog.lineage.fold import FOLD_VERSION, fold
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan, StrayBytes, holds_mark, scan_log
from kinlog.lineage.state import projection_digest
from kinlog.replay.checkpoints import FoundCheckpoint, find_checkpoints
from kinlog.replay.inspection import (
    SegmentSummary,
    list_segments,
    stray_content_bytes,
    survey_segments,
)
from kinlog.replay.integrity.advice import (
    advice_for_checkpoint,
    advice_for_damage,
    advice_for_impossible_story,
)
from kinlog.replay.integrity.left_out import LeftOut
from kinlog.replay.integrity.salvage_plan import SalvagePlan, plan_salvage
from kinlog.replay.lives import Life, LivesTally
from kinlog.replay.recovery.report import brief_problem
from kinlog.schemas.errors import LogDamagedError, TransitionError
from kinlog.schemas.events import Position, TailTruncated
from kinlog.schemas.reasons import CheckpointKind

__all__ = ["CheckpointCheck", "Damage", "Repair", "Stray", "Verification", "verify_everything"]


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
    """Whether the log holds the frame that the manifest names. ``None``: not its log, or not comparable any more."""
    projection_equal: bool | None
    """Whether folding the log up to its position gives the projection that the manifest promises. ``None``: not its log,
    or the history is gone, or another kinlog's fold made it."""
    files: int
    """How many files its manifest lists, each compared by size and digest."""
    problem: str
    """What is wrong with its files; empty when all are as its manifest says."""

    @property
    def intact(self) -> bool:
        return self.kind is not None and not self.problem

    @property
    def broken(self) -> bool:
        """Whether it was committed, and is not what its manifest or the log says."""
        return self.kind is not None and (bool(self.problem) or self.projection_equal is False)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The story of a whole log."""

    log: str
    run_id: str
    log_id: str
    segments: tuple[SegmentSummary, ...]
    events: int
    """All of the run; up to the damage, if there is any."""
    dropped_events: int
    """The first of them, of which only the sum is left."""
    end: Position | None
    """The last event. ``None`` when the log is damaged."""
    lives: tuple[Life, ...]
    repairs: tuple[Repair, ...]
    stray: tuple[Stray, ...]
    checkpoints: tuple[CheckpointCheck, ...]
    damage: Damage | None
    impossible: str
    """The first event that does not fit the state it meets; empty when the whole log can be folded."""
    salvageable_seq: int
    """The last event that can be replayed in spite of what is wrong; the log's last one when nothing is."""
    left_out: tuple[LeftOut, ...]
    """What lies at and behind the place where trust ends. Empty for a sound log."""
    missing: tuple[tuple[int, int], ...]
    """Ranges of seq there of which nothing is left to read."""
    advice: tuple[str, ...]
    """What to do, step by step; empty when there is nothing to do."""

    @property
    def sound(self) -> bool:
        """Whether the log is whole, and tells a possible story."""
        return self.damage is None and not self.impossible

    @property
    def broken_checkpoints(self) -> tuple[CheckpointCheck, ...]:
        """Committed checkpoints that are not what their manifest or the log says."""
        return tuple(check for check in self.checkpoints if check.broken)


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
    if any(holds_mark(scan, mark) is False for mark in marks):
        try:
            # A live log may have grown since it was read. If that is not why, this says what is wrong.
            scan = scan_log(run.log, marks=marks)
        except LogDamagedError as error:
            return _damaged(run, error, scan, found)
    try:
        return _tell(scan, run, found)
    except LogDamagedError as error:
        # In a compacted segment: nobody has read it so far.
        return _damaged(run, error, scan, found)


def _tell(scan: LogScan, run: RunDirectory, found: Sequence[FoundCheckpoint]) -> Verification:
    projection, lives, impossible = scan.beginning(), LivesTally(), ""
    repairs: list[Repair] = []
    wanted = {f.manifest.position.seq for f in found if f.manifest and f.manifest.log_id == scan.log_id}
    digests: dict[int, str] = {}
    if projection.last_seq in wanted:
        digests[projection.last_seq] = projection_digest(projection).hex()
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
    checkpoints = tuple(_check(f, scan, digests) for f in found)
    plan = plan_salvage(run.log) if impossible else None
    return Verification(
        log=str(run.log),
        run_id=scan.run_id,
        log_id=scan.log_id,
        segments=list_segments(scan),
        events=scan.end.seq,
        dropped_events=scan.first_seq - 1,
        end=scan.end,
        lives=lives.lives(),
        repairs=tuple(repairs),
        stray=(*_strays(scan.torn, fenced=False), *_strays(scan.fenced, fenced=True)),
        checkpoints=checkpoints,
        damage=None,
        impossible=impossible,
        salvageable_seq=plan.last_seq if plan is not None else scan.end.seq,
        left_out=plan.left_out if plan is not None else (),
        missing=plan.missing if plan is not None else (),
        advice=tuple(_advice(run, checkpoints, None, plan)),
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
    checkpoints = tuple(_check(f, scan, {}) if scan is not None else _uncompared(f) for f in found)
    plan = plan_salvage(run.log)
    damage = Damage(
        what=error.what,
        segment=error.segment,
        offset_bytes=error.offset_bytes,
        seq=error.seq,
        expected=error.expected,
        found=error.found,
    )
    return Verification(
        log=str(run.log),
        run_id=first.run_id if first is not None else "",
        log_id=first.log_id if first is not None else "",
        segments=segments,
        events=sum(segment.events for segment in segments),
        dropped_events=0,
        end=None,
        lives=(),
        repairs=(),
        stray=(),
        checkpoints=checkpoints,
        damage=damage,
        impossible="",
        salvageable_seq=plan.last_seq,
        left_out=plan.left_out,
        missing=plan.missing,
        advice=tuple(_advice(run, checkpoints, damage, plan)),
    )


def _advice(
    run: RunDirectory,
    checkpoints: Sequence[CheckpointCheck],
    damage: Damage | None,
    plan: SalvagePlan | None,
) -> Iterator[str]:
    if damage is not None and plan is not None:
        # Of a rollout checkpoint alone no run can be made.
        intact = [check for check in checkpoints if check.intact and check.kind is CheckpointKind.TRAINER]
        yield from advice_for_damage(run, intact=intact, salvageable_seq=plan.last_seq)
    elif plan is not None:
        yield from advice_for_impossible_story(run, salvageable_seq=plan.last_seq)
    for check in checkpoints:
        if check.broken:
            yield advice_for_checkpoint(run, check.name)


def _check(found: FoundCheckpoint, scan: LogScan, digests: dict[int, str]) -> CheckpointCheck:
    manifest = found.manifest
    if manifest is None or manifest.log_id != scan.log_id:
        return _uncompared(found)
    digest = digests.get(manifest.position.seq) if manifest.fold_version == FOLD_VERSION else None
    return CheckpointCheck(
        name=found.path.name,
        kind=manifest.kind,
        train_step=manifest.train_step,
        position=manifest.position,
        in_log=holds_mark(scan, manifest.position),
        projection_equal=None if digest is None else digest == manifest.projection_digest,
        files=len(manifest.files) if manifest is not None else 0,
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
        files=len(manifest.files) if manifest is not None else 0,
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
