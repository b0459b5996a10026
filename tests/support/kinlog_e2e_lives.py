"""The two lives that the end-to-end tests look at: one that is killed in the middle, and the one that goes on from it."""

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
from kinlog_e2e import (
    KinlogProcess,
    events_so_far,
    read_with_pyarrow,
    recorded,
    run_kinlog,
    segments_of,
    write_config,
)

from kinlog.controller.demo import LogFollower, Moment
from kinlog.lineage.names import TEMPORARY_PREFIX
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import GroupPhase, GroupState, Projection, SiblingState
from kinlog.replay.checkpoints import read_manifest
from kinlog.replay.projection import SNAPSHOT_NAME, read_snapshot, replay
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
from kinlog.schemas.events import FinalizeStarted, GroupReserved, RecordedEvent, SiblingSealed, StepApplied
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import Granularity

#: Two checkpoints are there then: one to go back to when the newer one is spoiled.
_MIN_STEP = 4
_STEPS_AFTER_RESTART = 8
_LIVE_READINGS = 50
#: What a worker answered before it was stopped is in the log after this time, but for chance.
_ANSWERED_AND_RECORDED_S = 0.5

Attempt = tuple[int, int, int]
"""Group, generation, attempt."""


@dataclass(frozen=True, kw_only=True)
class KilledRun:
    """A run as SIGKILL left it. ``path`` is resumed later; ``copy`` stays as it was."""

    path: Path
    copy: Path
    moment: Moment
    records: list[RecordedEvent]
    p: Projection
    """At the end of the log."""
    manifest: Manifest
    """Of the newest checkpoint."""
    at_checkpoint: Projection
    live_readings: list[pa.Table]
    """The newest segment, read again and again while it was written."""
    readings_at_the_end: list[pa.Table]
    """Every segment, read in the instant before the kill."""
    output: str
    survivors: list[str]

    @property
    def checkpoint(self) -> Path:
        return RunDirectory(self.copy).checkpoints / self.moment.checkpoint

    def sealed_by_checkpoint(self) -> set[tuple[int, int]]:
        """Group and generation of the siblings that the checkpoint holds finished."""
        return {
            (group.group_id, sibling.generation)
            for group in self.at_checkpoint.groups.values()
            for sibling in group.siblings.values()
            if sibling.sealed is not None
        }

    def running(self) -> list[tuple[GroupState, SiblingState]]:
        """What was under way when it was killed."""
        return [(g, s) for g in self.p.live_groups() for s in g.siblings.values() if s.running]

    def sealed_past_checkpoint(self) -> list[tuple[GroupState, SiblingState]]:
        """What was finished after the checkpoint, in groups that a restart has alive again."""
        position, step = self.manifest.position, self.manifest.train_step
        return [
            (group, sibling)
            for group in self.p.groups.values()
            if group.live or (group.claimed_step or 0) > step
            for sibling in group.siblings.values()
            if sibling.sealed_seq > position.seq
        ]


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """The same run after its second life, in which a generation worker and the finalizer were killed once each."""

    path: Path
    exit_code: int
    max_steps: int
    records: list[RecordedEvent]
    p: Projection
    plan: "tuple[int, str, str]"
    """What ``kinlog plan --json`` said before: exit code, stdout, stderr."""
    running_when_worker_died: set[Attempt]
    finalizing_when_finalizer_died: set[int]
    output: str
    story: str
    survivors: list[str]


def live_until_killed(base: Path) -> KilledRun:
    """Start a run, and kill its whole process tree while groups have both sealed and running siblings."""
    run = RunDirectory(base / "run")
    # It never ends by itself; ``gcd`` is the task that is redone whole.
    config = write_config(base / "first.yaml", max_steps=10_000, whole_task="gcd")
    life = KinlogProcess(base / "first.out", "train", str(config), "--run-dir", str(run.path))
    try:
        moment, readings, last_readings = _kill_in_the_middle(life, run)
        survivors = life.survivors()
        output = life.output()
    finally:
        life.end()
    copy = Path(shutil.copytree(run.path, base / "as_killed"))
    records = recorded(copy)
    manifest = read_manifest(run.checkpoints / moment.checkpoint)
    return KilledRun(
        path=run.path,
        copy=copy,
        moment=moment,
        records=records,
        p=replay(records),
        manifest=manifest,
        at_checkpoint=_at_checkpoint(run, manifest, moment.checkpoint),
        live_readings=readings,
        readings_at_the_end=last_readings,
        output=output,
        survivors=survivors,
    )


def _kill_in_the_middle(
    life: KinlogProcess, run: RunDirectory
) -> tuple[Moment, list[pa.Table], list[pa.Table]]:
    """Return the moment, what stock pyarrow read on the way to it, and what it read just before the kill."""
    follower = LogFollower(run, min_step=_MIN_STEP, min_reusable=2)
    readings: list[pa.Table] = []
    last_readings: list[pa.Table] = []

    def good_moment() -> Moment | None:
        try:
            found = follower.look()
        except (RunNotFoundError, LogDamagedError):
            return None  # not there yet, or read in the middle of a write
        good = found is not None and _tells_everything(follower.projection, run, found.checkpoint)
        return found if good else None

    def read() -> None:
        if follower.projection.last_seq and len(readings) < _LIVE_READINGS:
            with suppress(pa.ArrowInvalid):  # in the middle of a write
                readings.append(read_with_pyarrow(segments_of(run.log)[-1]))

    def kill() -> Moment | None:
        found = good_moment()
        read()
        if found is None:
            return None
        with life.frozen():
            # Life went on since the log was read: what is true now stays true.
            found = good_moment()
            if found is not None and not _at_rest(run, found.checkpoint):
                return None
            if found is not None:
                last_readings.extend(map(read_with_pyarrow, segments_of(run.log)))
                life.kill()
            return found

    return life.until(kill, "there was a moment to kill it"), readings, last_readings


