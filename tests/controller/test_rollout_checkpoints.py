"""Rollout checkpoints over whole lives: between those of the trainer, while a step is open, and gone back to with their
anchor only."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
from kinlog_fake_parts import FakeParts
from kinlog_journal_parts import JournalledParts
from kinlog_lives import Life, assert_conserved, events_of, first_life, replayed, run_config

from kinlog.controller.adopt import adopt_checkpoint
from kinlog.controller.checkpoint import SavedCheckpoint
from kinlog.lineage.journal import ROWS
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import GroupPhase, Projection
from kinlog.replay.checkpoints import MANIFEST_NAME, read_manifest
from kinlog.replay.integrity.verify import verify_everything
from kinlog.schemas import events as e
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import CheckpointError, DataPlaneError, DataPlaneTimeoutError
from kinlog.schemas.orders import TrainMetrics, TrainOrder
from kinlog.schemas.reasons import CheckpointKind, Reason

WITH_JOURNAL = run_config(trainer__max_steps=6)
WITHOUT = run_config(trainer__max_steps=6, row_journal__enabled=False)
LONGER = run_config(trainer__max_steps=8)
#: Journal on and off.
CONFIGS = pytest.mark.parametrize("config", [WITH_JOURNAL, WITHOUT], ids=["journal", "no journal"])


def parts_of(config: RunConfig, path: Path) -> FakeParts:
    return JournalledParts(path) if config.row_journal.enabled else FakeParts()


class OpenStep:
    """Lets the trainer wait in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.closing = asyncio.Event()

    def __call__(self, parts: FakeParts) -> None:
        train = parts.trainer.step

        async def waiting(order: TrainOrder) -> TrainMetrics:
            if order.train_step == self.step:
                await self.closing.wait()
            return await train(order)

        parts.trainer.step = waiting  # type: ignore[method-assign]

    def is_open(self, p: Projection) -> bool:
        """Whether the step is open, and everything else has come to rest."""
        phases = [group.phase for group in p.live_groups()]
        claimed = [g for g in p.live_groups() if g.claimed_step == self.step]
        return (
            bool(claimed) and set(phases) == {GroupPhase.CLAIMED, GroupPhase.FINALIZED} and len(phases) == 6
        )


async def life_with_open_step(path: Path, config: RunConfig, step: int = 4) -> tuple[Life, OpenStep]:
    """A life in the middle of a step; trainer checkpoints are at every second one."""
    parts, opened = parts_of(config, path), OpenStep(step)
    parts.prepare = opened
    life = await first_life(path, config, parts)
    await life.train_until(opened.is_open)
    return life, opened


async def saved(life: Life) -> SavedCheckpoint:
    checkpoint = await life.controller.checkpoint()
    assert not checkpoint.problem
    return checkpoint


async def resumed(path: Path, config: RunConfig, checkpoint: str | None = None) -> Life:
    life = Life(path, config, parts_of(config, path))
    life.report = await life.controller.resume(checkpoint=checkpoint)
    return life


def sealed_siblings(p: Projection) -> set[tuple[int, int]]:
    """Group and generation of whatever is sealed and may be trained on from here or from the last trainer checkpoint."""
    return {
        (group.group_id, generation)
        for group in p.groups.values()
        for generation, sibling in group.siblings.items()
        if sibling.sealed is not None
    }


def names(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "checkpoints").iterdir())


@CONFIGS
async def test_it_is_taken_while_a_step_is_open_and_names_its_anchor(tmp_path: Path, config: RunConfig):
    life, opened = await life_with_open_step(tmp_path, config)
    saves = life.parts.data_plane.saves
    checkpoint = await saved(life)
    assert checkpoint.name == "rollout_000002_0001"
    path = tmp_path / "checkpoints" / checkpoint.name
    manifest = read_manifest(path)
    anchor = read_manifest(tmp_path / "checkpoints" / "step_000002")
    assert manifest.kind is CheckpointKind.ROLLOUT
    assert (manifest.anchor, manifest.anchor_position) == ("step_000002", anchor.position)
    assert (manifest.train_step, manifest.weight_version) == (2, 2), "the anchor's, not those of the live run"
    common = {"config.yaml", "dataloader.json", "log", MANIFEST_NAME, "projection.zst"}
    if config.row_journal.enabled:
        assert {p.name for p in path.iterdir()} == common | {"journal"}
        assert life.parts.data_plane.saves == saves, "with the journal on, the data plane is left alone"
    else:
        assert {p.name for p in path.iterdir()} == common | {"data_plane"}
    # Claims are as they were in the live run, which goes on.
    assert life.p.train_step == 3
    assert [g.claimed_step for g in life.p.groups.values() if g.phase is GroupPhase.CLAIMED] == [4, 4]
    opened.closing.set()
    await life.finish()
    assert life.parts.trainer.step_number == 6
    assert_conserved(replayed(tmp_path))


