"""A worker that dies in the middle of a rollout leaves its tokens, and another worker goes on from them."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kinlog_lives import run_config
from kinlog_stateful_environment import judged
from msgspec.structs import replace

from kinlog.lineage.journal import Attempt
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.store import LocalStore
from kinlog.replay.recovery.progress import written_tokens
from kinlog.schemas.config import RunConfig
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import RolloutOrder
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.settings import (
    DatasetSettings,
    ModelSettings,
    RolloutRecoverySettings,
    RowJournalSettings,
    TaskSettings,
)
from kinlog.workers.finalizer import build_canonical_row
from kinlog.workers.grpo import TrainingRow
from kinlog.workers.model import load_policy
from kinlog.workers.rollout_worker import RolloutWorker
from kinlog.workers.rows import CanonicalRow, StagedRow, row_digest
from kinlog.workers.staging import StagingQueue
from kinlog.workers.torch_engine import TorchEngine
from kinlog.workers.trainer import Trainer


def config_with(**recovery: object) -> RunConfig:
    task = TaskSettings(
        name="tally", generator="gcd", agent="kinlog_stateful_environment:Tally", options={"max_value": 6}
    )
    return replace(
        run_config(generation__max_batch_size=1, generation__max_new_tokens=30, rollout__max_turns=3),
        model=ModelSettings(hidden_size=16, num_layers=1, num_heads=2, max_positions=160),
        dataset=DatasetSettings(size=8, tasks=(task,)),
        row_journal=RowJournalSettings(progress_every_s=1e-9),
        rollout_recovery=RolloutRecoverySettings(**recovery),  # type: ignore[arg-type]
    )


class HaltingEngine(TorchEngine):
    """Generates so many tokens, and then none until it is told to."""

    steps_left = 1_000_000

    def _step(self, joining: list[Any]) -> None:
        while not self.steps_left:
            time.sleep(0.001)
        self.steps_left -= 1
        super()._step(joining)


class Life:
    """A worker in this process, with an engine of its own. Its rows go nowhere."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.worker = RolloutWorker(config, RunDirectory(directory))
        self._progress_directory = RunDirectory(directory).progress
        self.engine = HaltingEngine(load_policy(config.model), max_batch_size=1)
        self.staged: list[StagedRow] = []
        self.worker._engine = self.engine
        self.worker._staging = StagingQueue(self._put)

    async def _put(self, rows: Sequence[StagedRow]) -> None:
        self.staged += rows

    def order(self, attempt: int, **facts: object) -> RolloutOrder:
        item = self.worker._tasks[0]
        prompt = PromptRef(
            dataset_fingerprint="",
            sample_id=item.sample_id,
            draw_index=0,
            dataset_epoch=0,
            task_name=item.task_name,
            agent_name=item.agent_name,
            content_digest=item.content_digest,
        )
        return RolloutOrder(group_id=0, generation=0, attempt=attempt, prompt=prompt, seed=3, **facts)  # type: ignore[arg-type]

    async def run(self, order: RolloutOrder) -> SiblingSealed:
        sealed = await self.worker.run(order)
        assert isinstance(sealed, SiblingSealed)
        return sealed

    async def die_after(self, order: RolloutOrder, *, tokens: int, at_hand: int = 0) -> None:
        """Be killed once the engine has generated so many tokens, and those that are ``at_hand`` by then (or all) are on
        disk."""
        attempt = (order.group_id, order.generation, order.attempt)
        progress = self.worker._progress
        assert progress is not None
        progress._writing = asyncio.create_task(asyncio.sleep(0))  # nothing is written but when told
        self.engine.steps_left = tokens
        running = asyncio.create_task(self.worker.run(order))
        while self._written(attempt) < (at_hand or tokens):
            assert not running.done(), running.result()
            await asyncio.sleep(0)
            await progress.write()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self.engine.steps_left = 1
        await self.engine.close()

    def _written(self, attempt: Attempt) -> int:
        return written_tokens(LocalStore(), self._progress_directory, {attempt}).get(attempt, 0)


@pytest.fixture
async def whole(tmp_path: Path):
    """The rollout that nobody cut off, and its rows."""
    life = Life(config_with(), tmp_path / "whole")
    sealed = await life.run(life.order(1))
    await life.engine.close()
    assert sealed.completion_tokens > 12
    return sealed, life.staged


