"""A power failure at every operation of a checkpoint, of pruning, and of a restart: a checkpoint is complete or absent,
and one that was recorded as committed is there until a newer one is."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kinlog_crash_run import MirroredStore, RecordedRun, RunExplorer
from kinlog_crash_states import CrashStates
from kinlog_lives import run_config

from kinlog.controller.adopt import adopt_checkpoint
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.checkpoints import TEMPORARY_PREFIX
from kinlog.replay.recovery.restore import restore_points, verify_run


@pytest.fixture
def explore(
    scratch: Path, crash_states: int, tried: Callable[[object], None]
) -> Callable[[RecordedRun], None]:
    def explore_all(run: RecordedRun) -> None:
        explorer = RunExplorer(scratch, states=max(2, crash_states // 3), go_on_every=20)
        explorer.explore(run)
        tried(explorer)

    return explore_all


@pytest.fixture
def run(scratch: Path) -> RecordedRun:
    (scratch / "recorded").mkdir()
    return RecordedRun(scratch / "recorded")


def test_checkpoints_one_after_the_other_and_pruning(explore, run):
    life = run.start()
    for _ in range(3):
        life.train()
        life.save()
    assert life.store.names(run.directory.checkpoints) == ["step_000002", "step_000003"], "nothing was pruned"
    life.close()
    explore(run)


def test_checkpoints_of_several_lives_whose_log_is_compacted_and_forgets(explore, run):
    run.config = run_config(checkpointing__keep=2, log__history="drop")
    life = run.start()
    for _ in range(3):
        life.train()
        life.save()
        life.close()
        life = run.resume()
    life.close()
    assert any(name.startswith("base-") for name in life.store.names(run.directory.log)), (
        "nothing was dropped"
    )
    explore(run)


def test_restart_that_goes_back_and_takes_a_checkpoint_of_the_same_name_again(explore, run):
    life = run.start()
    for _ in range(2):
        life.train()
        life.save()
    life.kill()
    # What a killed save leaves, and what is cleared away before the next one.
    half = run.directory.checkpoints / f"{TEMPORARY_PREFIX}step_000003.1"
    half.mkdir()
    (half / "projection.zst").write_bytes(b"half")
    life = run.resume(wanted="step_000001")
    life.train()
    life.save()
    life.close()
    assert life.store.names(run.directory.checkpoints) == ["step_000001", "step_000002"]
    explore(run)


def test_run_made_from_a_checkpoint_alone_is_whole_or_absent(run, scratch, tried):
    life = run.start()
    life.train()
    life.save()
    life.close()
    before = len(run.disk.effects)
    checkpoint, second = run.directory.checkpoints / "step_000001", RunDirectory(run.root / "second")
    adopt_checkpoint(checkpoint, second, store=MirroredStore(run.root, run.disk))
    crash, chance, states, found = CrashStates(run.disk.start), random.Random(0), 0, 0
    for done, effect in enumerate(run.disk.effects, start=1):
        crash.follow(effect)
        for image in crash.images(2, chance) if done > before else ():
            states += 1
            image.write_to(scratch / "crashed")
            for name in ("run", "second"):
                crashed = RunDirectory(scratch / "crashed" / name)
                if crashed.path.exists():
                    point = next(restore_points(crashed, verify_run(crashed)))
                    assert point.name == "step_000001"
                    found += name == "second"
            shutil.rmtree(scratch / "crashed")
    assert found
    tried(f"{states} crash states of {len(run.disk.effects) - before} operations; half-made: 0")