@CONFIGS
async def test_steps_since_the_anchor_are_rolled_back_and_nothing_sealed_is_generated_again(
    tmp_path: Path, config: RunConfig
):
    life, _ = await life_with_open_step(tmp_path, config)
    name = (await saved(life)).name
    sealed = sealed_siblings(life.p)
    steps = [order.group_ids for order in life.parts.trainer.steps][2:]
    await life.kill()
    checks = verify_everything(RunDirectory(tmp_path)).checkpoints
    assert [(check.intact, check.in_log, check.projection_equal) for check in checks] == [(True,) * 3] * 2

    again = await resumed(tmp_path, config)
    assert again.report is not None
    assert (again.report.checkpoint, again.report.train_step, again.report.steps_undone) == (name, 2, 1)
    assert again.report.tokens_to_redo == 0
    restored = events_of(tmp_path, e.RunRestored)[-1]
    assert (restored.checkpoint, restored.train_step, restored.weight_version) == (name, 2, 2)
    await again.train()
    assert sealed.isdisjoint(again.parts.pool.attempts())
    assert [order.group_ids for order in again.parts.trainer.steps][:1] == steps, (
        "step 3 again, from the same groups"
    )
    p = replayed(tmp_path)
    assert p.train_step == 6
    assert not p.superseded
    assert_conserved(p)


async def test_rows_sealed_after_a_rollout_checkpoint_come_from_the_journal_as_after_any_other(
    tmp_path: Path,
):
    life, opened = await life_with_open_step(tmp_path, WITH_JOURNAL, step=3)
    await saved(life)
    opened.step = 4
    opened.closing.set()
    opened.closing = asyncio.Event()
    runtime = life.controller._runtime
    assert runtime is not None
    await runtime.changes.wait_for(lambda: True if opened.is_open(life.p) else None)
    sealed = sealed_siblings(life.p)
    # Step 3 was applied after the rollout checkpoint, which is not its business: its anchor is at step 2.
    assert life.p.train_step == 3
    await life.kill()
    again = await (await resumed(tmp_path, WITH_JOURNAL)).train()
    assert again.report is not None
    assert again.report.checkpoint == "rollout_000002_0001"
    assert sealed.isdisjoint(again.parts.pool.attempts())


@CONFIGS
async def test_one_before_the_first_trainer_checkpoint_goes_with_the_start_of_the_run(
    tmp_path: Path, config: RunConfig
):
    life, _ = await life_with_open_step(tmp_path, config, step=2)
    assert (await saved(life)).name == "rollout_000000_0001"
    manifest = read_manifest(tmp_path / "checkpoints" / "rollout_000000_0001")
    assert (manifest.anchor, manifest.train_step) == (None, 0)
    sealed = sealed_siblings(life.p)
    await life.kill()
    again = await (await resumed(tmp_path, config)).train()
    assert again.report is not None
    assert (again.report.checkpoint, again.report.train_step) == ("rollout_000000_0001", 0)
    assert again.parts.trainer.step_number == 6
    assert sealed.isdisjoint(again.parts.pool.attempts())
    assert_conserved(replayed(tmp_path))


async def test_start_of_the_run_takes_over_from_one_that_goes_with_it_and_is_damaged(tmp_path: Path):
    life, _ = await life_with_open_step(tmp_path, WITH_JOURNAL, step=2)
    name = (await saved(life)).name
    await life.kill()
    (tmp_path / "checkpoints" / name / MANIFEST_NAME).unlink()
    again = await resumed(tmp_path, WITH_JOURNAL)
    assert again.report is not None
    assert again.report.checkpoint is None
    assert again.report.tokens_to_redo == 0
    await again.kill()


@CONFIGS
async def test_newest_two_are_kept_until_a_newer_trainer_checkpoint_and_the_frontier_stays(
    tmp_path: Path, config: RunConfig
):
    life, opened = await life_with_open_step(tmp_path, config)
    for _ in range(4):
        await saved(life)
    assert names(tmp_path) == ["rollout_000002_0003", "rollout_000002_0004", "step_000002"]
    assert life.p.frontier_step == 0
    opened.closing.set()
    await life.finish()
    assert names(tmp_path) == ["step_000004", "step_000006"]
    rollouts = [
        c for c in events_of(tmp_path, e.CheckpointCommitted) if c.checkpoint_kind is CheckpointKind.ROLLOUT
    ]
    assert [(c.name, c.train_step, c.frontier_step) for c in rollouts] == [
        (f"rollout_000002_{number:04d}", 2, 0) for number in (1, 2, 3, 4)
    ]


