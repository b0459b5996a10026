"""Where a restart begins: only a place on the surviving history, and never past what the log holds."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from kinlog_builders import Story, open_ledger
from kinlog_run_fixtures import small_run, write_checkpoint

from kinlog.lineage.ledger import Ledger
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import GroupPhase
from kinlog.replay.recovery.restore import START, restore_points, restored_projection, verify_run
from kinlog.schemas import events as e
from kinlog.schemas.errors import CheckpointError, LogDamagedError


class Life:
    """One life of a run on disk, which takes real checkpoints of its projection."""

    def __init__(self, run: RunDirectory, ledger: Ledger) -> None:
        self.run = run
        self.ledger = ledger
        self.told = Story(ledger)

    def checkpoint(self) -> e.CheckpointCommitted:
        p = self.told.p
        position = asyncio.run(self.ledger.position())
        name = f"step_{p.train_step:06d}"
        write_checkpoint(self.run.checkpoints / name, p, position)
        return self.told.checkpoint(name=name)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def points(run: RunDirectory, wanted: str | None = None) -> dict[str | None, dict[str, str]]:
    """Place -> why newer ones are skipped, best first."""
    found = {}
    with suppress(CheckpointError):
        for point in restore_points(run, verify_run(run), wanted=wanted):
            found[point.name] = {s.name: s.reason for s in point.skipped}
    return found


def test_run_without_checkpoints_restarts_at_its_beginning(run):
    with open_ledger(run.log) as ledger:
        Story(ledger).finalized()
    assert points(run) == {None: {}}


def test_newest_checkpoint_comes_first_then_older_ones_and_the_start_by_choice_only(run):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        for _ in range(2):
            life.told.train(life.told.finalized())
            life.checkpoint()
    assert list(points(run)) == ["step_000002", "step_000001"]
    assert list(points(run, START)) == [None]
    assert list(points(run, "step_000001")) == ["step_000001"]
    with pytest.raises(CheckpointError, match="no checkpoint of that name"):
        next(restore_points(run, verify_run(run), wanted="step_000009"))


def test_start_of_the_run_is_out_of_reach_once_groups_of_it_are_forgotten(run):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        life.checkpoint()
        life.told.checkpoint(frontier_step=1)
    assert list(points(run)) == ["step_000001"]


def test_log_that_is_shorter_than_a_checkpoint_promises_is_refused(run):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        group = life.told.finalized()
        early = run.log.parent / "early"
        early.mkdir()
        for path in run.log.glob("*.arrows"):
            (early / path.name).write_bytes(path.read_bytes())
        life.told.train(group)
        life.checkpoint()
    for path in early.iterdir():
        (run.log / path.name).write_bytes(path.read_bytes())
    with pytest.raises(LogDamagedError, match="does not hold what a checkpoint"):
        verify_run(run)


def test_restoring_rolls_a_copy_back_and_leaves_the_original(run):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        first, second = life.told.finalized(), life.told.finalized()
        life.told.train(first)
        life.checkpoint()
        life.told.train(second)
    scan = scan_log(run.log)
    point = next(restore_points(run, scan))
    rolled_back = restored_projection(point)
    assert rolled_back.groups[second].phase is GroupPhase.FINALIZED
    assert point.at_end.groups[second].phase is GroupPhase.APPLIED


def test_checkpoint_whose_steps_were_rolled_back_since_is_skipped_with_the_reason(run):
    # Its trainer has learned from groups that will be trained on again: using it would train on them twice.
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        kept = life.checkpoint()
        for _ in range(2):
            life.told.train(life.told.finalized())
        life.checkpoint()
        life.told.restore(kept)
        assert life.told.p.train_step == 1
    found = points(run)
    assert list(found) == ["step_000001"]
    assert "rolled back to step 1" in found["step_000001"]["step_000003"]


@pytest.mark.parametrize("left", ["nothing", "zeros"])
def test_run_whose_log_is_lost_but_has_checkpoints_is_refused_and_not_begun_anew(tmp_path: Path, left: str):
    run = small_run(tmp_path / "run")
    run.kill()
    for path in run.directory.log.iterdir():
        path.unlink() if left == "nothing" else path.write_bytes(bytes(4096))
    with pytest.raises(LogDamagedError, match="the log is lost, and checkpoint step_000001 of it is there"):
        verify_run(run.directory)
