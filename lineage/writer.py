"""Group commit: one thread that turns appended events into frames, writes them, and makes them durable.

``append`` gives each event its seq at once and returns a ticket; encoding to Arrow and ``fdatasync`` never run on the
caller's thread. Everything that is queued when a commit begins becomes one frame, so there is never more than one frame
whose fate a crash leaves open, unless the durability policy says so.

Durability policies
-------------------
``fsync``
    A ticket resolves when ``fdatasync`` of its frame returned.
``interval``
    A ticket resolves when its frame was written; it is durable at most ``interval_ms`` later.
``os``
    A ticket resolves when its frame was written: it survives the process, not the machine. ``position`` and ``close``
    still make everything before them durable.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from kinlog.lineage.admission import MAX_FRAME_EVENTS, MAX_FRAME_PAYLOAD_BYTES, check_append
from kinlog.lineage.live_segment import LiveSegment
from kinlog.lineage.segment import SegmentInfo, segment_name
from kinlog.lineage.store import Store
from kinlog.lineage.waiters import LoopWaiter, ThreadWaiter, Waiter, Waiters, wake
from kinlog.schemas.codec import EncodedEvent
from kinlog.schemas.errors import LogWriteError, WriterFencedError
from kinlog.schemas.events import Position
from kinlog.schemas.settings import LogSettings

W = TypeVar("W", LoopWaiter, ThreadWaiter)

__all__ = ["LogWriter", "Ticket", "WriterStart"]


class WriterStart(NamedTuple):
    """Where a writer begins: in a new epoch, after the last event of the log."""

    directory: Path
    log_id: str
    run_id: str
    writer_version: str
    after: Position
    """``epoch`` is the one that the writer owns; ``seq`` and ``checksum`` are the log's last."""


class Ticket:
    """An append that has its place in the log, and becomes durable."""

    __slots__ = ("_writer", "seq")

    def __init__(self, writer: "LogWriter", seq: int) -> None:
        self._writer = writer
        self.seq = seq
        """seq of the append's last event."""

    async def durable(self) -> None:
        """Wait until the append is durable, as the writer's policy defines it.

        Raises
        ------
        LogWriteError
            The writer failed: the append may or may not be in the log, and the run must stop.
        """
        waiter = self._writer._watch(self.seq, LoopWaiter)
        if waiter is not None:
            await waiter.woken()
            self._writer._raise_unless_acknowledged(self.seq)

    def wait(self, timeout_s: float | None = None) -> None:
        """The same for callers without an event loop. ``TimeoutError`` after ``timeout_s``."""
        waiter = self._writer._watch(self.seq, ThreadWaiter)
        if waiter is not None:
            waiter.woken(timeout_s)
            self._writer._raise_unless_acknowledged(self.seq)


class _Append(NamedTuple):
    first_seq: int
    time_us: int
    events: tuple[EncodedEvent, ...]
    payload_bytes: int


class _PositionRequest:
    __slots__ = ("position", "waiter")

    def __init__(self) -> None:
        self.waiter = LoopWaiter()
        self.position: Position | None = None
        """Still ``None`` when woken: the writer failed."""


class _Close:
    """Nothing comes after it."""