async def test_log_that_is_compacted_and_forgets_keeps_the_places_of_rollout_checkpoints(tmp_path: Path):
    config = run_config(trainer__max_steps=12, log__history="drop")
    life, _ = await life_with_open_step(tmp_path, config, step=3)
    name = (await saved(life)).name
    await life.kill()
    for step in (5, 7, 9):
        again = await resumed(tmp_path, config)
        assert again.report is not None
        assert (again.report.checkpoint, again.report.tokens_to_redo) == (name, 0)
        opened = OpenStep(step)
        opened(again.parts)
        await again.train_until(opened.is_open)
        name = (await saved(again)).name
        await again.kill()
        in_log = {check.name: check.in_log for check in verify_everything(RunDirectory(tmp_path)).checkpoints}
        assert in_log[name]
    assert verify_everything(RunDirectory(tmp_path)).dropped_events
    await (await resumed(tmp_path, config)).train()
    assert_conserved(replayed(tmp_path))


@CONFIGS
async def test_older_ones_can_be_chosen(tmp_path: Path, config: RunConfig):
    life, _ = await life_with_open_step(tmp_path, config)
    older, newer = (await saved(life)).name, (await saved(life)).name
    await life.kill()
    again = await resumed(tmp_path, config, checkpoint=older)
    assert again.report is not None
    assert again.report.checkpoint == older
    await again.kill()
    # What a restart went back to before is not gone on from.
    last = await resumed(tmp_path, config)
    assert last.report is not None
    assert last.report.checkpoint == older
    assert "went back to before it" in next(s.reason for s in last.report.skipped if s.name == newer)
    await last.train()
    assert_conserved(replayed(tmp_path))


def lose(anchor: Path) -> str:
    shutil.rmtree(anchor)
    return "there is no"


def halve(anchor: Path) -> str:
    (anchor / MANIFEST_NAME).unlink()
    return "is incomplete"


def spoil(anchor: Path) -> str:
    (anchor / "trainer" / "trainer.json").write_bytes(b"{}")
    return "its anchor cannot be used: step_000004: trainer/trainer.json"


def exchange(anchor: Path) -> str:
    manifest = msgspec.structs.replace(read_manifest(anchor), run_id="another", weight_version=9)
    (anchor / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    return "run_id: expected .*, found another; weight_version: expected 4, found 9"


@pytest.mark.parametrize("harm", [lose, halve, spoil, exchange])
async def test_one_whose_anchor_cannot_be_used_is_skipped_with_the_reason(tmp_path: Path, harm):
    life, _ = await life_with_open_step(tmp_path, LONGER, step=5)
    name = (await saved(life)).name
    assert name == "rollout_000004_0001"
    await life.kill()
    reason = harm(tmp_path / "checkpoints" / "step_000004")
    with pytest.raises(CheckpointError, match=reason):
        await resumed(tmp_path, WITH_JOURNAL, checkpoint=name)
    if harm is exchange:
        return  # a checkpoint of another step 4 may well be gone on from by itself
    again = await resumed(tmp_path, WITH_JOURNAL)
    assert again.report is not None
    assert again.report.checkpoint == "step_000002"
    assert again.report.tokens_to_redo == 0
    assert name in [s.name for s in again.report.skipped]
    await again.kill()


@CONFIGS
async def test_directory_alone_is_refused_by_the_name_of_its_anchor_and_both_together_make_a_run(
    tmp_path: Path, config: RunConfig
):
    life, _ = await life_with_open_step(tmp_path / "run", config)
    name = (await saved(life)).name
    sealed = sealed_siblings(life.p)
    await life.kill()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "backup")
    shutil.rmtree(tmp_path / "run")
    copied = RunDirectory(tmp_path / "copied")
    with pytest.raises(CheckpointError, match="goes with trainer checkpoint step_000002"):
        adopt_checkpoint(tmp_path / "backup" / name, copied)
    with pytest.raises(CheckpointError, match="kind: expected trainer, found rollout"):
        adopt_checkpoint(tmp_path / "backup" / name, copied, anchor=tmp_path / "backup" / name)
    with pytest.raises(CheckpointError, match="leave --anchor out"):
        adopt_checkpoint(tmp_path / "backup" / "step_000002", copied, anchor=tmp_path / "backup" / name)
    assert not copied.path.exists()
    adopted = adopt_checkpoint(tmp_path / "backup" / name, copied, anchor=tmp_path / "backup" / "step_000002")

    again = await resumed(copied.path, config)
    assert again.report is not None
    assert again.report.checkpoint == adopted
    assert again.report.tokens_to_redo == 0
    await again.train()
    assert sealed.isdisjoint(again.parts.pool.attempts())
    assert_conserved(replayed(copied.path))


