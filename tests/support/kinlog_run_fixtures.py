"""Whole runs on disk: lived through life by life, with checkpoints, kills and restarts, as a controller would."""

import asyncio
import random
import shutil
from pathlib import Path

import msgspec
from kinlog_builders import DATASET, LOG_ID, RUN_ID, Story, log_settings, new_log, reopened

from kinlog.lineage.decide import retry_budget_spent, seal_sibling
from kinlog.lineage.fold import FOLD_VERSION
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.log import OpenedLog
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import GroupPhase, GroupState, Projection, projection_digest
from kinlog.replay.checkpoints import MANIFEST_NAME, file_digest
from kinlog.replay.projection import SNAPSHOT_NAME, write_snapshot_bytes
from kinlog.replay.recovery.inventory import expected_inventory
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.replay.recovery.restore import restore_points, restored_event, restored_projection, verify_run
from kinlog.schemas import events as e
from kinlog.schemas.manifest import FileEntry, Manifest
from kinlog.schemas.reasons import CheckpointKind, Granularity, Partition, Reason
from kinlog.schemas.rows import inventory_digest

_FAILURES = (Reason.INFRASTRUCTURE_FAILURE, Reason.DATA_FAILURE, Reason.TIMEOUT, Reason.WORKER_LOST)


class TickingClock:
    """A wall clock that moves 7 ms each time somebody looks."""

    def __init__(self, now_us: int = 1_767_225_600_000_000) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        self.now_us += 7_000
        return self.now_us


class DiskRun:
    """A run in a directory. ``story`` tells the life that goes on now."""

    story: Story

    def __init__(self, path: Path, *, segment_bytes: int = 1 << 20) -> None:
        self.directory = RunDirectory(path)
        self._settings = log_settings(segment_bytes=segment_bytes, durability="os")
        self._clock = TickingClock()
        self._epoch = 1
        opened = new_log(self.directory.log, settings=self._settings)
        self._live(opened, Projection())

    def _live(self, opened: OpenedLog, projection: Projection) -> None:
        self._opened = opened
        self._ledger = Ledger(projection, opened.writer, self._clock)
        self.story = Story(self._ledger, epoch=self._epoch)

    @property
    def p(self) -> Projection:
        return self._ledger.projection

    def position(self) -> e.Position:
        """Make everything durable, and return its place."""
        return asyncio.run(self._ledger.position())

    def kill(self) -> None:
        """End the life as SIGKILL would: what was written is there, and the log has no end."""
        self.position()
        as_killed = self.directory.path / "as-killed"
        shutil.copytree(self.directory.log, as_killed)
        self._opened.close()
        shutil.rmtree(self.directory.log)
        as_killed.rename(self.directory.log)

    def close(self) -> None:
        """End the life in order."""
        self.story.commit(e.WriterClosed())
        self._opened.close()

    def checkpoint(self, *, frontier_step: int | None = None) -> Path:
        """Take a trainer checkpoint: what the read side needs of one."""
        position = self.position()
        name = f"step_{self.p.train_step:06d}"
        path = self.directory.checkpoints / name
        write_checkpoint(path, self.p, position, created_us=self._clock())
        self.story.commit(
            e.CheckpointCommitted(
                name=name,
                checkpoint_kind=CheckpointKind.TRAINER,
                train_step=self.p.train_step,
                position=position,
                frontier_step=self.p.frontier_step if frontier_step is None else frontier_step,
            )
        )
        return path

    def restart(self, policy: RecoveryPolicy | None = None) -> RecoveryPlan:
        """Begin the next life: restore, plan, and write the plan."""
        scan = verify_run(self.directory)
        point = next(restore_points(self.directory, scan))
        plan = plan_recovery(
            restored_projection(point),
            expected_inventory(point.at_checkpoint),
            checkpoint=point.name,
            promised=point.manifest.position if point.manifest is not None else None,
            policy=policy or RecoveryPolicy(),
        )
        opened = reopened(self.directory.log, settings=self._settings)
        self._epoch = opened.writer.epoch
        self._live(opened, point.at_end)
        self.story.commit(*opened.repaired, restored_event(point))
        self.story.commit(*plan.events())
        for reason, by_partition in (
            (Reason.STEP_DURABLE, plan.retired),
            (Reason.UNREFERENCED, plan.unreferenced),
        ):
            for partition, rows in by_partition.items():
                if rows:
                    groups = tuple(sorted(set(rows.values())))
                    self.story.commit(_cleared(partition, reason, len(rows), groups))
        return plan


