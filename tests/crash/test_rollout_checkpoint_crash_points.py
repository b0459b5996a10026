"""A power failure at every operation of rollout checkpoints: one is complete or absent, and once it was recorded it is what
a restart goes back to, with its anchor, until a newer checkpoint is there."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kinlog_crash_run import RecordedLife, RecordedRun, RunExplorer
from kinlog_crash_states import CrashStates
from kinlog_journal_parts import journal_in, journal_rows
from kinlog_lives import run_config

from kinlog.lineage.journal import Journal
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.checkpoints import TEMPORARY_PREFIX, find_checkpoints, read_manifest
from kinlog.replay.recovery.restore import restore_points, verify_run
from kinlog.schemas.reasons import CheckpointKind


@pytest.fixture
def run(scratch: Path) -> RecordedRun:
    (scratch / "recorded").mkdir()
    return RecordedRun(scratch / "recorded")


class Rollouts:
    """Takes rollout checkpoints of a recorded life, whose workers keep a journal if there is to be one."""

    def __init__(self, run: RecordedRun, life: RecordedLife) -> None:
        self.run = run
        self.life = life
        self.journal: Journal | None = None
        self.begun = len(run.disk.effects)
        self.taken: list[tuple[int, str]] = []
        """From so many effects on, this one is recorded."""
        if run.config.row_journal.enabled:
            self.journal = journal_in(run.directory, segment_bytes=4_096, store=life.store)

    def seal_some(self) -> None:
        for _ in range(2):
            group = self.life.bench.story.finalized(siblings=2)
            for sibling in self.life.bench.p.groups[group].siblings.values():
                if self.journal is not None and sibling.sealed is not None:
                    self.journal.append(journal_rows(sibling.sealed))

    def save(self) -> None:
        saved = self.life._loop.run(self.life.checkpointer.save_rollout())
        assert not saved.problem, saved.problem
        expected = "data_plane" if self.journal is None else "journal"
        assert read_manifest(self.run.directory.checkpoints / saved.name).rows_from == expected
        self.taken.append((len(self.run.disk.effects), saved.name))

    def newest(self, effects: int) -> str | None:
        return next((name for since, name in reversed(self.taken) if since <= effects), None)


def recorded(run: RecordedRun) -> Rollouts:
    """Three rollout checkpoints after a trainer checkpoint, the first of which gives way to the third."""
    life = run.start()
    life.train()
    life.save()
    rollouts = Rollouts(run, life)
    for _ in range(3):
        rollouts.seal_some()
        rollouts.save()
    names = life.store.names(run.directory.checkpoints)
    assert names == ["rollout_000001_0002", "rollout_000001_0003", "step_000001"], "nothing was pruned"
    return rollouts


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_rollout_checkpoint_that_was_recorded_is_gone_back_to_until_a_newer_one_is(
    run, scratch, tried, crash_states, journal
):
    run.config = run_config(row_journal__enabled=journal)
    rollouts = recorded(run)
    rollouts.life.close()
    crash, chance, judged = CrashStates(run.disk.start), random.Random(0), set()
    states = gone_back_to = 0
    for done, effect in enumerate(run.disk.effects, start=1):
        crash.follow(effect)
        newest = rollouts.newest(done)
        for image in crash.images(max(2, crash_states // 3), chance) if done > rollouts.begun else ():
            states += 1
            known = (image.key(closed=TEMPORARY_PREFIX), newest)
            if known in judged:
                continue
            judged.add(known)
            image.write_to(scratch / "crashed")
            directory = RunDirectory(scratch / "crashed" / "run")
            point = next(restore_points(directory, verify_run(directory)))
            if newest is not None:
                assert point.manifest is not None
                assert point.name is not None
                assert point.name >= newest, f"lost: {newest}; {point.name} is the newest"
                assert point.manifest.kind is CheckpointKind.ROLLOUT
                gone_back_to += 1
            shutil.rmtree(scratch / "crashed")
    assert gone_back_to
    tried(
        f"{states} crash states of {len(run.disk.effects)} operations, {len(judged)} restores; recorded and lost: 0"
    )


def test_trainer_checkpoint_after_rollout_checkpoints(
    run, scratch, tried: Callable[[object], None], crash_states: int
):
    rollouts = recorded(run)
    rollouts.life.train()
    rollouts.life.save()
    rollouts.life.close()
    assert rollouts.life.store.names(run.directory.checkpoints) == ["step_000001", "step_000002"]
    explorer = RunExplorer(scratch, states=max(2, crash_states // 3), go_on_every=20)
    explorer.explore(run)
    tried(explorer)
    found = find_checkpoints(run.directory.checkpoints, log_id=verify_run(run.directory).log_id)
    assert [c.path.name for c in found if c.usable] == ["step_000002", "step_000001"]
