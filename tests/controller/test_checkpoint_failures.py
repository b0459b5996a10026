"""Checkpoints that fail again and again end the run, whichever they are."""

import asyncio
from pathlib import Path

import pytest
from kinlog_journal_parts import JournalledParts
from kinlog_lives import events_of, first_life, run_config

from kinlog.schemas import events as e
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.orders import TrainMetrics, TrainOrder
from kinlog.schemas.reasons import Reason


async def test_run_ends_when_those_of_the_trainer_always_fail_whatever_succeeds_in_between(tmp_path: Path):
    config = run_config(trainer__max_steps=9, checkpointing__max_failures_in_a_row=3)
    parts = JournalledParts(tmp_path)
    life = await first_life(tmp_path, config, parts)
    train = parts.trainer.step

    async def step_after_a_rollout_checkpoint(order: TrainOrder) -> TrainMetrics:
        assert not (await life.controller.checkpoint()).problem
        return await train(order)

    async def save(directory: Path) -> None:
        raise CheckpointError("the trainer's state cannot be written")

    parts.trainer.step = step_after_a_rollout_checkpoint  # type: ignore[method-assign]
    parts.trainer.save = save  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"3 trainer checkpoints in a row have failed, .* step_000006"):
        await life.controller.run()
    await life.controller.close(cleanly=False)
    assert [f.name for f in events_of(tmp_path, e.CheckpointFailed)] == [
        "step_000002",
        "step_000004",
        "step_000006",
    ]


async def test_save_that_hangs_is_given_up_and_never_appears_and_later_ones_are_taken(tmp_path: Path):
    config = run_config(trainer__max_steps=6, checkpointing__timeout_s=2.0)
    life = await first_life(tmp_path, config, JournalledParts(tmp_path))
    trainer = life.parts.trainer
    save, train, ending = trainer.save, trainer.step, asyncio.Event()

    building: asyncio.Task[object] | None = None

    async def hanging_save(directory: Path) -> None:
        nonlocal building
        if not ending.is_set():
            building = asyncio.current_task()
            await ending.wait()
        await save(directory)

    async def step(order: TrainOrder) -> TrainMetrics:
        if order.train_step == 5:
            ending.set()  # only now does what was given up go on, to its end
            assert building is not None
            await asyncio.wait({building})
        return await train(order)

    trainer.save, trainer.step = hanging_save, step  # type: ignore[method-assign]
    await life.train()
    assert life.p.train_step == 6
    failures = events_of(tmp_path, e.CheckpointFailed)
    assert [(f.name, f.reason) for f in failures] == [
        ("step_000002", Reason.TIMEOUT),
        ("step_000004", Reason.TIMEOUT),
    ]
    assert "the save took longer than 4 s" in failures[0].detail
    assert "an earlier save, which was given up, is still running" in failures[1].detail
    assert [p.name for p in life.directory.checkpoints.iterdir()] == ["step_000006"]