def write_checkpoint(path: Path, p: Projection, position: e.Position, *, created_us: int = 1) -> None:
    """Write what the read side needs of a trainer checkpoint; one of that name is replaced."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    snapshot = path / SNAPSHOT_NAME
    snapshot.write_bytes(write_snapshot_bytes(p))
    rows = expected_inventory(p)
    manifest = Manifest(
        kind=CheckpointKind.TRAINER,
        run_id=RUN_ID,
        log_id=LOG_ID,
        kinlog_version="test",
        created_us=created_us,
        position=position,
        fold_version=FOLD_VERSION,
        projection_digest=projection_digest(p).hex(),
        train_step=p.train_step,
        weight_version=p.weight_version,
        dataset_fingerprint=DATASET,
        draw_cursor=p.draw_cursor,
        num_storage_units=1,
        staging_rows=len(rows.staging),
        staging_digest=inventory_digest(rows.staging).hex(),
        training_rows=len(rows.training),
        training_digest=inventory_digest(rows.training).hex(),
        files=(
            FileEntry(path=SNAPSHOT_NAME, size_bytes=snapshot.stat().st_size, blake2b=file_digest(snapshot)),
        ),
    )
    (path / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))


def _cleared(partition: Partition, reason: Reason, num_rows: int, groups: tuple[int, ...]) -> e.RowsCleared:
    return e.RowsCleared(partition=partition, reason=reason, num_rows=num_rows, group_ids=groups)


def small_run(path: Path) -> DiskRun:
    """Two lives, told by hand; the second goes on. What tests count on:

    Life 1: groups 0 and 1 applied in step 1, checkpoint step_000001; at it, group 2 has one sealed and one running
    sibling, and group 3 (a cohort of two) is finalized. Past it, group 4 seals one sibling and group 5 is dropped.
    Killed. Life 2: group 4's sealed sibling is redone (its rows are missing), 2/1 and 4/1 are redone (they were
    running); nothing after that.
    """
    run = DiskRun(path)
    told = run.story
    first, second = told.finalized(raw_reward=0.25), told.finalized(raw_reward=0.5)
    third = told.generating()
    told.seal(third, 0, raw_reward=0.75)
    told.finalized(granularity=Granularity.PROMPT_GROUP)
    told.train(first, second)
    run.checkpoint()
    fifth = told.generating()
    told.seal(fifth, 0)
    sixth = told.generating()
    told.commit(e.GroupDropped(group_id=sixth, reason=Reason.EVICTED))
    run.kill()
    run.restart()
    return run


class Chance:
    """Lives a run by chance, as a controller with a bounded buffer would."""

    def __init__(self, run: DiskRun, seed: int, *, siblings: int = 4, permits: int = 12) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.siblings = siblings
        self.permits = permits

    def live(self, *, through_step: int, groups_per_step: int = 4, checkpoint_every: int = 5) -> None:
        """Go on until a step is applied."""
        while self.run.p.train_step < through_step:
            step = self.run.p.train_step
            self.turn(groups_per_step)
            if self.run.p.train_step > step and self.run.p.train_step % checkpoint_every == 0:
                self.run.checkpoint(frontier_step=max(0, self.run.p.train_step - checkpoint_every))

    def turn(self, groups_per_step: int) -> None:
        """One look at everything that is alive, and perhaps a step."""
        story, chance = self.run.story, self.random
        if self.run.p.alive_total < self.permits:
            whole = chance.random() < 0.3
            budget = e.RetryBudget(2, 1)
            granularity = Granularity.PROMPT_GROUP if whole else Granularity.SIBLING
            story.admit(story.reserve(siblings=self.siblings, granularity=granularity, budget=budget))
        for group in list(self.run.p.live_groups()):
            self._drive(group)
        ready = [g.group_id for g in self.run.p.live_groups() if g.phase is GroupPhase.FINALIZED]
        if len(ready) >= groups_per_step:
            story.train(*ready[:groups_per_step])

    def _drive(self, group: GroupState) -> None:
        story, chance = self.run.story, self.random
        waiting = any(sibling.waiting for sibling in group.siblings.values())
        if group.phase in (GroupPhase.ADMITTED, GroupPhase.GENERATING) and waiting:
            story.dispatch(group.group_id)
        elif group.phase is GroupPhase.GENERATING and chance.random() < 0.5:
            self._end_attempt(group)
        elif group.phase is GroupPhase.READY:
            story.start_finalize(group.group_id)
        elif group.phase is GroupPhase.FINALIZING and chance.random() < 0.7:
            story.finish_finalize(group.group_id)
        elif group.phase is GroupPhase.FINALIZED and chance.random() < 0.01:
            story.commit(e.GroupDropped(group_id=group.group_id, reason=Reason.LOW_VALID_FRACTION))

    def _end_attempt(self, group: GroupState) -> None:
        story, chance = self.run.story, self.random
        sibling = chance.choice([s for s in group.siblings.values() if s.running])
        if chance.random() < 0.12:
            reason = chance.choice(_FAILURES)
            late = story.result(group.group_id, sibling.generation)
            spent = retry_budget_spent(group, sibling, reason)
            story.supersede(group.group_id, sibling.generation, reason)
            if spent:
                story.commit(e.GroupParked(group_id=group.group_id, reason=Reason.RETRY_BUDGET))
            if chance.random() < 0.5:
                story.commit(*seal_sibling(self.run.p, late)[1])
            return
        learned = min(0.9, 0.1 + 0.02 * self.run.p.train_step)
        reward = float(chance.random() < learned)
        calls = 1 + (chance.random() < 0.3)
        if group.granularity is Granularity.PROMPT_GROUP:
            story.seal(group.group_id, raw_reward=reward, calls=calls)
        else:
            story.seal(group.group_id, sibling.generation, raw_reward=reward, calls=calls)
