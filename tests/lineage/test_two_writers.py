"""Two controllers on one log, as real processes: one is stopped, the other takes over, the first wakes up."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kinlog_builders import append_now, numbered, reopened

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.log import LOCK_NAME, OpenedLog
from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import segment_name
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import RunLockedError

SUPPORT = Path(sys.modules["kinlog_builders"].__file__ or "").parent


class Controller:
    """A process that writes a log, told what to append."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "kinlog_told_child.py"), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    def tell(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def appends(self, number: int) -> str:
        self.tell(number)
        return self.answer()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def wake(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[[], Controller]]:
    """Start a process that writes the log in ``tmp_path / "log"``."""
    started: list[Controller] = []

    def start() -> Controller:
        started.append(Controller(tmp_path / "log"))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


def numbers(directory: Path) -> list[int]:
    return [record.event.weight_version for record in scan_log(directory).events()]


def test_stopped_controller_that_wakes_up_after_a_take_over_is_fenced_and_one_history_survives(
    controller, directory
):
    first = controller()
    assert [first.appends(number) for number in (1, 2, 3)] == ["1", "2", "3"]
    first.stop()
    second = reopened(directory, take_over=True)
    append_now(second, numbered(4))
    first.wake()
    assert first.appends(66) == "WriterFencedError"
    assert first.appends(67) == "WriterFencedError"
    append_now(second, numbered(5))
    second.close()
    assert numbers(directory) == [1, 2, 3, 4, 5]
    third = reopened(directory)
    assert [repair.segment for repair in third.repaired] == [segment_name(1, 0)], "late frames are kept aside"
    assert (directory / third.repaired[0].quarantined_to).stat().st_size == third.repaired[
        0
    ].quarantined_bytes
    append_now(third, *third.repaired, numbered(6))
    third.close()
    assert [r.event for r in scan_log(directory).events() if r.seq != 6] == [numbered(n) for n in range(1, 7)]


def test_whatever_a_controller_acknowledged_is_history_whenever_it_was_stopped(directory):
    """It appends as fast as it can: it may be stopped in the middle of a write, a sync or an acknowledgement."""
    child = [sys.executable, str(SUPPORT / "kinlog_append_child.py"), str(directory)]
    for number in range(4):
        with subprocess.Popen(child, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
            said = [first.stdout.readline() for _ in range(20 + number)]
            os.kill(first.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
            second = reopened(directory, take_over=True)
            append_now(second, numbered(second.writer.last_seq + 1))
            os.kill(first.pid, signal.SIGCONT)
            rest, why = first.communicate()
        assert first.returncode == 1
        assert "WriterFencedError" in why
        acknowledged = int([*said, *rest.splitlines()][-1])
        assert second.scan.end.seq >= acknowledged
        second.close()
        records = list(scan_log(directory).events())
        assert [record.event for record in records] == [numbered(record.seq) for record in records]
        assert [record.epoch for record in records] == sorted(record.epoch for record in records)


def test_controller_that_was_told_to_append_while_it_was_stopped_is_fenced_as_well(controller, directory):
    first = controller()
    first.appends(1)
    first.stop()
    first.tell(66)
    second = reopened(directory, take_over=True)
    append_now(second, numbered(2))
    first.wake()
    assert first.answer() == "WriterFencedError"
    second.close()
    assert numbers(directory) == [1, 2]


def test_writer_that_took_over_holds_the_lock_against_a_third(controller, directory):
    first = controller()
    first.appends(1)
    first.stop()
    second = reopened(directory, take_over=True)
    with pytest.raises(RunLockedError, match=LOCK_NAME):
        reopened(directory)
    first.wake()
    assert first.appends(66) == "WriterFencedError"
    first.end()  # its lock was on a file that has no name any more
    with pytest.raises(RunLockedError, match=LOCK_NAME):
        reopened(directory)
    append_now(second, numbered(2))
    second.close()
    reopened(directory).close()


def test_take_over_of_a_take_over_fences_both(controller, directory):
    first = controller()
    first.appends(1)
    first.stop()
    second = reopened(directory, take_over=True)
    append_now(second, numbered(2))
    third = reopened(directory, take_over=True)
    append_now(third, numbered(3))
    first.wake()
    assert first.appends(66) == "WriterFencedError"
    with pytest.raises(OSError, match="taken over"):
        append_now(second, numbered(67))
    second.lock.release()
    with pytest.raises(RunLockedError):
        reopened(directory)
    third.close()
    assert numbers(directory) == [1, 2, 3]


def test_lock_that_is_taken_over_while_it_is_asked_for_is_not_got(opening, directory, monkeypatch):
    opening().close()
    taken: list[OpenedLog] = []
    lock, asked = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        asked.append(descriptor)
        if len(asked) == 1:  # between the opening of the lock file and its locking
            taken.append(reopened(directory, take_over=True))
        lock(descriptor, how)

    monkeypatch.setattr("kinlog.lineage.store.fcntl.flock", flock)
    with pytest.raises(RunLockedError):
        opening()
    append_now(taken[0], numbered(1))
    taken[0].close()


def test_controller_that_wakes_up_when_its_segments_and_their_fence_were_compacted_is_fenced(
    controller, directory
):
    first = controller()
    assert [first.appends(number) for number in (1, 2, 3)] == ["1", "2", "3"]
    first.stop()
    second = reopened(directory, take_over=True)
    append_now(second, numbered(4))
    second.close()
    third = reopened(directory)
    append_now(third, numbered(5))
    compacted = compact_log(LocalStore(), directory, epoch=third.writer.epoch, checkpoints=[])
    assert compacted.segments_replaced >= 2
    assert not (directory / segment_name(2, 0)).exists(), "its fence is still there: nothing is proven"
    first.wake()
    assert first.appends(66) == "WriterFencedError"
    append_now(third, numbered(6))
    third.close()
    assert numbers(directory) == [1, 2, 3, 4, 5, 6]
