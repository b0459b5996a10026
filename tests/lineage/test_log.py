"""Opening: one writer at a time, a new epoch each, a torn tail cut off and kept, and a refusal that changes nothing."""

import errno
import os
import shutil
import subprocess
import sys

import pyarrow as pa
import pytest
from kinlog_builders import (
    append_now,
    directory_bytes,
    log_settings,
    new_log,
    numbered,
    reopened,
)
from kinlog_stores import Failing, FaultyStore, Gate, MemoryStore

from kinlog.lineage.log import LOCK_NAME, QUARANTINE_NAME, lock_log
from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import SegmentEnd, segment_name
from kinlog.schemas import events as e
from kinlog.schemas.codec import encode_event
from kinlog.schemas.errors import (
    LogDamagedError,
    LogWriteError,
    RunExistsError,
    RunLockedError,
    RunNotFoundError,
    WriterFencedError,
)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "log"


def crash(opened) -> None:
    """End a log's writer as a kill would: nothing is closed, nothing more is written."""
    opened.writer._store = _DeadDisk()
    opened.writer._segment = _DeadDisk()
    with pytest.raises(LogWriteError):
        append_now(opened, numbered(0))
    opened.lock.release()


class _DeadDisk:
    def __getattr__(self, name):
        if name == "close":
            return lambda: None
        raise OSError(errno.EIO, "killed")


def numbers(scan) -> list[int]:
    return [record.event.weight_version for record in scan.events()]


def segment(directory, epoch: int, index: int = 0):
    return directory / segment_name(epoch, index)


def test_each_opening_takes_the_next_epoch_and_goes_on_after_the_last_event(opening, directory):
    for life in range(1, 5):
        log = opening()
        assert log.writer.epoch == life
        assert log.scan.end.seq == life - 1
        assert append_now(log, numbered(life)) == life
        log.close()
    scan = scan_log(directory)
    assert numbers(scan) == [1, 2, 3, 4]
    assert [record.epoch for record in scan.events()] == [1, 2, 3, 4]
    assert [record.seq for record in scan.events(after_seq=2)] == [3, 4]


def test_events_and_batches_start_in_the_middle_of_a_frame(opening, directory):
    log = opening()
    append_now(log, *(numbered(n) for n in range(1, 6)))
    log.close()
    scan = scan_log(directory)
    for after in range(6):
        assert [r.seq for r in scan.events(after_seq=after)] == list(range(after + 1, 6))
        assert sum(b.num_rows for b in scan.batches(after_seq=after)) == 5 - after


def test_scanning_a_live_log_sees_what_is_committed(opening, directory):
    log = opening()
    append_now(log, numbered(1))
    scan = scan_log(directory)
    assert numbers(scan) == [1]
    assert scan.segments[-1].scan.end is SegmentEnd.LIVE
    table = pa.ipc.open_stream(segment(directory, 1)).read_all()
    assert table.column("weight_version").to_pylist() == [1]


def test_log_is_not_created_over_another(opening, directory):
    log = opening()
    append_now(log, numbered(1))
    log.close()
    before = directory_bytes(directory)
    with pytest.raises(RunExistsError):
        new_log(directory)
    assert directory_bytes(directory) == before
    assert opening().scan.end.seq == 1


def test_directory_without_a_log_is_said_to_have_none(directory, tmp_path):
    with pytest.raises(RunNotFoundError, match="segment-00000001"):
        scan_log(directory)
    with pytest.raises(RunNotFoundError):
        reopened(tmp_path)
    assert not directory.exists()
    assert list(tmp_path.iterdir()) == []


def test_run_killed_while_its_log_was_being_created_can_be_started_again(opening, directory):
    directory.mkdir()
    segment(directory, 1).write_bytes(bytes(4096))
    with pytest.raises(RunNotFoundError):
        scan_log(directory)
    again = new_log(directory)
    assert append_now(again, numbered(1)) == 1
    again.close()
    assert numbers(scan_log(directory)) == [1]


def test_second_writer_is_refused_while_the_first_lives(opening, directory):
    log = opening()
    append_now(log, numbered(1))
    before = directory_bytes(directory)
    with pytest.raises(RunLockedError, match=LOCK_NAME):
        reopened(directory)
    with pytest.raises(RunLockedError):
        lock_log(directory)
    assert directory_bytes(directory) == before
    append_now(log, numbered(2))
    log.close()
    lock = lock_log(directory)
    with pytest.raises(RunLockedError):
        reopened(directory)
    lock.release()


def test_lock_ends_with_its_process(directory):
    code = (
        "import os, sys; from pathlib import Path; from kinlog_builders import *; "
        "append_now(new_log(Path(sys.argv[1])), numbered(1)); os._exit(9)"
    )
    support = os.path.dirname(sys.modules["kinlog_builders"].__file__)
    child = subprocess.run(
        [sys.executable, "-c", code, str(directory)], env={**os.environ, "PYTHONPATH": support}, check=False
    )
    assert child.returncode == 9
    log = reopened(directory)
    assert log.scan.end.seq == 1
    log.close()


