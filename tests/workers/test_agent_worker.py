"""An agent at a real generation worker: from its questions to the row that is trained, and its end when it is given up."""

import asyncio
from collections.abc import Sequence

import pytest
import torch
from kinlog_captured import row_of_receipt
from kinlog_lives import run_config
from msgspec.structs import replace

from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import RolloutFailed, RolloutOrder
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import Reason, Validity
from kinlog.schemas.settings import DatasetSettings, ModelSettings, TaskSettings
from kinlog.workers.model import load_policy
from kinlog.workers.rollout_worker import RolloutWorker
from kinlog.workers.rows import StagedRow
from kinlog.workers.staging import StagingQueue
from kinlog.workers.torch_engine import TorchEngine


class AgentWorker:
    """A worker in this process whose tasks have an agent each; its rows are kept here."""

    def __init__(self, *agents: str, max_new_tokens: int) -> None:
        tasks = tuple(
            TaskSettings(name=agent, generator="gcd", agent=agent, options={"min_value": 1, "max_value": 6})
            for agent in agents
        )
        config = replace(
            run_config(generation__max_batch_size=2, generation__max_new_tokens=max_new_tokens),
            model=ModelSettings(hidden_size=16, num_layers=1, num_heads=2, max_positions=96),
            dataset=DatasetSettings(size=8, tasks=tasks),
        )
        self.worker = RolloutWorker(config)
        self.engine = TorchEngine(load_policy(config.model), max_batch_size=2)
        self.staged: list[StagedRow] = []
        self.worker._engine = self.engine
        self.worker._staging = StagingQueue(self._put)

    async def _put(self, rows: Sequence[StagedRow]) -> None:
        self.staged += rows

    async def run(self, sample_index: int, *, seed: int = 1) -> SiblingSealed | RolloutFailed:
        item = self.worker._tasks[sample_index]
        prompt = PromptRef(
            dataset_fingerprint="",
            sample_id=item.sample_id,
            draw_index=sample_index,
            dataset_epoch=0,
            task_name=item.task_name,
            agent_name=item.agent_name,
            content_digest=item.content_digest,
        )
        order = RolloutOrder(group_id=sample_index, generation=0, attempt=1, prompt=prompt, seed=seed)
        return await self.worker.run(order)

    async def close(self) -> None:
        await self.worker._endpoint.close()
        await self.engine.close()


@pytest.fixture
async def agent_worker():
    made: list[AgentWorker] = []

    def make(*agents: str, max_new_tokens: int = 6) -> AgentWorker:
        made.append(AgentWorker(*agents, max_new_tokens=max_new_tokens))
        return made[-1]

    yield make
    for worker in made:
        await worker.close()


async def test_calls_of_an_unmodified_agent_become_one_row_without_the_retried_one(agent_worker):
    at = agent_worker("kinlog_agents:Retrying")
    sealed = await at.run(0)
    assert isinstance(sealed, SiblingSealed)
    assert sealed.validity is Validity.VALID
    assert [call.parent for call in sealed.receipt.calls] == [-1, -1, 1]
    dead, first, last = at.staged
    row = row_of_receipt(sealed.receipt, at.staged)  # verifies lengths and digests
    assert torch.equal(row.token_ids, last.token_ids), "the dead branch is no part of it"
    asked = first.prompt_tokens
    tool = slice(len(first.token_ids), last.prompt_tokens)
    assert last.prompt_tokens - len(first.token_ids) == 1
    assert not row.loss_mask[:asked].any()
    assert row.loss_mask[asked : len(first.token_ids)].all()
    assert not row.loss_mask[tool].any()
    assert row.loss_mask[last.prompt_tokens :].all()
    assert int(row.loss_mask.sum()) == first.completion_tokens + last.completion_tokens
    assert sealed.completion_tokens == sum(row.completion_tokens for row in (dead, first, last))


async def test_agent_that_blocks_runs_beside_environments(agent_worker):
    at = agent_worker("kinlog_agents:Blocking", "single_turn")
    sealed = await asyncio.gather(*(at.run(index) for index in range(4)))
    assert all(isinstance(outcome, SiblingSealed) for outcome in sealed)
    assert all(len(outcome.receipt.calls) == 1 for outcome in sealed)


async def test_agent_whose_attempt_is_aborted_stops_generating(agent_worker):
    at = agent_worker("kinlog_agents:Retrying", max_new_tokens=80)
    running = asyncio.create_task(at.run(0))
    while not at.engine._running:
        await asyncio.sleep(0)
    await at.worker.abort(0, 0, 1)
    aborted = await running
    assert isinstance(aborted, RolloutFailed)
    assert (aborted.reason, at.staged) == (Reason.SUPERSEDED_ATTEMPT, [])
    assert at.worker._endpoint._sessions == {}
