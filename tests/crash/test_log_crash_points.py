"""A power failure, or a kill, at every operation on a log: what was acknowledged is there, and the log goes on.

The state of the disk is worked out from the recorded operations, by the rules in ``kinlog_crash_states``. Each recording is
crashed at every operation; some recoveries from that are crashed in turn, and some recoveries from those.
"""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from kinlog_builders import log_settings, numbered
from kinlog_crash_disk import Disk, Process, Sync, Write
from kinlog_crash_log import Explorer, RecordedLog, Recording

from kinlog.lineage.writer import LogWriter, WriterStart
from kinlog.schemas import events as e
from kinlog.schemas.codec import encode_event
from kinlog.schemas.errors import LogWriteError, WriterFencedError
from kinlog.schemas.reasons import Reason

#: Far below what a configuration allows: a segment of a few frames.
SMALL = 8_000


def bulky(number: int) -> e.AttemptSuperseded:
    return e.AttemptSuperseded(
        group_id=number, generation=0, attempt=1, reason=Reason.TIMEOUT, detail="x" * 900
    )


@pytest.fixture
def explore(
    crash_states: int, crash_deeper: int, tried: Callable[[object], None]
) -> Callable[[Recording], None]:
    """Try every crash of a recording, and say how many there were."""

    def explore_all(recording: Recording) -> None:
        explorer = Explorer(states=crash_states, deeper=crash_deeper)
        explorer.explore(recording)
        tried(explorer.tally)

    return explore_all


def test_creation_and_appends_synced_one_by_one(explore):
    log = RecordedLog().open()
    log.append(numbered(1))
    log.append(numbered(2), numbered(3), numbered(4))
    log.append(numbered(5))
    explore(log.recording)


@pytest.mark.parametrize("durability", ["os", "interval"])
def test_appends_that_are_synced_later_keep_what_a_position_promised(explore, durability):
    log = RecordedLog(settings=log_settings(durability=durability, interval_ms=3_600_000)).open()
    log.append(numbered(1))
    log.append(numbered(2))
    log.mark(asyncio.run(log.opened.writer.position()))
    log.append(numbered(3))
    log.append(numbered(4))
    log.append(numbered(5))
    explore(log.recording)


def test_roll_over_under_every_append(explore):
    log = RecordedLog(settings=log_settings(segment_bytes=SMALL)).open()
    for number in range(6):
        log.append(bulky(number))
    log.close()
    assert len(log.process.names(log.opened.scan.directory)) >= 4, "it did not roll over: nothing is proven"
    explore(log.recording)


def test_roll_over_of_appends_that_are_synced_later(explore):
    log = RecordedLog(settings=log_settings(segment_bytes=SMALL, durability="os")).open()
    for number in range(6):
        log.append(bulky(number))
    explore(log.recording)


def test_clean_close_and_the_lives_after_it(explore):
    log = RecordedLog().open()
    log.append(numbered(1))
    log.close()
    log.open()
    log.append(numbered(2))
    log.close()
    log.open()
    log.close()
    explore(log.recording)


def test_kills_one_after_the_other(explore):
    log = RecordedLog().open()
    log.append(numbered(1))
    log.kill()
    log.open()
    log.append(numbered(2))
    log.kill()
    log.open()
    log.append(numbered(3))
    explore(log.recording)


def test_frame_that_was_never_synced_and_that_the_next_life_read(explore):
    log = RecordedLog(settings=log_settings(durability="os")).open()
    log.append(numbered(1))
    log.append(numbered(2))
    log.kill()
    log = RecordedLog(log.recording)
    log.open()
    log.append(numbered(3))
    explore(log.recording)


def test_sync_that_failed_and_left_clean_pages_that_the_next_life_read(explore):
    log = RecordedLog().open()
    log.append(numbered(1))
    promise = log.recording.promise
    log.recording.promise_now(promise._replace(history=(*promise.history, numbered(2))))
    log.process.fail_next_sync = True
    with pytest.raises(LogWriteError):
        log.opened.writer.append([encode_event(numbered(2))], 0).wait(20)
    log.kill()
    log.open()
    log.append(numbered(3))
    explore(log.recording)


def test_repair_of_a_torn_tail_and_its_own_repair(explore):
    whole = RecordedLog().open()
    whole.append(numbered(1))
    before = whole.recording.promise
    whole.append(numbered(2))
    *others, frame, synced = whole.recording.disk.effects
    assert isinstance(frame, Write)
    assert isinstance(synced, Sync)
    # Killed in the middle of the write.
    disk = Disk(effects=[*others, frame._replace(data=frame.data[:700])])
    torn = RecordedLog(Recording(disk, [(0, before._replace(history=(*before.history, numbered(2))))]))
    torn.recording.tried_from = len(disk.effects)
    assert [repair.offset_bytes for repair in torn.open().opened.repaired] == [frame.offset]
    torn.append(numbered(3))
    explore(torn.recording)


