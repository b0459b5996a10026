"""Supervision: which failure surfaces, what is watched until when, and what a stall says."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from kinlog_bench import Bench
from kinlog_interleavings import run_by_chance, ticks
from kinlog_lives import run_config

from kinlog.controller.supervise import describe_waiting, first_cause, probe_health, supervise, watch_progress
from kinlog.schemas.errors import DataPlaneError, StalledError
from kinlog.schemas.reasons import Reason

Body = Coroutine[object, object, None]


async def returns(after: int = 0) -> None:
    await ticks(after)


async def fails(error: BaseException, after: int = 0) -> None:
    await ticks(after)
    raise error


async def runs_for_ever(journal: list[str] | None = None, name: str = "", cleaning_up: int = 0) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await ticks(cleaning_up)
        if journal is not None:
            journal.append(name)


async def breaks_when_cancelled(error: BaseException) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise error


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


async def test_end_of_the_named_task_cancels_the_others_and_waits_for_their_clean_up():
    journal: list[str] = []
    await supervise(
        [
            ("watchdog", runs_for_ever(journal, "watchdog", cleaning_up=9)),
            ("rollout", runs_for_ever(journal, "rollout")),
            ("train", returns(after=3)),
        ],
        until="train",
    )
    assert sorted(journal) == ["rollout", "watchdog"]


async def test_failure_is_raised_as_the_object_it_is_and_says_which_task_it_came_from():
    error, journal = ZeroDivisionError("one"), list[str]()
    with pytest.raises(ZeroDivisionError) as caught:
        await supervise(
            [("rollout", fails(error, after=2)), ("train", runs_for_ever(journal, "train"))], until="train"
        )
    assert caught.value is error
    assert notes(error) == ["raised by the rollout task"]
    assert journal == ["train"]


@pytest.mark.parametrize("seed", range(40))
def test_of_several_failures_in_one_tick_the_first_in_the_given_order_surfaces(seed: int):
    gate: list[asyncio.Event] = []
    errors = {name: ValueError(name) for name in ("health", "watchdog", "rollout", "train")}

    async def fail_with(error: BaseException) -> None:
        await gate[0].wait()
        raise error

    async def main() -> None:
        gate.append(asyncio.Event())
        watched = asyncio.create_task(
            supervise([(name, fail_with(error)) for name, error in errors.items()], until="train")
        )
        await ticks(40)
        gate[0].set()
        with pytest.raises(ValueError, match="health|watchdog|rollout|train") as caught:
            await watched
        surfaced = caught.value
        # Chance decides how many have failed by the time the supervisor looks; of those, the order decides.
        others = [name for name, error in errors.items() if error is not surfaced]
        told = [
            name for name in others if any(f"the {name} task failed too" in note for note in notes(surfaced))
        ]
        position = list(errors).index(str(surfaced))
        assert all(list(errors).index(name) > position for name in told)
        assert notes(surfaced)[0] == f"raised by the {surfaced} task"

    run_by_chance(main(), seed)


async def test_all_failures_of_one_tick_are_told():
    first, second, third = ValueError("first"), KeyError("second"), OSError("third")
    with pytest.raises(ValueError, match="first") as caught:
        await supervise(
            [("a", fails(first, 2)), ("b", fails(second, 2)), ("c", fails(third, 2)), ("train", returns(2))],
            until="train",
        )
    assert caught.value is first
    assert notes(first) == [
        "raised by the a task",
        "the b task failed too: KeyError('second')",
        "the c task failed too: OSError('third')",
    ]


async def test_failure_in_the_tick_in_which_training_ends_is_not_lost():
    with pytest.raises(StalledError):
        await supervise([("watchdog", fails(StalledError("x"), 3)), ("train", returns(3))], until="train")


async def test_watchdog_failure_is_seen_while_training_drains():
    """The rollout task has returned long before; the others are watched all the same."""
    journal: list[str] = []
    with pytest.raises(StalledError):
        await supervise(
            [
                ("watchdog", fails(StalledError("nothing moves"), after=30)),
                ("rollout", returns(after=1)),
                ("train", runs_for_ever(journal, "train")),
            ],
            until="train",
        )
    assert journal == ["train"]


async def test_exception_inside_nested_groups_surfaces_as_itself():
    error = DataPlaneError("the one")
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [error, ValueError("other")]), KeyError("x")])
    assert first_cause(nested) is error
    with pytest.raises(DataPlaneError) as caught:
        await supervise([("rollout", fails(nested)), ("train", runs_for_ever())], until="train")
    assert caught.value is error


async def test_what_cleaning_up_raises_is_told_and_masks_nothing():
    error = ZeroDivisionError("original")
    with pytest.raises(ZeroDivisionError) as caught:
        await supervise(
            [
                ("watchdog", breaks_when_cancelled(OSError("while cleaning up"))),
                ("rollout", fails(error, after=2)),
                ("train", runs_for_ever()),
            ],
            until="train",
        )
    assert caught.value is error
    assert notes(error) == [
        "raised by the rollout task",
        "the watchdog task failed while it was stopped: OSError('while cleaning up')",
    ]


async def test_failure_of_cleaning_up_after_a_good_end_is_raised():
    error = OSError("while cleaning up")
    with pytest.raises(OSError, match="while cleaning up") as caught:
        await supervise([("rollout", breaks_when_cancelled(error)), ("train", returns(2))], until="train")
    assert caught.value is error


async def test_cancelled_from_outside_cancels_every_task_and_waits_for_it():
    journal: list[str] = []
    told: list[str] = []

    async def run() -> None:
        tasks = [
            ("watchdog", runs_for_ever(journal, "watchdog", cleaning_up=9)),
            ("rollout", breaks_when_cancelled(OSError("while cleaning up"))),
            ("train", runs_for_ever(journal, "train", cleaning_up=2)),
        ]
        try:
            await supervise(tasks, until="train")
        except asyncio.CancelledError as error:
            told.extend(notes(error))
            raise

    run_task = asyncio.create_task(run())
    await ticks()
    run_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run_task
    assert sorted(journal) == ["train", "watchdog"]
    assert told == ["the rollout task failed while it was stopped: OSError('while cleaning up')"]


async def test_task_that_is_cancelled_from_within_is_a_failure_and_not_a_cancellation_of_all():
    with pytest.raises(RuntimeError, match="the rollout task was cancelled, and not by its supervisor"):
        await supervise(
            [("rollout", fails(asyncio.CancelledError(), after=2)), ("train", runs_for_ever())], until="train"
        )


# ---- health -----------------------------------------------------------------------------------------------------


class Enough(Exception):
    """Ends an endless task."""


def pauses(number: int, taken: list[float]) -> Callable[[float], Awaitable[None]]:
    async def sleep(seconds: float) -> None:
        taken.append(seconds)
        if len(taken) > number:
            raise Enough
        await asyncio.sleep(0)

    return sleep


def answers(*script: Exception | None) -> Callable[[], Awaitable[None]]:
    left = list(script)

    async def probe() -> None:
        answer = left.pop(0) if left else None
        if answer is not None:
            raise answer

    return probe


async def probed(
    *probes: tuple[str, Callable[[], Awaitable[None]]], rounds: int = 6, timeout_s: float = 5.0
) -> None:
    taken: list[float] = []
    try:
        await probe_health(
            probes, interval_s=7.0, timeout_s=timeout_s, max_failed=2, sleep=pauses(rounds, taken)
        )
    finally:
        assert set(taken) == {7.0}


async def test_part_that_fails_its_probes_in_a_row_stops_the_run_by_name():
    last = WorkerGone("connection refused")
    with pytest.raises(
        DataPlaneError, match="the trainer failed 2 health probes in a row.*connection refused"
    ) as caught:
        await probed(("data plane", answers()), ("trainer", answers(None, WorkerGone("first"), last)))
    assert caught.value.__cause__ is last


async def test_failed_probes_that_are_not_in_a_row_are_forgiven():
    error = WorkerGone("hiccup")
    with pytest.raises(Enough):
        await probed(("trainer", answers(error, None, error, None, error, None)))


async def test_failures_of_different_parts_do_not_add_up():
    error = WorkerGone("hiccup")
    with pytest.raises(Enough):
        await probed(
            ("trainer", answers(error, None, None, error)), ("finalizer", answers(None, error, None))
        )


def test_probe_that_never_answers_counts_as_failed():
    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DataPlaneError, match="the finalizer failed 2 health probes in a row.*TimeoutError"):
        run_by_chance(probed(("finalizer", hang)))


class WorkerGone(Exception):
    """What a probe of a dead part raises."""


# ---- stalls -----------------------------------------------------------------------------------------------------


async def watched(bench: Bench, script: Callable[[int], float]) -> None:
    """Watch with a clock that ``script`` reads at each look."""
    looks = [0]

    def clock_s() -> float:
        looks[0] += 1
        return script(looks[0])

    await watch_progress(bench.runtime, stall_timeout_s=10.0, clock_s=clock_s)


async def test_stall_is_reported_once_nothing_was_recorded_for_long_enough():
    bench = Bench()
    times = iter([0.0, 4.0, 9.9, 10.0])
    with pytest.raises(StalledError, match=f"nothing was recorded for 10 s after seq {bench.p.last_seq}"):
        await watch_progress(bench.runtime, stall_timeout_s=10.0, clock_s=lambda: next(times))
    assert bench.slept_s == [1.0, 1.0, 1.0]
    assert next(times, None) is None


async def test_anything_recorded_starts_the_stall_clock_again():
    bench = Bench()

    def script(look: int) -> float:
        if look in (2, 3, 4):
            bench.story.reserve()
        return look * 9.0

    with pytest.raises(StalledError):
        await watched(bench, script)
    assert len(bench.slept_s) >= 5


async def test_stall_says_what_waits_for_what():
    bench = Bench(run_config(trainer__groups_per_step=2, trainer__max_steps=4))
    story = bench.story
    finalized, generating, ready = story.finalized(), story.generating(siblings=2), story.ready()
    story.seal(generating, 0)
    story.supersede(generating, 1, Reason.TIMEOUT)
    story.dispatch(generating, 1)
    text = describe_waiting(bench.runtime)
    assert "Step 0 of 4; the next needs 2 finalized groups" in text
    assert f"generating: groups [{generating}]" in text
    assert f"ready: groups [{ready}]" in text
    assert f"finalized: groups [{finalized}]" in text
    assert f"Running siblings: {generating}/1 attempt 2" in text


async def test_stall_with_nothing_alive_says_so():
    assert "no group is alive. Running siblings: none" in describe_waiting(Bench().runtime)
