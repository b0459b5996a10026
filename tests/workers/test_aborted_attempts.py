"""Aborting an attempt on its worker: generation stops between two tokens, what is being staged is reported all the same."""

import asyncio
from collections.abc import Sequence

import pytest
from kinlog_interleavings import ticks
from kinlog_lives import run_config
from msgspec.structs import replace

from kinlog.schemas.config import RunConfig
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import RolloutFailed, RolloutOrder
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import Reason
from kinlog.schemas.settings import DatasetSettings, ModelSettings, TaskSettings
from kinlog.workers.model import load_policy
from kinlog.workers.rollout_worker import RolloutWorker
from kinlog.workers.rows import StagedRow
from kinlog.workers.staging import StagingQueue
from kinlog.workers.torch_engine import TorchEngine


def tiny(**changes: object) -> RunConfig:
    task = TaskSettings(
        name="gcd", generator="gcd", agent="single_turn", options={"min_value": 1, "max_value": 6}
    )
    return replace(
        run_config(generation__max_batch_size=1, generation__max_new_tokens=60, **changes),
        model=ModelSettings(hidden_size=16, num_layers=1, num_heads=2, max_positions=96),
        dataset=DatasetSettings(size=8, tasks=(task,)),
    )


class Attached:
    """A worker in this process, with an engine of its own; its rows go nowhere."""

    def __init__(self) -> None:
        config = tiny()
        self.worker = RolloutWorker(config)
        self.engine = TorchEngine(load_policy(config.model), max_batch_size=1)
        self.staged: list[StagedRow] = []
        self.may_put = asyncio.Event()
        self.may_put.set()
        self.putting = asyncio.Event()
        self.worker._engine = self.engine
        self.worker._staging = StagingQueue(self._put)

    async def _put(self, rows: Sequence[StagedRow]) -> None:
        self.putting.set()
        await self.may_put.wait()
        self.staged += rows

    def order(self, generation: int) -> RolloutOrder:
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
        return RolloutOrder(group_id=0, generation=generation, attempt=1, prompt=prompt, seed=generation)


@pytest.fixture
async def attached():
    attached = Attached()
    yield attached
    await attached.engine.close()


async def test_attempt_that_is_aborted_stops_generating_and_says_so(attached: Attached):
    first = asyncio.create_task(attached.worker.run(attached.order(0)))
    second = asyncio.create_task(attached.worker.run(attached.order(1)))  # waits for the only slot
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await attached.worker.abort(0, 0, 1)
    aborted = await first
    assert isinstance(aborted, RolloutFailed)
    assert aborted.reason is Reason.SUPERSEDED_ATTEMPT
    assert isinstance(await second, SiblingSealed)
    assert {row.generation for row in attached.staged} == {1}


async def test_attempt_whose_rows_are_being_put_is_reported_all_the_same(attached: Attached):
    attached.may_put.clear()
    running = asyncio.create_task(attached.worker.run(attached.order(0)))
    await attached.putting.wait()
    await attached.worker.abort(0, 0, 1)
    await ticks()
    assert not running.done(), "nothing is reported before its rows are there"
    attached.may_put.set()
    assert isinstance(await running, SiblingSealed)


async def test_aborting_what_has_ended_or_was_never_begun_is_harmless(attached: Attached):
    await attached.worker.abort(0, 0, 1)
    sealed = await attached.worker.run(attached.order(0))
    assert isinstance(sealed, SiblingSealed)
    await attached.worker.abort(0, 0, 1)
    assert attached.worker._generating == {}
