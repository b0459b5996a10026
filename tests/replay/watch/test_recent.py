"""What is recent is found from the log's end, without reading the rest, and is what reading everything would give."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from kinlog_run_fixtures import Chance, DiskRun

from kinlog.lineage.scan import LogScan, scan_log
from kinlog.replay.projection import project
from kinlog.replay.watch import recent as watch_recent
from kinlog.replay.watch.rates import StepPace, TokenRate
from kinlog.replay.watch.recent import Recent, recent_of

SECOND_US = 1_000_000


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_backwards_is_what_reading_everything_gives(tmp_path: Path, seed: int, monkeypatch):
    monkeypatch.setattr(watch_recent, "_BACK_US", 1)  # of what happened lately, only the newest segment
    run = DiskRun(tmp_path / "run", segment_bytes=65_536)
    chance = Chance(run, seed, permits=8)
    held = run.story.generating()  # in flight from the very beginning
    chance._drive = lambda group: None if group.group_id == held else Chance._drive(chance, group)  # type: ignore[method-assign]
    chance.live(through_step=6, groups_per_step=2, checkpoint_every=3)
    run.kill()
    run.restart()
    chance.live(through_step=9, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    run.position()
    scan = scan_log(run.directory.log)
    projection = project(scan)
    everything = Recent()
    for record in scan.events():
        everything.add(record)
    everything.forget(projection)
    found = recent_of(scan, projection)
    assert found.dispatched == everything.dispatched != {}
    assert found.saved == everything.saved is not None
    assert (found.epoch, found.host, found.pid) == (2, everything.host, everything.pid)
    assert (found.began_us, found.last_us) == (everything.began_us, everything.last_us)
    assert found.pace.last_us == everything.pace.last_us
    run.close()


def test_beginning_of_a_long_log_is_not_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(watch_recent, "_BACK_US", 1)
    run = DiskRun(tmp_path / "run", segment_bytes=65_536)
    chance = Chance(run, 1, permits=8)
    chance.live(through_step=40, groups_per_step=2, checkpoint_every=3)
    run.position()
    scan = scan_log(run.directory.log)
    assert len(scan.segments) > 2
    firsts: list[int] = []
    batches = LogScan.batches

    def noted(self: LogScan, *arguments: int, **options: bool) -> Iterator[pa.RecordBatch]:
        for batch in batches(self, *arguments, **options):
            firsts.append(batch.column("seq")[0].as_py())
            yield batch

    projection = project(scan)
    monkeypatch.setattr(LogScan, "batches", noted)
    recent_of(scan, projection)
    assert min(firsts) > scan.segments[0].end.seq
    run.close()


def test_tokens_are_those_of_the_last_minute():
    rate = TokenRate()
    rate.add(0, 600)
    rate.add(30 * SECOND_US, 1200)
    assert rate.per_second(30 * SECOND_US) == 1800 / 30
    assert rate.per_second(60 * SECOND_US) == 1200 / 60
    assert rate.per_second(120 * SECOND_US) == 0
    young = TokenRate()
    young.add(100 * SECOND_US, 50)
    assert young.per_second(110 * SECOND_US, since_us=100 * SECOND_US) == 5


def test_pace_is_of_steps_in_one_go_and_says_when_the_last_one_will_be_done():
    pace = StepPace()
    assert pace.seconds_to(10, now_us=0) is None
    for step in (1, 2, 3):
        pace.add(step, 4 * step * SECOND_US)
    assert pace.seconds_per_step == 4
    assert pace.seconds_to(10, now_us=12 * SECOND_US) == 7 * 4
    assert pace.seconds_to(10, now_us=13 * SECOND_US) == 7 * 4 - 1
    # A step that is late is expected at any moment, and the others after it.
    assert pace.seconds_to(10, now_us=99 * SECOND_US) == 6 * 4
    assert pace.seconds_to(3, now_us=99 * SECOND_US) == 0
    pace.add(2, 100 * SECOND_US)  # a restart went back
    assert pace.seconds_per_step is None
