"""Retention: what a checkpoint leaves standing, and a log that is compacted beside the run, kept or dropped."""

import shutil
from pathlib import Path

import pytest
from kinlog_builders import Story
from kinlog_lives import Life, assert_conserved, first_life, history, next_life, replayed, run_config

from kinlog.controller import checkpoint as checkpoint_module
from kinlog.controller import checkpoint_directory as directory_module
from kinlog.controller.adopt import adopt_checkpoint
from kinlog.controller.retention import Retention, retain
from kinlog.lineage.names import log_files
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.replay.audit.audit import audit_log
from kinlog.replay.checkpoints import file_digest
from kinlog.replay.integrity.verify import verify_everything
from kinlog.schemas.errors import CheckpointError

PRESENT = frozenset({"step_000001", "step_000002", "step_000003"})


def told_checkpoints(number: int) -> Story:
    told = Story()
    for _ in range(number):
        told.train(told.finalized())
        told.checkpoint()
    return told


def retained(told: Story, *, keep: int = 2, present: frozenset[str] = PRESENT) -> Retention:
    step = told.p.train_step + 1
    return retain(told.p, name=f"step_{step:06d}", train_step=step, keep=keep, present=present)


def test_nothing_is_behind_the_run_while_its_start_can_be_gone_back_to():
    assert retained(told_checkpoints(0)) == Retention(frozenset({"step_000001"}), 0, 0)
    assert retained(told_checkpoints(1), keep=3).behind_seq == 0


def test_everything_up_to_the_oldest_kept_checkpoint_is_behind_the_run():
    told = told_checkpoints(2)
    kept = retained(told)
    assert kept.names == {"step_000002", "step_000003"}
    assert (kept.frontier_step, kept.behind_seq) == (2, told.p.checkpoints[-1].position.seq)


def test_checkpoint_that_was_removed_by_hand_keeps_nothing_behind():
    assert (
        retained(told_checkpoints(2), present=frozenset({"step_000001"})).behind_seq
        < retained(told_checkpoints(2)).behind_seq
    )
    assert retained(told_checkpoints(2), present=frozenset()).behind_seq == 0


def config(history: str, steps: int):
    return run_config(
        trainer__max_steps=steps,
        checkpointing__every_steps=1,
        log__history=history,
        log__segment_bytes=65_536,
    )


async def three_lives(path: Path, how: str) -> Life:
    """A run of nine steps that was killed twice, with a checkpoint after each step."""
    life = await first_life(path, config(how, 9))
    await life.train_until(lambda p: p.train_step == 3 and len(p.checkpoints) > 1)
    await life.kill()
    life = await next_life(path, config(how, 9))
    await life.train_until(lambda p: p.train_step == 6)
    await life.kill()
    return await (await next_life(path, config(how, 9))).train()


def kinds(path: Path) -> list[str]:
    return [file.kind for file in log_files(p.name for p in (path / "log").iterdir())]


async def test_history_is_kept_whole_in_compacted_segments(tmp_path: Path):
    life = await three_lives(tmp_path / "run", "keep")
    assert "compacted" in kinds(tmp_path / "run")
    assert [record.seq for record in history(tmp_path / "run")] == list(range(1, life.p.last_seq + 1))
    assert replayed(tmp_path / "run") == life.p
    assert_conserved(life.p)
    assert audit_log(scan_log(tmp_path / "run" / "log")).holds
    assert verify_everything(RunDirectory(tmp_path / "run")).sound


async def test_dropped_history_leaves_the_same_projection_and_no_way_to_the_start(tmp_path: Path):
    life = await three_lives(tmp_path / "run", "drop")
    assert kinds(tmp_path / "run")[0] == "base"
    scan = scan_log(tmp_path / "run" / "log")
    assert scan.first_seq > 1
    assert scan.first_seq - 1 <= life.p.checkpoints[0].position.seq
    assert replayed(tmp_path / "run") == life.p
    assert audit_log(scan).holds
    verification = verify_everything(RunDirectory(tmp_path / "run"))
    assert verification.sound
    assert not verification.broken_checkpoints
    again = Life(tmp_path / "run", config("drop", 9))
    with pytest.raises(CheckpointError, match="cannot begin again from its start"):
        await again.controller.resume(checkpoint="start")


@pytest.mark.parametrize("how", ["keep", "drop"])
async def test_checkpoint_of_a_compacted_log_restarts_the_run_alone(tmp_path: Path, how: str):
    life = await three_lives(tmp_path / "run", how)
    name = life.p.checkpoints[-1].name
    alone = tmp_path / "elsewhere" / name
    shutil.copytree(tmp_path / "run" / "checkpoints" / name, alone)
    shutil.rmtree(tmp_path / "run")
    assert {file.kind for file in log_files(p.name for p in (alone / "log").iterdir())} > {"segment"}
    adopt_checkpoint(alone, RunDirectory(tmp_path / "second"))
    resumed = await (await next_life(tmp_path / "second", config(how, 12))).train()
    assert resumed.report.checkpoint == name
    assert resumed.p.train_step == 12
    assert replayed(tmp_path / "second") == resumed.p


async def test_files_that_checkpoints_share_are_read_for_their_digest_once(tmp_path: Path, monkeypatch):
    read: list[tuple[str, int]] = []

    def counted(path: Path) -> str:
        if path.parent.name == "log" and path.stat().st_nlink > 1:
            read.append((path.name, path.stat().st_ino))
        return file_digest(path)

    life = await first_life(tmp_path / "run", config("keep", 8))
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    monkeypatch.setattr(directory_module, "file_digest", counted)
    await (await next_life(tmp_path / "run", config("keep", 8))).train()
    assert read
    assert len(set(read)) == len(read)


async def test_log_that_cannot_be_compacted_costs_space_and_not_the_run(tmp_path: Path, monkeypatch, caplog):
    def failing(*arguments, **options):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(checkpoint_module, "compact_log", failing)
    life = await (await first_life(tmp_path / "run", config("keep", 3))).train()
    assert life.p.train_step == 3
    assert "could not be compacted" in caplog.text
