"""Restarts of whole runs: which checkpoint is gone back to, what is refused, and what a refusal costs."""

import shutil
from pathlib import Path

import msgspec
import pytest
from kinlog_fake_parts import FakeDataPlane, FakeDataset, FakeParts
from kinlog_lives import (
    Life,
    assert_conserved,
    events_of,
    files_of,
    first_life,
    interrupted_life,
    next_life,
    replayed,
    run_config,
)

from kinlog.controller.adopt import adopt_checkpoint
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.checkpoints import MANIFEST_NAME
from kinlog.schemas import events as e
from kinlog.schemas.errors import (
    CheckpointError,
    ConfigError,
    DataPlaneError,
    DataPlaneTimeoutError,
    DatasetError,
    LogDamagedError,
    RowsMissingError,
    RunExistsError,
    RunLockedError,
)
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import RowTag


async def test_promised_rows_that_are_missing_are_named_and_nothing_is_changed(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    await life.kill()
    before = files_of(tmp_path / "run")
    gone = staging_key(group_id, 0, 1, 0)

    parts = FakeParts()
    parts.tamper = lambda data_plane: data_plane.rows[Partition.STAGING].pop(gone) and None
    with pytest.raises(RowsMissingError, match=gone):
        await next_life(tmp_path / "run", life.config, parts)
    assert files_of(tmp_path / "run") == before
    assert parts.data_plane.closed

    # The choice to redo them is explicit.
    config = run_config(trainer__max_steps=6, rollout_recovery__missing_rows="redispatch")
    resumed = await (await next_life(tmp_path / "run", config, parts)).train()
    assert (group_id, 0) in resumed.parts.pool.attempts()
    assert_conserved(replayed(tmp_path / "run"))


async def test_promised_canonical_rows_that_differ_are_refused(tmp_path: Path):
    life = await first_life(tmp_path / "run", run_config(trainer__max_steps=6))
    await life.train_until(
        lambda p: any(
            c.position.seq > g.finalized_seq > 0 for c in p.checkpoints for g in p.live_groups() if g.rows
        )
    )
    position = life.p.checkpoints[-1].position.seq
    group = next(g for g in life.p.live_groups() if g.rows and g.finalized_seq <= position)
    await life.kill()
    key = canonical_key(group.group_id, 0, group.rows[0].attempt)

    def tamper(data_plane: FakeDataPlane) -> None:
        tag = data_plane.rows[Partition.TRAINING][key]
        data_plane.rows[Partition.TRAINING][key] = msgspec.structs.replace(tag, digest=bytes(16))

    parts = FakeParts()
    parts.tamper = tamper
    with pytest.raises(RowsMissingError, match=f"{key} \\(digest_mismatch\\)"):
        await next_life(tmp_path / "run", life.config, parts)


async def test_rows_that_nobody_refers_to_are_cleared_and_counted(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    orphan = RowTag(group_id=900, generation=0, attempt=1, call=0, digest=bytes(16))
    parts = FakeParts()
    parts.tamper = lambda data_plane: data_plane.rows[Partition.STAGING].update({"orphan": orphan})
    resumed = await next_life(tmp_path / "run", life.config, parts)
    assert "orphan" not in parts.data_plane.rows[Partition.STAGING]
    assert resumed.report is not None
    assert resumed.report.rows_cleared["staging"] >= 1
    cleared = [c for c in events_of(tmp_path / "run", e.RowsCleared) if c.reason is Reason.UNREFERENCED]
    assert any(900 in c.group_ids for c in cleared)
    await resumed.kill()


async def test_half_written_newest_checkpoint_is_skipped_with_the_reason(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: len(p.checkpoints) == 2)
    names = [c.name for c in life.p.checkpoints]
    await life.kill()
    (tmp_path / "run" / "checkpoints" / names[1] / MANIFEST_NAME).unlink()
    resumed = await next_life(tmp_path / "run", config)
    assert resumed.report is not None
    assert resumed.report.checkpoint == names[0]
    assert [s.name for s in resumed.report.skipped] == [names[1]]
    assert MANIFEST_NAME in resumed.report.skipped[0].reason
    await resumed.train()
    assert_conserved(replayed(tmp_path / "run"))


async def test_checkpoint_that_cannot_be_loaded_gives_way_to_an_older_one(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: len(p.checkpoints) == 2)
    names = [c.name for c in life.p.checkpoints]
    await life.kill()

    class Stubborn(FakeParts):
        loads = 0

        async def start_data_plane(self) -> FakeDataPlane:
            data_plane = await super().start_data_plane()
            load = data_plane.load

            async def once_broken(directory: Path, *, timeout_s: float) -> None:
                self.loads += 1
                if self.loads == 1:
                    raise DataPlaneError("scripted")
                await load(directory, timeout_s=timeout_s)

            data_plane.load = once_broken  # type: ignore[method-assign]
            return data_plane

    resumed = await next_life(tmp_path / "run", config, Stubborn())
    assert resumed.report is not None
    assert resumed.report.checkpoint == names[0]
    await resumed.kill()


async def test_failed_save_costs_a_checkpoint_and_not_the_run(tmp_path: Path):
    parts = FakeParts()
    life = await first_life(tmp_path / "run", parts=parts)
    parts.data_plane.fail_save = DataPlaneError("scripted")
    await life.train_until(lambda p: p.train_step == 3)
    parts.data_plane.fail_save = None
    await life.finish()
    assert [event.name for event in events_of(tmp_path / "run", e.CheckpointFailed)] == ["step_000002"]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000004"]


async def test_run_whose_last_checkpoint_fails_has_not_succeeded(tmp_path: Path):
    parts = FakeParts()
    life = await first_life(tmp_path / "run", parts=parts)
    parts.data_plane.fail_save = DataPlaneError("scripted")
    with pytest.raises(CheckpointError, match="last checkpoint step_000004 failed"):
        await life.controller.run()
    await life.kill()
    resumed = await (await next_life(tmp_path / "run")).train()
    assert resumed.p.train_step == 4
    assert [c.name for c in resumed.p.checkpoints] == ["step_000002", "step_000004"]


async def test_checkpoint_directory_alone_restarts_the_run(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / life.p.checkpoints[-1].name
    await life.kill()
    alone = tmp_path / "elsewhere" / "backup"
    shutil.copytree(checkpoint, alone)
    shutil.rmtree(tmp_path / "run")
    copied = tmp_path / "copied"
    adopt_checkpoint(alone, RunDirectory(copied))
    with pytest.raises(RunExistsError):
        adopt_checkpoint(alone, RunDirectory(copied))
    resumed = await (await next_life(copied, life.config)).train()
    assert (group_id, 0) not in resumed.parts.pool.attempts()
    assert resumed.p.train_step == 6
    assert_conserved(replayed(copied))
    # The copied log had yet to hear of the checkpoint that it is in: it is one to keep all the same.
    kept = [c.name for c in resumed.p.checkpoints]
    assert len(kept) == 2
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == kept


async def test_second_controller_is_refused_while_the_first_lives(tmp_path: Path):
    life = await first_life(tmp_path / "run")
    await life.train_until(lambda p: p.train_step == 1)
    with pytest.raises(RunLockedError):
        await next_life(tmp_path / "run", life.config)
    with pytest.raises(RunLockedError):
        await first_life(tmp_path / "run", life.config)
    await life.finish()
    with pytest.raises(RunExistsError):
        await first_life(tmp_path / "run", life.config)


async def test_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    segment = next((tmp_path / "run" / "log").glob("segment-*"))
    with open(segment, "r+b") as file:
        file.truncate(6000)
    with pytest.raises(LogDamagedError):
        await next_life(tmp_path / "run", life.config)


async def test_changed_dataset_row_is_refused_by_name(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    with pytest.raises(DatasetError, match="row-"):
        await next_life(tmp_path / "run", life.config, FakeParts(FakeDataset(salt="changed")))


async def test_configuration_that_does_not_fit_is_refused_and_costs_no_training(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    await life.kill()
    before = files_of(tmp_path / "run")
    config = run_config(trainer__max_steps=6, data_plane__num_storage_units=3)
    with pytest.raises(ConfigError, match="num_storage_units is 3.*saved from 2"):
        await next_life(tmp_path / "run", config)
    with pytest.raises(DatasetError, match="fingerprint"):
        await next_life(tmp_path / "run", life.config, FakeParts(FakeDataset(size=99)))
    assert files_of(tmp_path / "run") == before
    resumed = await (await next_life(tmp_path / "run", life.config)).train()
    assert (group_id, 0) not in resumed.parts.pool.attempts()


async def test_data_plane_that_is_too_slow_to_load_is_refused_not_answered_with_an_older_checkpoint(
    tmp_path: Path,
):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    before = files_of(tmp_path / "run")

    def too_slow(data_plane: FakeDataPlane) -> None:
        raise DataPlaneTimeoutError("scripted")

    parts = FakeParts()
    parts.tamper = too_slow
    with pytest.raises(DataPlaneTimeoutError):
        await next_life(tmp_path / "run", life.config, parts)
    assert files_of(tmp_path / "run") == before
    assert parts.data_plane.closed


async def test_start_of_the_run_is_gone_back_to_by_choice_only(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    name = life.p.checkpoints[-1].name
    await life.kill()
    (tmp_path / "run" / "checkpoints" / name / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="--checkpoint start"):
        await next_life(tmp_path / "run", life.config)
    resumed = Life(tmp_path / "run", life.config)
    report = await resumed.controller.resume(checkpoint="start")
    assert report.train_step == 0
    await resumed.train()
    assert_conserved(replayed(tmp_path / "run"))


async def test_what_a_killed_save_left_is_never_used_and_is_cleared_away(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    name = life.p.checkpoints[-1].name
    await life.kill()
    shutil.copytree(checkpoints / name, checkpoints / ".incomplete.step_000009.1")
    (checkpoints / "my_backup").mkdir()
    (tmp_path / "run" / "trash" / "step_000001.5").mkdir(parents=True)
    resumed = await next_life(tmp_path / "run", life.config)
    assert resumed.report is not None
    assert [(s.name, "never committed" in s.reason) for s in resumed.report.skipped] == [
        (".incomplete.step_000009.1", True),
        ("my_backup", False),
    ]
    await resumed.train()
    assert (checkpoints / "my_backup").is_dir()
    assert not (checkpoints / ".incomplete.step_000009.1").exists()
    assert list((tmp_path / "run" / "trash").iterdir()) == []


async def test_run_without_any_usable_checkpoint_and_a_forgotten_past_is_refused(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: len(p.checkpoints) == 2 and p.frontier_step > 0)
    await life.kill()
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        (checkpoint / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError):
        await next_life(tmp_path / "run", config)
