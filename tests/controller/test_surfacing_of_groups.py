"""Of a failed task group the first member surfaces, and none of the others is lost."""

import asyncio

import pytest

from kinlog.controller.supervise import supervise


async def fails(error: BaseException) -> None:
    raise error


async def runs_for_ever() -> None:
    await asyncio.Event().wait()


async def breaks_when_cancelled(error: BaseException) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise error


NESTED = [OSError("a"), ExceptionGroup("inner", [ValueError("b"), KeyError("c")])]


async def test_every_other_member_of_a_failed_group_is_noted():
    first = OSError("a")
    group = ExceptionGroup("outer", [first, *NESTED[1:]])
    with pytest.raises(OSError, match="a") as caught:
        await supervise([("rollout", fails(group)), ("train", runs_for_ever())], until="train")
    assert caught.value is first
    assert first.__notes__ == [
        "raised by the rollout task",
        "the rollout task raised this too: ValueError('b')",
        "the rollout task raised this too: KeyError('c')",
    ]


async def test_every_member_of_a_later_task_s_group_is_noted():
    first = OSError("first")
    with pytest.raises(OSError, match="first"):
        await supervise(
            [
                ("health", fails(first)),
                ("rollout", fails(ExceptionGroup("g", NESTED))),
                ("train", runs_for_ever()),
            ],
            until="train",
        )
    assert first.__notes__[1:] == [
        f"the rollout task failed too: {error}"
        for error in ("OSError('a')", "ValueError('b')", "KeyError('c')")
    ]


async def test_every_member_of_a_group_that_cleaning_up_raises_is_noted():
    first = OSError("first")
    with pytest.raises(OSError, match="first"):
        await supervise(
            [("health", fails(first)), ("train", breaks_when_cancelled(ExceptionGroup("g", NESTED)))],
            until="train",
        )
    assert [note for note in first.__notes__ if "while it was stopped" in note] == [
        f"the train task failed while it was stopped: {error}"
        for error in ("OSError('a')", "ValueError('b')", "KeyError('c')")
    ]
