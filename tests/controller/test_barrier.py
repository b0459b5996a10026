"""The barrier: many cuts at once or one exclusive hold, in every interleaving, and cancelled anywhere."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_interleavings import run_by_chance, side_by_side, ticks

from kinlog.controller.barrier import Barrier, BarrierCut


class Visitor:
    """Enters a barrier and stays until told to leave."""

    def __init__(self, barrier: Barrier, kind: str, journal: list[str], *, exclusive: bool = False) -> None:
        self._hold: Callable[[str], AbstractAsyncContextManager[BarrierCut]] = (
            barrier.exclusive if exclusive else barrier.cut
        )
        self.kind = kind
        self.inside = False
        self._journal = journal
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit())

    async def _visit(self) -> None:
        async with self._hold(self.kind):
            self.inside = True
            self._journal.append(self.kind)
            try:
                await self._leave.wait()
            finally:
                self.inside = False

    async def leave(self) -> None:
        assert self.inside, f"{self.kind} was never admitted"
        self._leave.set()
        await self.task
        await ticks()

    async def cancel(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task
        await ticks()


async def assert_free(barrier: Barrier) -> None:
    """Nothing is held, nobody is counted: an exclusive hold is had without a wait, then a cut."""
    before = {kind: stats.waited for kind, stats in barrier.stats.items()}
    async with asyncio.timeout(600):
        async with barrier.exclusive("free"):
            pass
        async with barrier.cut("free"):
            pass
    assert barrier.stats["free"].waited == before.get("free", 0)


async def test_many_cuts_are_open_at_once():
    barrier, journal = Barrier(), []
    visitors = [Visitor(barrier, f"cut-{n}", journal) for n in range(20)]
    await ticks()
    assert all(visitor.inside for visitor in visitors)
    for visitor in visitors:
        await visitor.leave()
    await assert_free(barrier)


async def test_exclusive_hold_waits_for_open_cuts_and_excludes_new_ones():
    barrier, journal = Barrier(), []
    first, second = Visitor(barrier, "first", journal), Visitor(barrier, "second", journal)
    await ticks()
    checkpoint = Visitor(barrier, "checkpoint", journal, exclusive=True)
    await ticks()
    await first.leave()
    assert not checkpoint.inside
    await second.leave()
    assert checkpoint.inside
    late = Visitor(barrier, "late", journal)
    await ticks()
    assert not late.inside
    await checkpoint.leave()
    assert late.inside
    await late.leave()
    await assert_free(barrier)


async def test_new_cuts_wait_behind_a_waiting_checkpoint():
    barrier, journal = Barrier(), []
    first = Visitor(barrier, "first", journal)
    await ticks()
    checkpoint = Visitor(barrier, "checkpoint", journal, exclusive=True)
    await ticks()
    late = Visitor(barrier, "late", journal)
    await ticks()
    assert [first.inside, checkpoint.inside, late.inside] == [True, False, False]
    for visitor in (first, checkpoint, late):
        await visitor.leave()
    assert journal == ["first", "checkpoint", "late"]


async def test_cuts_are_not_starved_by_checkpoints_back_to_back():
    barrier, journal = Barrier(), []
    first = Visitor(barrier, "checkpoint-0", journal, exclusive=True)
    await ticks()
    cut = Visitor(barrier, "cut", journal)
    await ticks()
    second = Visitor(barrier, "checkpoint-1", journal, exclusive=True)
    await ticks()
    await first.leave()
    await cut.leave()
    await second.leave()
    assert journal == ["checkpoint-0", "cut", "checkpoint-1"]


async def test_two_checkpoints_serialise_in_the_order_they_asked():
    barrier, journal = Barrier(), []
    cut = Visitor(barrier, "cut", journal)
    await ticks()
    checkpoints = [Visitor(barrier, f"checkpoint-{n}", journal, exclusive=True) for n in range(3)]
    await ticks()
    await cut.leave()
    for number, checkpoint in enumerate(checkpoints):
        assert [c.inside for c in checkpoints] == [n == number for n in range(3)]
        await checkpoint.leave()
    assert journal == ["cut", "checkpoint-0", "checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("outer", ["cut", "exclusive"])
@pytest.mark.parametrize("inner", ["cut", "exclusive"])
async def test_second_cut_in_the_same_task_is_an_error_that_names_both(outer: str, inner: str):
    barrier = Barrier()
    async with getattr(barrier, outer)("seal"):
        with pytest.raises(RuntimeError, match="'drop' inside cut 'seal'"):
            async with getattr(barrier, inner)("drop"):
                pass
    await assert_free(barrier)


async def test_cut_in_a_child_task_of_a_cut_is_an_error_and_no_deadlock():
    barrier, journal = Barrier(), []

    async def ask() -> None:
        async with barrier.cut("child"):
            raise AssertionError("admitted")

    async def ask_by_grandchild() -> None:
        await asyncio.create_task(ask())

    async with asyncio.timeout(600):
        async with barrier.cut("parent"):
            checkpoint = Visitor(barrier, "checkpoint", journal, exclusive=True)  # waits for the parent
            await ticks()
            for child in (ask, ask_by_grandchild):
                with pytest.raises(RuntimeError, match="'child' inside cut 'parent'"):
                    await asyncio.create_task(child())
    # The visitor was started inside the cut too, and is refused the same way.
    with pytest.raises(RuntimeError, match="'checkpoint' inside cut 'parent'"):
        await checkpoint.task
    await assert_free(barrier)


async def test_task_that_was_started_inside_a_cut_has_its_own_once_that_one_is_over():
    barrier, over = Barrier(), asyncio.Event()

    async def outlive() -> None:
        await over.wait()
        async with barrier.cut("child") as cut:
            cut.require()

    async with barrier.cut("parent"):
        child = asyncio.create_task(outlive())
        await ticks()
    over.set()
    await child
    assert barrier.stats["child"].count == 1


async def test_cut_that_was_kept_is_refused_after_its_block():
    barrier = Barrier()
    async with barrier.cut("seal") as cut:
        cut.require()
    with pytest.raises(RuntimeError, match="'seal' is over"):
        cut.require()
    async with barrier.cut("other"):
        with pytest.raises(RuntimeError, match="'seal' is over"):
            cut.require()


async def test_error_inside_a_cut_ends_it_and_reaches_the_caller():
    barrier = Barrier()
    for hold in (barrier.cut, barrier.exclusive):
        with pytest.raises(ZeroDivisionError):
            async with hold("broken"):
                raise ZeroDivisionError
    await assert_free(barrier)


@pytest.mark.parametrize("exclusive", [False, True])
async def test_cancelled_before_it_is_admitted_leaks_nothing(exclusive: bool):
    barrier, journal = Barrier(), []
    holder = Visitor(barrier, "holder", journal, exclusive=True)
    await ticks()
    waiting = Visitor(barrier, "waiting", journal, exclusive=exclusive)
    await ticks()
    await waiting.cancel()
    await holder.leave()
    assert journal == ["holder"]
    await assert_free(barrier)


@pytest.mark.parametrize("exclusive", [False, True])
async def test_cancelled_inside_leaks_nothing(exclusive: bool):
    barrier, journal = Barrier(), []
    visitor = Visitor(barrier, "visitor", journal, exclusive=exclusive)
    await ticks()
    assert visitor.inside
    await visitor.cancel()
    await assert_free(barrier)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("cancel_first", [False, True])
async def test_admitted_in_the_same_tick_as_cancelled_gives_the_place_back(
    exclusive: bool, cancel_first: bool
):
    barrier, journal = Barrier(), []
    leave = asyncio.Event()
    waiting: list[asyncio.Task[None]] = []

    async def hold() -> None:
        async with barrier.exclusive("holder"):
            await leave.wait()
            if cancel_first:
                waiting[0].cancel()
        if not cancel_first:
            waiting[0].cancel()  # admitted just now, by leaving the block, and has not run since

    holder = asyncio.create_task(hold())
    await ticks()
    waiting.append(Visitor(barrier, "waiting", journal, exclusive=exclusive).task)
    await ticks()
    behind = Visitor(barrier, "behind", journal, exclusive=True)
    await ticks()
    leave.set()
    await holder
    await ticks()
    assert waiting[0].cancelled()
    assert behind.inside
    await behind.leave()
    assert journal == ["behind"]
    await assert_free(barrier)


async def test_cuts_behind_a_checkpoint_that_is_cancelled_are_admitted_at_once():
    barrier, journal = Barrier(), []
    first = Visitor(barrier, "first", journal)
    await ticks()
    checkpoint = Visitor(barrier, "checkpoint", journal, exclusive=True)
    await ticks()
    second = Visitor(barrier, "second", journal)
    await ticks()
    assert not second.inside
    await checkpoint.cancel()
    assert first.inside
    assert second.inside
    await first.leave()
    await second.leave()
    await assert_free(barrier)


async def test_barrier_counts_and_times_what_waited_and_what_was_held_by_kind():
    now_s = [100.0]
    barrier, journal = Barrier(clock_s=lambda: now_s[0]), []
    free = Visitor(barrier, "seal", journal)
    await ticks()
    checkpoint = Visitor(barrier, "checkpoint", journal, exclusive=True)
    await ticks()
    behind = Visitor(barrier, "seal", journal)
    await ticks()
    now_s[0] += 2
    await free.leave()  # held for 2 s; the checkpoint waited as long
    now_s[0] += 5
    await checkpoint.leave()  # held for 5 s; the second seal waited 7 s
    now_s[0] += 1
    await behind.leave()
    seal, hold = barrier.stats["seal"], barrier.stats["checkpoint"]
    assert (seal.count, seal.waited, seal.waited_s, seal.max_waited_s) == (2, 1, 7.0, 7.0)
    assert (seal.held_s, seal.max_held_s) == (3.0, 2.0)
    assert (hold.count, hold.waited, hold.waited_s, hold.max_waited_s) == (1, 1, 2.0, 2.0)
    assert (hold.held_s, hold.max_held_s) == (5.0, 5.0)


ACTOR = st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 4), st.none() | st.integers(0, 12))
"""Whether exclusive, ticks before it asks, ticks inside, and the tick at which it is cancelled."""


@settings(max_examples=500)
@given(actors=st.lists(ACTOR, min_size=2, max_size=9), seed=st.integers(0, 2**32))
def test_no_interleaving_has_a_cut_beside_an_exclusive_hold_and_everybody_is_admitted(
    actors: list[tuple[bool, int, int, int | None]], seed: int
):
    async def main() -> None:
        barrier = Barrier()
        inside = {True: 0, False: 0}
        admitted: list[int] = []

        def check() -> None:
            assert inside[True] <= 1
            assert not (inside[True] and inside[False])

        async def act(number: int, exclusive: bool, before: int, stay: int) -> None:
            await ticks(before)
            async with (barrier.exclusive if exclusive else barrier.cut)("any") as cut:
                admitted.append(number)
                inside[exclusive] += 1
                check()
                try:
                    for _ in range(stay):
                        await asyncio.sleep(0)
                        check()
                    cut.require()
                finally:
                    inside[exclusive] -= 1

        await side_by_side([(act(n, *actor), cancelled) for n, (*actor, cancelled) in enumerate(actors)])
        assert {n for n, (*_, cancelled) in enumerate(actors) if cancelled is None} <= set(admitted)
        await assert_free(barrier)

    run_by_chance(main(), seed)