async def test_other_worker_goes_on_from_what_was_written(tmp_path: Path, whole):
    config = config_with()
    first = Life(config, tmp_path / "run")
    await first.die_after(first.order(1), tokens=6)
    second = Life(config, tmp_path / "run")
    sealed = await second.run(second.order(2, resumable_attempts=(1,)))
    await second.engine.close()
    expected, rows = whole
    assert 6 <= sealed.resumed_tokens < sealed.completion_tokens == expected.completion_tokens
    assert sealed.raw_reward == expected.raw_reward
    for row, other in zip(second.staged, rows, strict=True):
        assert row.token_ids.tolist() == other.token_ids.tolist()
    assert sealed.receipt is not None
    assert [call.row_digest for call in sealed.receipt.calls] == [row_digest(row) for row in second.staged]


async def test_third_attempt_has_all_that_the_first_two_generated(tmp_path: Path, whole):
    config = config_with()
    first = Life(config, tmp_path / "run")
    await first.die_after(first.order(1), tokens=4)
    second = Life(config, tmp_path / "run")
    await second.die_after(second.order(2, resumable_attempts=(1,)), tokens=9)
    third = Life(config, tmp_path / "run")
    sealed = await third.run(third.order(3, resumable_attempts=(1, 2)))
    await third.engine.close()
    assert sealed.resumed_tokens >= 9
    assert sealed.completion_tokens == whole[0].completion_tokens


@pytest.mark.parametrize(
    ("recovery", "facts"),
    [
        ({"prefix": "discard", "turn": "discard"}, {"resumable_attempts": (1,)}),
        ({}, {}),
        ({}, {"resumable_attempts": (1,), "newest_weight_version": -1}),
    ],
)
async def test_attempt_begins_anew_where_nothing_may_be_gone_on_from(tmp_path: Path, whole, recovery, facts):
    first = Life(config_with(), tmp_path / "run")
    await first.die_after(first.order(1), tokens=6)
    second = Life(config_with(**recovery), tmp_path / "run")
    sealed = await second.run(second.order(2, **facts))
    await second.engine.close()
    assert sealed.resumed_tokens == 0
    # Content, and not the attempt, is what a row's digest is of: the very same rows are made.
    assert [row_digest(row) for row in second.staged] == [row_digest(row) for row in whole[1]]


async def test_rollout_resumed_after_a_judged_turn_trains_exactly_like_the_uninterrupted_one(
    tmp_path: Path, whole
):
    """From the staged rows and the receipt of each: the same canonical row, and after a step on it the same weights, bit by
    bit."""
    expected, rows = whole
    config = config_with(prefix="discard")
    first = Life(config, tmp_path / "run")
    first_turn = rows[0].completion_tokens
    await first.die_after(first.order(1), tokens=first_turn + 2, at_hand=first_turn)
    second = Life(config, tmp_path / "run")
    judged.clear()
    sealed = await second.run(second.order(2, resumable_attempts=(1,)))
    await second.engine.close()
    assert sealed.resumed_tokens == first_turn
    assert len(judged) == len(rows) - 1  # the environment was put where it was, and not run again
    examples = [canonical_row(expected, rows), canonical_row(sealed, second.staged)]
    assert row_digest(examples[0]) == row_digest(examples[1])
    weights = [weights_after_a_step(config, example) for example in examples]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    untrained = load_policy(config.model).model.state_dict()
    assert any(not torch.equal(weights[0][name], untrained[name]) for name in weights[0])


def canonical_row(sealed: SiblingSealed, rows: Sequence[StagedRow]) -> CanonicalRow:
    return build_canonical_row(
        group_id=sealed.group_id,
        generation=sealed.generation,
        attempt=sealed.attempt,
        draw_index=0,
        receipt=sealed.receipt,
        staged={row.call: row for row in rows},
        prompt_token_ids=(),
        validity=sealed.validity,
        raw_reward=sealed.raw_reward,
        shaped_reward=sealed.shaped_reward,
    )


def weights_after_a_step(config: RunConfig, example: CanonicalRow) -> dict[str, torch.Tensor]:
    """Trained beside a sibling that differs in its reward alone: a group of one has no advantage."""
    of_sibling = TrainingRow(
        group_id=example.group_id,
        generation=example.generation,
        token_ids=example.token_ids,
        loss_mask=example.loss_mask,
        logprobs=example.logprobs,
        weight_versions=example.weight_versions,
        reward=example.shaped_reward,
    )
    worse = dataclasses.replace(of_sibling, generation=1, reward=0.0, loss_mask=example.loss_mask & False)
    trainer = Trainer(load_policy(config.model), config.trainer, temperature=config.generation.temperature)
    trainer.step([of_sibling, worse])
    return trainer.state_dict()
