"""Draws of a stream: read ahead in a thread, opened again where the cursor stands, and checked by reading it again."""

import asyncio
import threading
from collections.abc import Iterator

import msgspec
import pytest
from kinlog_fake_parts import FakeItem, FakeStream
from kinlog_interleavings import ticks

from kinlog.controller.prompt_source import StreamPromptSource
from kinlog.schemas.errors import DatasetError
from kinlog.schemas.prompts import PromptRef


async def drawn(source: StreamPromptSource, draws: range) -> list[PromptRef]:
    prompts = []
    for draw in draws:
        await source.prepare(draw)
        prompt = source.draw(draw)
        assert prompt is not None
        prompts.append(prompt)
    return prompts


async def test_stream_is_read_on_and_opened_again_only_after_a_restart():
    stream = FakeStream(5)
    source = StreamPromptSource(stream)
    assert [prompt.sample_id for prompt in await drawn(source, range(3))] == ["row-0", "row-1", "row-2"]
    assert stream.opened == [0]
    resumed = StreamPromptSource(stream)
    assert [prompt.sample_id for prompt in await drawn(resumed, range(3, 5))] == ["row-3", "row-4"]
    assert stream.opened == [0, 3]
    await resumed.prepare(5)
    assert not resumed.has(5)
    assert resumed.draw(5) is None


async def test_draw_that_was_not_prepared_is_a_mistake_of_the_caller():
    source = StreamPromptSource(FakeStream(5))
    with pytest.raises(RuntimeError, match="draw 0 of the stream was not prepared"):
        source.draw(0)
    assert source.has(0), "what has not been read may be there"


async def test_prepared_draw_is_not_read_again():
    source = StreamPromptSource(FakeStream(1))
    await source.prepare(0)
    await source.prepare(0)
    assert source.draw(0) is not None


class SlowStream(FakeStream):
    """Gives its first row when it is let."""

    def __init__(self) -> None:
        super().__init__(1)
        self.let = threading.Event()

    def open(self, draw_index: int) -> Iterator[FakeItem]:
        self.let.wait()
        return super().open(draw_index)


async def test_stream_that_is_slow_holds_nobody_else_up():
    stream = SlowStream()
    source = StreamPromptSource(stream)
    preparing = asyncio.create_task(source.prepare(0))
    try:
        await ticks(50)  # everybody else goes on
        assert not preparing.done()
    finally:
        stream.let.set()
    await preparing
    assert source.draw(0) is not None


async def test_restored_prompt_is_read_again_and_a_change_is_refused_by_name():
    (prompt,) = await drawn(StreamPromptSource(FakeStream(5)), range(1))
    StreamPromptSource(FakeStream(5)).check(prompt)
    with pytest.raises(DatasetError, match="'row-0' has changed"):
        StreamPromptSource(FakeStream(5, salt="other")).check(prompt)
    with pytest.raises(DatasetError, match="found the end of the dataset"):
        StreamPromptSource(FakeStream(0)).check(prompt)
    moved = msgspec.structs.replace(prompt, draw_index=1)
    with pytest.raises(DatasetError, match="was sample 'row-0', found sample 'row-1'"):
        StreamPromptSource(FakeStream(5)).check(moved)