def test_lock_taken_earlier_is_used_and_released_when_opening_fails(opening, directory):
    log = opening()
    append_now(log, numbered(1))
    log.close()
    (directory / segment_name(1, 0)).rename(directory / segment_name(1, 7))
    lock = lock_log(directory)
    with pytest.raises(LogDamagedError):
        opening(lock=lock)
    lock_log(directory).release()


# ---- take-over ----------------------------------------------------------------------------------------------------


async def test_old_writer_that_wakes_up_is_fenced_and_what_it_wrote_is_no_history(opening, directory):
    store = FaultyStore()
    old = opening(store=store)
    append_now(old, numbered(1))
    store.before = gate = Gate()
    late = old.writer.append([encode_event(numbered(66))], 0)
    assert gate.reached.wait(20)  # written, not yet synced nor acknowledged
    new = opening(take_over=True)
    ended_at = new.scan.end.seq
    append_now(new, numbered(2))
    gate.open()
    with pytest.raises(WriterFencedError):
        await late.durable()
    new.close()
    scan = scan_log(directory)
    # Whether the unacknowledged event is history was decided by what the new writer read, once and for all.
    assert numbers(scan) == ([1, 66, 2] if ended_at == 2 else [1, 2])


def test_what_an_old_writer_wrote_past_a_take_over_is_quarantined_and_reported(opening, directory):
    old = opening()
    append_now(old, numbered(1))
    old.lock.release()
    new = opening(take_over=True)
    append_now(new, numbered(2))
    with pytest.raises(WriterFencedError):
        append_now(old, numbered(66))
    new.close()
    scan = scan_log(directory)
    assert numbers(scan) == [1, 2]
    assert [stray.path.name for stray in scan.fenced] == [segment_name(1, 0)]
    third = opening()
    assert [repair.segment for repair in third.repaired] == [segment_name(1, 0)]
    kept = directory / third.repaired[0].quarantined_to
    assert kept.stat().st_size == third.repaired[0].quarantined_bytes > 0
    append_now(third, numbered(3))
    third.close()
    scan = scan_log(directory)
    assert numbers(scan) == [1, 2, 3]
    assert not scan.fenced


def test_old_writer_that_rolled_over_past_a_take_over_does_not_damage_the_log(opening, directory):
    old = opening(settings=log_settings(segment_bytes=65_536))
    batch = [encode_event(e.WriterOpened(host="h" * 3000, pid=0))] * 20
    old.writer.append(batch, 0).wait(20)
    new = opening(take_over=True)
    append_now(new, numbered(2))
    with pytest.raises(WriterFencedError):
        old.writer.append(batch, 0).wait(20)
    assert segment(directory, 1, 1).exists(), "the old writer did not roll over: the test proves nothing"
    new.close()
    scan = scan_log(directory)
    assert scan.end.seq == 21
    assert segment(directory, 1, 1) in [stray.path for stray in scan.fenced]
    old.lock.release()
    third = opening()
    assert append_now(third, numbered(3)) == 22
    third.close()
    assert scan_log(directory).end.seq == 22


def test_take_over_that_was_itself_taken_over_before_it_began_does_not_damage_the_log(opening, directory):
    first = opening()
    append_now(first, numbered(1))
    first.close()
    slow = opening(take_over=True)  # opens epoch 2 at seq 2
    shutil.copy(segment(directory, 2), directory / "aside")
    slow.close()
    segment(directory, 2).write_bytes(
        b""
    )  # as if it had only claimed its epoch when the next one read the log
    fast = opening(take_over=True)
    append_now(fast, numbered(2))
    fast.close()
    shutil.move(directory / "aside", segment(directory, 2))
    scan = scan_log(directory)
    assert numbers(scan) == [1, 2]
    assert [stray.path for stray in scan.fenced] == [segment(directory, 2)]


def test_epoch_that_was_claimed_and_never_begun_is_passed(opening, directory):
    log = opening()
    append_now(log, numbered(1))
    log.close()
    segment(directory, 2).touch()
    segment(directory, 3).write_bytes(bytes(512))
    again = opening()
    assert (again.writer.epoch, again.repaired) == (4, ())
    append_now(again, numbered(2))
    again.close()
    assert numbers(scan_log(directory)) == [1, 2]


def test_epoch_claimed_at_the_same_time_by_another_is_refused(opening, directory):
    log = opening()
    append_now(log, numbered(1))
    log.close()

    class Racing(FaultyStore):
        def create(self, path):
            if path == segment(directory, 2):
                path.touch()
            return super().create(path)

    with pytest.raises(RunLockedError, match="epoch 2"):
        opening(store=Racing())
    assert opening().writer.epoch == 3


# ---- torn tails -----------------------------------------------------------------------------------------------------