async def test_rows_come_from_its_own_journal_when_the_runs_is_gone(tmp_path: Path):
    life, _ = await life_with_open_step(tmp_path, WITH_JOURNAL)
    await saved(life)
    sealed = sealed_siblings(life.p)
    await life.kill()
    shutil.rmtree(tmp_path / "journal")
    again = await (await resumed(tmp_path, WITH_JOURNAL)).train()
    assert again.report is not None
    assert again.report.rows_put_back
    assert sealed.isdisjoint(again.parts.pool.attempts())


async def test_ended_journal_segments_are_shared_and_the_one_being_written_is_copied_up_to_its_last_row(
    tmp_path: Path,
):
    life, _ = await life_with_open_step(tmp_path, WITH_JOURNAL)
    name = (await saved(life)).name
    ours = {p.name: p.stat() for p in (tmp_path / "checkpoints" / name / "journal").iterdir()}
    runs = {p.name: p.stat() for p in (tmp_path / "journal").iterdir()}
    assert ours
    assert all(ROWS.owns(segment) for segment in ours)
    shared = {segment for segment in ours if ours[segment].st_ino == runs[segment].st_ino}
    assert len(shared) == len(ours) - 1
    await life.kill()


async def test_data_plane_is_saved_where_the_journal_lacks_rows_of_an_earlier_life(tmp_path: Path):
    life, _ = await life_with_open_step(tmp_path, WITHOUT)
    first = (await saved(life)).name
    sealed = sealed_siblings(life.p)
    await life.kill()
    again = await resumed(tmp_path, WITH_JOURNAL)
    assert again.report is not None
    assert again.report.checkpoint == first
    opened = OpenStep(4)
    opened(again.parts)
    await again.train_until(opened.is_open)
    second = (await saved(again)).name
    assert read_manifest(tmp_path / "checkpoints" / second).rows_from == "data_plane"
    await again.kill()
    last = await (await resumed(tmp_path, WITH_JOURNAL)).train()
    assert last.report is not None
    assert last.report.checkpoint == second
    assert sealed.isdisjoint(last.parts.pool.attempts())


async def test_data_plane_that_hangs_costs_one_checkpoint(tmp_path: Path):
    life, opened = await life_with_open_step(tmp_path, WITHOUT)
    life.parts.data_plane.fail_save = DataPlaneTimeoutError("the save took too long")
    failed = await life.controller.checkpoint()
    assert "DataPlaneTimeoutError: the save took too long" in failed.problem
    life.parts.data_plane.fail_save = None
    assert (await saved(life)).name == failed.name
    opened.closing.set()
    await life.finish()
    (event,) = events_of(tmp_path, e.CheckpointFailed)
    assert (event.name, event.reason) == (failed.name, Reason.TIMEOUT)


async def test_run_ends_when_too_many_checkpoints_of_either_kind_fail_in_a_row(tmp_path: Path):
    config = run_config(
        trainer__max_steps=6, row_journal__enabled=False, checkpointing__max_failures_in_a_row=3
    )
    life, opened = await life_with_open_step(tmp_path, config)
    data_plane = life.parts.data_plane
    data_plane.fail_save = DataPlaneError("the disk is full")
    for _ in range(2):
        assert (await life.controller.checkpoint()).problem
    data_plane.fail_save = None
    await saved(life)  # the count begins anew
    data_plane.fail_save = DataPlaneError("the disk is full")
    for _ in range(2):
        assert (await life.controller.checkpoint()).problem
    opened.closing.set()
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row .* step_000004: .*the disk is full"):
        await life.finish()
    await life.controller.close(cleanly=False)
    with pytest.raises(CheckpointError, match="the run has ended"):
        await life.controller.checkpoint()
    failures = events_of(tmp_path, e.CheckpointFailed)
    assert [f.name for f in failures] == ["rollout_000002_0001"] * 2 + ["rollout_000002_0002"] * 2 + [
        "step_000004"
    ]
    assert (await (await resumed(tmp_path, config)).train()).p.train_step == 6
