"""An agent at a real generation worker: from its questions to the row that is trained, and its end when it is given up."""

import asyncio

import pytest
import torch
from kinlog_agents import HeldEngine
from kinlog_attached import AttachedWorker, tiny_config
from kinlog_captured import row_of_receipt

from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import RolloutFailed
from kinlog.schemas.reasons import Reason, Validity
from kinlog.workers.engines import Engine


@pytest.fixture
async def agent_worker():
    made: list[AttachedWorker] = []

    def make(*agents: str, engine: Engine | None = None) -> AttachedWorker:
        made.append(AttachedWorker(tiny_config(*agents, max_new_tokens=6, max_batch_size=2), engine))
        return made[-1]

    yield make
    for worker in made:
        await worker.close()


async def test_calls_of_an_unmodified_agent_become_one_row_without_the_retried_one(agent_worker):
    at = agent_worker("kinlog_agents:Retrying")
    sealed = await at.worker.run(at.order())
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
    sealed = await asyncio.gather(*(at.worker.run(at.order(sample_index=index)) for index in range(4)))
    assert all(isinstance(outcome, SiblingSealed) for outcome in sealed)
    assert all(len(outcome.receipt.calls) == 1 for outcome in sealed)


async def test_agent_whose_attempt_is_aborted_stops_generating(agent_worker):
    engine = HeldEngine()
    at = agent_worker("kinlog_agents:Retrying", engine=engine)
    running = asyncio.create_task(at.worker.run(at.order()))
    await engine.asked.wait()
    await at.worker.abort(0, 0, 1)
    aborted = await running
    assert isinstance(aborted, RolloutFailed)
    assert (aborted.reason, at.staged) == (Reason.SUPERSEDED_ATTEMPT, [])
    assert engine.waiting == 0


async def test_agent_that_gives_up_on_its_own_fails_its_sibling_by_its_data(agent_worker):
    at = agent_worker("kinlog_agents:GivingUp")
    failed = await at.worker.run(at.order())
    assert isinstance(failed, RolloutFailed)
    assert failed.reason is Reason.DATA_FAILURE
    assert failed.detail.startswith("BadRequestError: ")
    assert "tools is not supported" in failed.detail
