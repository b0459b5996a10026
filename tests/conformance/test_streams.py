"""A streaming dataset: its draws go on where the log's cursor stands, and a stream that is slow stops nobody else."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

from kinlog_fake_parts import FakeItem, FakeParts, FakeStream
from kinlog_lives import Life, assert_conserved, first_life, history, next_life, replayed, run_config

from kinlog.schemas import events as e


def samples(path: Path) -> list[str]:
    reserved = [record.event for record in history(path) if isinstance(record.event, e.GroupReserved)]
    return [event.prompt.sample_id for event in reserved]


async def test_restored_stream_goes_on_after_the_last_draw_in_every_life(tmp_path: Path):
    run, config = tmp_path / "run", run_config(trainer__max_steps=14)
    life = await first_life(run, config, FakeParts(FakeStream(60)))
    for step in (2, 4, 6):
        await life.train_until(lambda p, step=step: p.train_step == step)
        await life.kill()
        stream, cursor = FakeStream(60), replayed(run).draw_cursor
        life = await next_life(run, config, FakeParts(stream))
        await life.train_until(lambda p, cursor=cursor: p.draw_cursor > cursor + 1)
        await life.kill()
        assert stream.opened.count(cursor) == 1
        assert stream.opened[-1] == cursor, "it is read on from there"
        life = await next_life(run, config, FakeParts(FakeStream(60)))
    await life.train()
    drawn = samples(run)
    assert drawn == [f"row-{number}" for number in range(len(drawn))]
    assert_conserved(replayed(run))


async def test_stream_that_has_ended_ends_the_run_also_when_a_restart_finds_it_ended(tmp_path: Path):
    run, config = tmp_path / "run", run_config(trainer__max_steps=50)
    life = await first_life(run, config, FakeParts(FakeStream(7)))
    await life.train_until(lambda p: p.exhausted)
    await life.kill()
    resumed = await (await next_life(run, config, FakeParts(FakeStream(7)))).train()
    assert resumed.p.applied_total == 7
    again = await (await next_life(run, config, FakeParts(FakeStream(7)))).train()
    assert again.p.applied_total == 7


class StuckStream(FakeStream):
    """Gives so many rows, and the next one only when it is let."""

    def __init__(self, size: int, *, before: int) -> None:
        super().__init__(size)
        self.before = before
        self.let = threading.Event()

    def open(self, draw_index: int) -> Iterator[FakeItem]:
        for place, item in enumerate(super().open(draw_index), draw_index):
            if place >= self.before:
                self.let.wait()
            yield item


async def test_stream_that_is_slow_stops_no_training_and_no_checkpoint(tmp_path: Path):
    stream = StuckStream(40, before=6)
    life = await first_life(tmp_path / "run", run_config(trainer__max_steps=5), FakeParts(stream))
    try:
        # Of the six that there are, all are trained on, with the checkpoints in between, while the stream is stuck.
        await life.train_until(lambda p: p.train_step == 3 and bool(p.checkpoints))
        assert life.p.draw_cursor == 6
    finally:
        stream.let.set()
    await life.finish()
    assert life.p.train_step == 5


async def test_stream_without_a_row_ends_at_once(tmp_path: Path):
    async with asyncio.timeout(600):
        life: Life = await (
            await first_life(tmp_path / "run", run_config(), FakeParts(FakeStream(0)))
        ).train()
    assert (life.p.drawn_total, life.p.train_step) == (0, 0)