class LogWriter:
    """Appends to a log of which this process owns the newest epoch. Made by ``kinlog.lineage.log``."""

    def __init__(
        self,
        store: Store,
        start: WriterStart,
        settings: LogSettings,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._start = start
        self._settings = settings
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[_Append | _PositionRequest | _Close] = queue.SimpleQueue()
        self._waiters = Waiters()
        self._next_seq = start.after.seq + 1
        self._acknowledged_seq = start.after.seq
        self._failure: LogWriteError | None = None
        self._closing = False
        # Owned by the thread from here on.
        self._pending: deque[_Append | _PositionRequest | _Close] = deque()
        self._synced_seq = start.after.seq
        self._unsynced_since_s: float | None = None
        self._written = start.after
        self._index = 0
        self._fence = start.directory / segment_name(start.after.epoch + 1, 0)
        self._segment = self._create_segment()
        self._thread = threading.Thread(target=self._run, name="kinlog-log-writer", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._start.after.epoch

    @property
    def last_seq(self) -> int:
        """seq of the last event appended, durable or not."""
        return self._next_seq - 1

    @property
    def acknowledged_seq(self) -> int:
        """Every event up to here is durable, as the policy defines it."""
        return self._acknowledged_seq

    def append(self, events: Sequence[EncodedEvent], time_us: int) -> Ticket:
        """Queue events as one unit: all of them are in the log, or none. Never blocks on the disk.

        ``time_us`` is the wall clock, microseconds since 1970-01-01 UTC.

        Raises
        ------
        LogWriteError
            The writer failed before, or was closed.
        ValueError
            As for :func:`check_append`, or the time does not fit 64 bits. Nothing was appended.
        """
        payload_bytes = check_append(events)
        if not -(2**63) <= time_us < 2**63:
            raise ValueError(f"a time is a 64-bit number of microseconds, got {time_us}")
        with self._lock:
            self._raise_if_unusable()
            self._inbox.put(_Append(self._next_seq, time_us, tuple(events), payload_bytes))
            self._next_seq += len(events)
            return Ticket(self, self._next_seq - 1)

    async def position(self) -> Position:
        """Make everything appended so far durable, whatever the policy, and return the place of its last event."""
        with self._lock:
            self._raise_if_unusable()
            request = _PositionRequest()
            self._inbox.put(request)
        await request.waiter.woken()
        if request.position is None:
            self._raise_if_failed()
        assert request.position is not None
        return request.position

    def close(self) -> Position:
        """Write what is queued, make it durable, end the segment, and stop. Returns the log's last place."""
        with self._lock:
            self._closing = True
            self._inbox.put(_Close())
        self._thread.join()
        self._raise_if_failed()
        return self._written

    def _raise_if_unusable(self) -> None:
        self._raise_if_failed()
        if self._closing:
            raise LogWriteError("the log writer is closed: nothing can be appended")

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            # Raised again and again, it would otherwise drag a longer traceback each time.
            raise self._failure.with_traceback(None)

    def _raise_unless_acknowledged(self, seq: int) -> None:
        if seq > self._acknowledged_seq:
            self._raise_if_failed()

    def _watch(self, seq: int, kind: type[W]) -> W | None:
        """Return a waiter that is woken once ``seq`` is acknowledged or lost, ``None`` when it is acknowledged."""
        with self._lock:
            if seq <= self._acknowledged_seq:
                return None
            self._raise_if_failed()
            waiter = kind()
            self._waiters.add(seq, waiter)
            return waiter

    # ---- the writer's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._commit_next():
                pass
            self._end_segment()
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing may be written after it
            self._poison(error)
        finally:
            self._segment.close()

    def _commit_next(self) -> bool:
        """Commit one frame, or answer one position request. Returns whether there may be more."""
        self._receive()
        if not self._pending:
            self._sync()
            return True
        head = self._pending[0]
        if isinstance(head, _Close):
            return False
        if isinstance(head, _PositionRequest):
            self._sync()
            self._check_fence(self._segment.path)
            # It is pending until it is answered: a failure answers everything that is.
            self._pending.popleft()
            head.position = self._written
            wake([head.waiter])
            return True
        self._write_frame(self._take_batch())
        due_in_s = self._sync_due_in_s()
        if self._settings.durability == "fsync" or (due_in_s is not None and due_in_s <= 0):
            self._sync()
        self._check_fence(self._segment.path)
        self._acknowledge()
        return True

    def _receive(self) -> None:
        """Move what arrived to ``_pending``; wait for something if nothing did, or until a sync is due."""
        if not self._pending:
            try:
                self._pending.append(self._inbox.get(timeout=self._sync_due_in_s()))
            except queue.Empty:
                return
        # Only this thread takes from it, so as many as are counted are there.
        for _ in range(self._inbox.qsize()):
            self._pending.append(self._inbox.get_nowait())

    def _sync_due_in_s(self) -> float | None:
        """Seconds until the ``interval`` policy's next sync, ``None`` when nothing waits for one."""
        if self._settings.durability != "interval" or self._unsynced_since_s is None:
            return None
        due_s = self._unsynced_since_s + self._settings.interval_ms / 1000
        return max(0.0, due_s - self._monotonic_s())

    def _take_batch(self) -> list[_Append]:
        batch: list[_Append] = []
        events = payload_bytes = 0
        while self._pending:
            head = self._pending[0]
            if not isinstance(head, _Append):
                break
            events += len(head.events)
            payload_bytes += head.payload_bytes
            if batch and (events > MAX_FRAME_EVENTS or payload_bytes > MAX_FRAME_PAYLOAD_BYTES):
                break
            batch.append(head)
            self._pending.popleft()
        return batch

    def _write_frame(self, batch: list[_Append]) -> None:
        events: list[EncodedEvent] = []
        times_us: list[int] = []
        for append in batch:
            events += append.events
            times_us += [append.time_us] * len(append.events)
        payload_bytes = sum([append.payload_bytes for append in batch])
        if self._segment.size_bytes + payload_bytes > self._settings.segment_bytes:
            self._roll_over()
        header = self._segment.write(events, times_us, batch[0].first_seq, self._synced_seq)
        self._written = Position(self.epoch, header.last_seq, header.checksum)
        if self._unsynced_since_s is None:
            self._unsynced_since_s = self._monotonic_s()

    def _sync(self) -> None:
        if self._synced_seq < self._written.seq:
            self._segment.sync()
            self._synced_seq = self._written.seq
        self._unsynced_since_s = None

    def _check_fence(self, own: Path) -> None:
        """Acknowledge nothing that a newer writer may not have read. ``own`` is the segment that this one was writing.

        A newer writer creates its epoch's first segment before it reads the log. Much later its compaction may replace
        that segment, but not before ours: looked for in the other order, both could be missed.
        """
        if self._store.exists(self._fence):
            proof = f"{self._fence.name} exists"
        elif not self._store.exists(own):
            proof = f"{own.name}, which it was writing, is gone"
        else:
            return
        raise WriterFencedError(
            f"epoch {self.epoch} of the log in {self._start.directory} was taken over: {proof}. "
            "Another process writes this run now; this one must stop."
        )

    def _acknowledge(self) -> None:
        with self._lock:
            self._acknowledged_seq = self._written.seq
            due = self._waiters.take(self._acknowledged_seq)
        wake(due)

    def _create_segment(self) -> LiveSegment:
        info = SegmentInfo(
            log_id=self._start.log_id,
            run_id=self._start.run_id,
            epoch=self.epoch,
            index=self._index,
            first_seq=self._written.seq + 1,
            previous=self._written.checksum,
            writer_version=self._start.writer_version,
        )
        path = self._start.directory / segment_name(self.epoch, self._index)
        # The first segment was created, empty, by whoever claimed the epoch.
        file = self._store.create(path) if self._index else self._store.open(path)
        try:
            segment = LiveSegment(file, path, info, self._synced_seq)
        except BaseException:
            file.close()
            raise
        self._store.sync_directory(self._start.directory)
        # Frames of this segment chain to its opening frame.
        self._written = Position(self.epoch, self._written.seq, segment.last_checksum)
        return segment

    def _end_segment(self) -> None:
        self._sync()
        self._segment.end()

    def _roll_over(self) -> None:
        self._end_segment()
        self._segment.close()
        self._index += 1
        ended = self._segment.path
        self._segment = self._create_segment()
        # A compaction that has removed all that fences this writer does not know its new segment: the one before it, it
        # has removed as well.
        self._check_fence(ended)

    def _poison(self, error: BaseException) -> None:
        """Fail everything that waits, now and later: after a failed write nothing is known about the file."""
        if isinstance(error, LogWriteError):
            failure = error
        else:
            failure = LogWriteError(
                f"writing the log in {self._start.directory} failed after seq {self._acknowledged_seq}: {error}. "
                "Nothing acknowledged is lost. Free or repair the disk, then resume the run."
            )
            failure.__cause__ = error
        with self._lock:
            self._failure = failure
            waiting: list[Waiter] = [*self._waiters.take_all()]
            # Nothing is put there any more.
            self._pending.extend(self._inbox.get_nowait() for _ in range(self._inbox.qsize()))
        wake(waiting)
        wake(item.waiter for item in self._pending if isinstance(item, _PositionRequest))
        self._pending.clear()
