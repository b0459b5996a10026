"""Aborting an attempt on its worker: generation stops between two tokens, what is being staged is reported all the same."""

import asyncio

import pytest
from kinlog_attached import AttachedWorker, tiny_config
from kinlog_interleavings import ticks

from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import RolloutFailed
from kinlog.schemas.reasons import Reason


@pytest.fixture
async def attached():
    attached = AttachedWorker(tiny_config("single_turn", max_new_tokens=60))
    yield attached
    await attached.close()


async def test_attempt_that_is_aborted_stops_generating_and_says_so(attached: AttachedWorker):
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


async def test_attempt_whose_rows_are_being_put_is_reported_all_the_same(attached: AttachedWorker):
    attached.may_put.clear()
    running = asyncio.create_task(attached.worker.run(attached.order(0)))
    await attached.putting.wait()
    await attached.worker.abort(0, 0, 1)
    await ticks()
    assert not running.done(), "nothing is reported before its rows are there"
    attached.may_put.set()
    assert isinstance(await running, SiblingSealed)


async def test_aborting_what_has_ended_or_was_never_begun_is_harmless(attached: AttachedWorker):
    await attached.worker.abort(0, 0, 1)
    sealed = await attached.worker.run(attached.order(0))
    assert isinstance(sealed, SiblingSealed)
    await attached.worker.abort(0, 0, 1)
    assert attached.worker._generating == {}
