"""A worker that dies in the middle of a rollout leaves its tokens, and another worker goes on from them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from kinlog_lives import run_config
from msgspec.structs import replace

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
from kinlog.workers.model import load_policy
from kinlog.workers.rollout_worker import RolloutWorker
from kinlog.workers.rows import StagedRow, row_digest
from kinlog.workers.staging import StagingQueue
from kinlog.workers.torch_engine import TorchEngine


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


class Life:
    """A worker in this process, with an engine of its own. Its rows go nowhere."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.worker = RolloutWorker(config, RunDirectory(directory))
        self._progress_directory = RunDirectory(directory).progress
        self.engine = TorchEngine(load_policy(config.model), max_batch_size=1)
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

    async def die_after(self, order: RolloutOrder, *, tokens: int) -> None:
        """Be killed once so many tokens of the attempt are on disk."""
        attempt = (order.group_id, order.generation, order.attempt)
        running = asyncio.create_task(self.worker.run(order))
        while written_tokens(LocalStore(), self._progress_directory, {attempt}).get(attempt, 0) < tokens:
            assert not running.done(), running.result()
            await asyncio.sleep(0)
        assert self.worker._progress is not None
        if self.worker._progress._writing is not None:
            self.worker._progress._writing.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self.engine.close()


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
