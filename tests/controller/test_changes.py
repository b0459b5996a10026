"""Waiting for a condition over the projection."""

import asyncio

import pytest
from kinlog_interleavings import ticks

from kinlog.controller.changes import Changes


async def test_condition_that_holds_is_returned_without_a_wait():
    assert await Changes().wait_for(lambda: 7) == 7


async def test_waiters_look_again_at_each_notice_and_each_gets_its_own_value():
    changes, now = Changes(), [0]
    low = asyncio.create_task(changes.wait_for(lambda: "low" if now[0] >= 1 else None))
    high = asyncio.create_task(changes.wait_for(lambda: "high" if now[0] >= 2 else None))
    await ticks()
    now[0] = 1
    changes.notify()
    assert await low == "low"
    assert not high.done()
    now[0] = 2
    changes.notify()
    assert await high == "high"


async def test_condition_that_holds_without_a_notice_is_not_seen():
    changes, now = Changes(), [False]
    waiting = asyncio.create_task(changes.wait_for(lambda: True if now[0] else None))
    await ticks()
    now[0] = True
    await ticks()
    assert not waiting.done()
    changes.notify()
    assert await waiting


async def test_falsy_values_that_are_not_none_end_the_wait():
    changes = Changes()
    assert await changes.wait_for(lambda: ()) == ()
    assert await changes.wait_for(lambda: 0) == 0


async def test_cancelled_waiter_is_forgotten_and_others_are_woken():
    changes, now = Changes(), [False]
    waiting = [asyncio.create_task(changes.wait_for(lambda: True if now[0] else None)) for _ in range(3)]
    await ticks()
    waiting[1].cancel()
    now[0] = True
    changes.notify()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results[0] is results[2] is True
    assert isinstance(results[1], asyncio.CancelledError)
    assert not changes._waiting


async def test_error_in_a_condition_reaches_the_one_who_waits():
    changes, broken = Changes(), [False]

    def condition() -> None:
        if broken[0]:
            raise ZeroDivisionError

    waiting = asyncio.create_task(changes.wait_for(condition))
    await ticks()
    broken[0] = True
    changes.notify()
    with pytest.raises(ZeroDivisionError):
        await waiting