def test_take_over_of_a_writer_that_wakes_up_and_goes_on_writing(explore):
    old = RecordedLog(settings=log_settings(segment_bytes=SMALL)).open()
    old.append(bulky(1))
    new = RecordedLog(old.recording).open(take_over=True)
    new.append(numbered(2))
    with pytest.raises(WriterFencedError):
        # Of no history: a segment of its own, and a frame in it.
        old.opened.writer.append([encode_event(bulky(66)) for _ in range(9)], 0).wait(20)
    new.append(numbered(3))
    new.close()
    assert [repair.quarantined_bytes > 0 for repair in new.open().opened.repaired] == [True]
    new.append(numbered(4))
    explore(new.recording)


def test_writer_that_wakes_up_in_the_middle_of_a_commit_after_a_take_over(explore):
    """The frame was written, not synced, when the other process read the log: it counts, although it was never
    acknowledged, or it does not, for ever."""
    old = RecordedLog(settings=log_settings(durability="os")).open()
    old.append(numbered(1))
    new = RecordedLog(old.recording).open(take_over=True)
    new.append(numbered(2))
    with pytest.raises(WriterFencedError):
        asyncio.run(old.opened.writer.position())
    new.append(numbered(3))
    explore(new.recording)


def lived(lives: int) -> RecordedLog:
    """A log of some closed lives, two events each, that is open."""
    log = RecordedLog()
    for life in range(lives):
        log.open()
        log.append(numbered(2 * life), numbered(2 * life + 1))
        log.close()
    log.open()
    # What went before is tried elsewhere.
    log.recording.tried_from = len(log.recording.disk.effects)
    return log


def test_compaction_of_closed_segments_while_the_log_is_written(explore):
    log = lived(3)
    log.append(numbered(90))
    assert log.compact().segments_replaced == 3
    log.append(numbered(91))
    explore(log.recording)


def test_compaction_of_what_was_compacted_before(explore):
    log = lived(3)
    log.compact()
    log.append(numbered(90))
    log.close()
    log.open()
    assert log.compact().segments_replaced > 0
    log.append(numbered(91))
    explore(log.recording)


def test_compaction_that_drops_history(explore):
    log = lived(3)
    log.append(numbered(90))
    assert log.compact(drop_through_seq=4).dropped_through_seq == 4
    log.append(numbered(91))
    log.close()
    log.open()
    assert log.compact(drop_through_seq=6).dropped_through_seq == 6
    explore(log.recording)


def test_compaction_over_a_take_over_and_its_late_frames(explore):
    old = RecordedLog(settings=log_settings(segment_bytes=SMALL)).open()
    old.append(bulky(1))
    new = RecordedLog(old.recording).open(take_over=True)
    new.append(numbered(2))
    with pytest.raises(WriterFencedError):
        old.opened.writer.append([encode_event(bulky(66)) for _ in range(9)], 0).wait(20)
    new.close()
    new.open()
    new.append(numbered(3))
    new.recording.tried_from = len(new.recording.disk.effects)
    assert new.compact().segments_replaced > 0
    new.append(numbered(4))
    explore(new.recording)


class Seconds:
    """A monotonic clock that moves only when told to."""

    now = 0

    def __call__(self) -> float:
        return float(self.now)


def test_interval_policy_keeps_what_is_older_than_its_interval(explore):
    log = RecordedLog().open()
    log.close()
    recording, clock = log.recording, Seconds()
    directory, store = log.opened.scan.directory, Process(recording.disk)
    store.create(directory / "segment-00000002-00000000.arrows").close()
    store.sync_directory(directory)
    after = msgspec.structs.replace(log.opened.close(), epoch=2)
    start = WriterStart(directory, "log-1", "run-1", "test", after)
    settings = log_settings(durability="interval", interval_ms=10_000)
    writer = LogWriter(store, start, settings, monotonic_s=clock)
    for number, clock.now in enumerate((0, 6, 11, 12, 30), start=1):
        promise = recording.promise
        begun = promise._replace(history=(*promise.history, numbered(number)))
        recording.promise_now(begun)
        writer.append([encode_event(numbered(number))], 0).wait(20)
        # Written at 0, 6 and 11; at 11 the oldest of them was due.
        due = {0: 0, 6: 0, 11: 3, 12: 3, 30: 5}[clock.now]
        recording.promise_now(begun._replace(acknowledged_seq=number, durable_seq=due))
    explore(recording)