def _at_rest(run: RunDirectory, checkpoint: str) -> bool:
    """Whether no compaction of the log is half-way, and the newest checkpoint is committed and older ones are removed."""
    steps = sorted(path.name for path in run.checkpoints.glob("step_*"))
    building = any(path.name.startswith(TEMPORARY_PREFIX) for path in run.log.iterdir())
    return not building and not scan_log(run.log).replaced and steps[-1] == checkpoint and len(steps) <= 2


def _tells_everything(p: Projection, run: RunDirectory, checkpoint: str) -> bool:
    """Whether a cohort is under way, and a sibling of the other kind was dispatched and sealed past the checkpoint."""
    at_checkpoint = _at_checkpoint(run, read_manifest(run.checkpoints / checkpoint), checkpoint)

    def attempt_then(group: GroupState, sibling: SiblingState) -> int:
        then = at_checkpoint.groups.get(group.group_id)
        return then.siblings[sibling.generation].attempt if then is not None else 0

    siblings = [(group, sibling) for group in p.live_groups() for sibling in group.siblings.values()]
    return any(g.granularity is Granularity.PROMPT_GROUP and s.running for g, s in siblings) and any(
        g.granularity is Granularity.SIBLING and s.sealed is not None and s.attempt > attempt_then(g, s)
        for g, s in siblings
    )


def _at_checkpoint(run: RunDirectory, manifest: Manifest, name: str) -> Projection:
    return read_snapshot(run.checkpoints / name / SNAPSHOT_NAME, manifest.projection_digest)


def live_to_the_end(killed: KilledRun, base: Path) -> ResumedRun:
    """Resume the killed run by another configuration, kill two of its actors, and let it train to the end."""
    planned = run_kinlog("plan", str(killed.path), "--json")
    max_steps = killed.manifest.train_step + _STEPS_AFTER_RESTART
    # The granularities are exchanged: that must change nothing for groups that exist.
    config = write_config(base / "second.yaml", max_steps=max_steps, whole_task="bits")
    life = KinlogProcess(base / "second.out", "train", str(config), "--run-dir", str(killed.path), "--resume")
    try:
        running, finalizing = _kill_actors(life, killed.path)
        exit_code = life.wait()
        survivors = life.survivors()
        story = life.story()
    finally:
        life.end()
    records = recorded(killed.path)
    return ResumedRun(
        path=killed.path,
        exit_code=exit_code,
        max_steps=max_steps,
        records=records,
        p=replay(records),
        plan=(planned.returncode, planned.stdout, planned.stderr),
        running_when_worker_died=running,
        finalizing_when_finalizer_died=finalizing,
        output=life.output(),
        story=story,
        survivors=survivors,
    )


def _kill_actors(life: KinlogProcess, run: Path) -> tuple[set[Attempt], set[int]]:
    """SIGKILL the finalizer and the generation worker while both have work, and return what they had."""
    life.until(lambda: _trained_and_resumed(run), "it had trained a step, and sealed what was cut off")

    def kill() -> tuple[set[Attempt], set[int]] | None:
        finalizer, worker = life.actor("FinalizerWorker"), life.actor("RolloutWorker")
        if finalizer is None or worker is None:
            return None
        try:
            finalizer.suspend()  # what it has, it keeps: groups wait to be finalized
            # What it answered before waits perhaps for a checkpoint to be recorded, and is no group that it has.
            seq = life.until(lambda: _last_seq(run), "there was a log to read")
            life.until(lambda: _finalizing(run, seq), "the stopped finalizer had groups to finalize")
            worker.suspend()
            time.sleep(_ANSWERED_AND_RECORDED_S)
        except psutil.NoSuchProcess:
            return None
        with life.frozen():
            # Where one of them has nothing to do by now, or was given up, all goes on, and it is tried again.
            running, finalizing, there = _running(run), _finalizing(run, seq), life.processes()
            if running is not None and finalizing is not None and worker in there and finalizer in there:
                worker.kill()
                finalizer.kill()
                return running, finalizing
        return None

    return life.until(kill, "generation worker and finalizer both had work")


def _trained_and_resumed(run: Path) -> bool | None:
    """Whether the second life has trained a step, and sealed a sibling that went on from the first life's tokens."""
    second = [record.event for record in events_so_far(run) if record.epoch == 2]
    trained = any(isinstance(event, StepApplied) for event in second)
    return (trained and any(isinstance(e, SiblingSealed) and e.resumed_tokens for e in second)) or None


def _last_seq(run: Path) -> int | None:
    events = events_so_far(run)
    return events[-1].seq if events else None


def _running(run: Path) -> set[Attempt] | None:
    live = replay(events_so_far(run)).live_groups()
    siblings = [(group, sibling) for group in live for sibling in group.siblings.values()]
    return {(g.group_id, s.generation, s.attempt) for g, s in siblings if s.running} or None


def _finalizing(run: Path, after_seq: int) -> set[int] | None:
    """The groups that are being finalized, of those of which that was begun after a place in the log."""
    events = events_so_far(run)
    begun = {r.event.group_id for r in events if r.seq > after_seq and isinstance(r.event, FinalizeStarted)}
    live = replay(events).live_groups()
    return {g.group_id for g in live if g.phase is GroupPhase.FINALIZING and g.group_id in begun} or None


def reserved_granularity(records: list[RecordedEvent]) -> dict[int, Granularity]:
    """Group -> the granularity that was resolved when it was reserved."""
    return {r.event.group_id: r.event.granularity for r in records if isinstance(r.event, GroupReserved)}