def torn_log(opening, directory) -> bytes:
    """A log whose writer was killed in the middle of writing its third event; returns the torn bytes."""
    log = opening()
    for number in (1, 2, 3):
        append_now(log, numbered(number))
    frame = scan_log(directory).segments[0].scan.frames[-1]
    crash(log)
    path = segment(directory, 1)
    content = bytearray(path.read_bytes())
    torn = bytes(content[frame.offset : frame.end - 300])
    content[frame.end - 300 : frame.end] = bytes(300)
    path.write_bytes(content)
    return torn.rstrip(b"\0")


def test_torn_tail_is_kept_cut_off_and_reported(opening, directory):
    torn = torn_log(opening, directory)
    scan = scan_log(directory)
    assert numbers(scan) == [1, 2]
    assert [(stray.path, stray.offset_bytes) for stray in scan.torn] == [
        (segment(directory, 1), scan.segments[0].scan.end_offset)
    ]
    log = opening()
    (repair,) = log.repaired
    assert (repair.segment, repair.offset_bytes) == (segment_name(1, 0), scan.torn[0].offset_bytes)
    assert (directory / repair.quarantined_to).read_bytes() == torn
    assert repair.quarantined_to.startswith(f"{QUARANTINE_NAME}/")
    append_now(log, *log.repaired)
    append_now(log, numbered(4))
    log.close()
    scan = scan_log(directory)
    assert not scan.torn
    assert [record.event for record in scan.events()] == [numbered(1), numbered(2), repair, numbered(4)]


def test_zeros_after_the_last_frame_are_no_torn_tail(opening, directory):
    log = opening()
    append_now(log, numbered(1))
    crash(log)
    with segment(directory, 1).open("ab") as file:
        file.write(bytes(100_000))
    assert not scan_log(directory).torn
    assert opening().repaired == ()


def test_crash_in_the_middle_of_a_repair_loses_nothing(opening, directory):
    torn = torn_log(opening, directory)
    store = FaultyStore()
    store.before = Failing("truncate", errno.EIO)
    with pytest.raises(LogWriteError, match="cannot be opened for writing: .*EIO"):
        opening(store=store)
    log = opening()
    assert [(directory / repair.quarantined_to).read_bytes() for repair in log.repaired] == [torn]
    append_now(log, numbered(3))
    log.close()
    assert numbers(scan_log(directory)) == [1, 2, 3]


def test_repair_overwrites_nothing_that_an_earlier_one_kept_aside(opening, directory):
    torn = torn_log(opening, directory)
    offset = scan_log(directory).torn[0].offset_bytes
    (directory / QUARANTINE_NAME).mkdir()
    # What two repairs kept that a crash undid; it also lost the first of the two names.
    earlier = directory / QUARANTINE_NAME / f"{segment_name(1, 0)}.{offset}.1"
    earlier.write_bytes(b"earlier")
    for number in (0, 2):
        log = opening()
        assert log.repaired[0].quarantined_to.endswith(f"{offset}.{number}")
        crash(log)
        # As if the power had failed before the cut, and the life after it, were durable.
        segment(directory, 1).write_bytes(segment(directory, 1).read_bytes() + torn)
        segment(directory, log.writer.epoch).write_bytes(b"")
    assert earlier.read_bytes() == b"earlier"


def test_torn_tail_below_a_checkpoints_mark_is_refused_and_nothing_is_changed(opening, directory):
    log = opening()
    for number in (1, 2, 3):
        append_now(log, numbered(number))
    mark = log.close()
    frame = scan_log(directory).segments[0].scan.frames[-1]
    with segment(directory, 1).open("r+b") as file:
        file.truncate(frame.end - 300)
    before = directory_bytes(directory)
    with pytest.raises(LogDamagedError, match=rf"seq {mark.seq} with checksum {mark.checksum:08x}"):
        reopened(directory, marks=[mark])
    assert directory_bytes(directory) == before
    assert opening().scan.end.seq == 2, "without the mark it is an ordinary torn tail"


def test_mark_of_another_history_is_refused(opening, directory, tmp_path):
    log = opening()
    append_now(log, numbered(1))
    log.close()
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    one, other = opening(), reopened(copy)
    append_now(one, numbered(2))
    append_now(other, numbered(22))
    one.close()
    mark = other.close()
    with pytest.raises(LogDamagedError, match="does not hold what a checkpoint"):
        scan_log(directory, marks=[mark])
    assert scan_log(copy, marks=[mark]).end == mark


def test_memory_store_tells_the_same_as_the_disk(opening, directory):
    torn_log(opening, directory)
    store = MemoryStore({path: path.read_bytes() for path in directory.iterdir() if path.is_file()})
    on_disk, in_memory = scan_log(directory), scan_log(directory, store=store)
    assert (in_memory.end, in_memory.torn) == (on_disk.end, on_disk.torn)
    log = reopened(directory, store=store)
    append_now(log, numbered(9))
    log.close()
    assert numbers(scan_log(directory, store=store)) == [1, 2, 9]
    assert numbers(scan_log(directory)) == [1, 2]
