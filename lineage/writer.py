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

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from kinlog.lineage.encoder import FrameEncoder
from kinlog.lineage.segment import END_OF_STREAM, SegmentInfo, segment_name
from kinlog.lineage.store import Store, StoredFile
from kinlog.schemas.codec import EncodedEvent
from kinlog.schemas.errors import LogWriteError, WriterFencedError
from kinlog.schemas.events import Position
from kinlog.schemas.settings import LogSettings

__all__ = ["LogWriter", "Ticket", "WriterStart", "check_append_size"]

_MAX_FRAME_EVENTS = 4096
_MAX_FRAME_PAYLOAD_BYTES = 1 << 20
#: Arrow's columns and headers for a full frame, over its payload.
_FRAME_OVERHEAD_BYTES = 1 << 20
_PREALLOCATE_BYTES = 256 * 1024


def check_append_size(events: Sequence[EncodedEvent]) -> None:
    """Raise ``ValueError`` when events are none, or more than one frame takes: an append is never split."""
    if not 0 < len(events) <= _MAX_FRAME_EVENTS:
        raise ValueError(f"an append takes 1 to {_MAX_FRAME_EVENTS} events, got {len(events)}")
    payload_bytes = sum(len(event.payload) for event in events)
    if payload_bytes > _MAX_FRAME_PAYLOAD_BYTES:
        raise ValueError(f"an append takes {_MAX_FRAME_PAYLOAD_BYTES} bytes of payload, got {payload_bytes}")


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
        future = self._writer._watch(self.seq)
        if future is not None:
            await asyncio.wrap_future(future)

    def wait(self, timeout_s: float | None = None) -> None:
        """The same for callers without an event loop."""
        future = self._writer._watch(self.seq)
        if future is not None:
            future.result(timeout_s)


class _Append(NamedTuple):
    first_seq: int
    time_us: int
    events: tuple[EncodedEvent, ...]


class _PositionRequest(NamedTuple):
    future: "Future[Position]"


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
        self._lock = threading.Condition()
        self._queue: deque[_Append | _PositionRequest] = deque()
        # A heap by seq: tickets are not awaited in the order of their appends. The second number breaks ties.
        self._waiters: list[tuple[int, int, Future[None]]] = []
        self._watched = 0
        self._next_seq = start.after.seq + 1
        self._acknowledged_seq = start.after.seq
        self._failure: LogWriteError | None = None
        self._closing = False
        # Owned by the thread from here on.
        self._synced_seq = start.after.seq
        self._unsynced_since_s: float | None = None
        self._written = start.after
        self._index = 0
        self._fence = start.directory / segment_name(start.after.epoch + 1, 0)
        self._file, self._encoder = self._create_segment(first=True)
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
            There are no events, or more than fit one frame.
        """
        check_append_size(events)
        with self._lock:
            self._raise_if_unusable()
            append = _Append(self._next_seq, time_us, tuple(events))
            self._next_seq += len(events)
            self._queue.append(append)
            self._lock.notify()
            return Ticket(self, self._next_seq - 1)

    async def position(self) -> Position:
        """Make everything appended so far durable, whatever the policy, and return the place of its last event."""
        with self._lock:
            self._raise_if_unusable()
            request = _PositionRequest(Future())
            self._queue.append(request)
            self._lock.notify()
        return await asyncio.wrap_future(request.future)

    def close(self) -> Position:
        """Write what is queued, make it durable, end the segment, and stop. Returns the log's last place."""
        with self._lock:
            self._closing = True
            self._lock.notify()
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

    def _watch(self, seq: int) -> "Future[None] | None":
        with self._lock:
            if seq <= self._acknowledged_seq:
                return None
            self._raise_if_failed()
            future: Future[None] = Future()
            self._watched += 1
            heapq.heappush(self._waiters, (seq, self._watched, future))
            return future

    # ---- the writer's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._commit_next():
                pass
            self._end_segment()
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing may be written after it
            self._poison(error)
        finally:
            self._file.close()

    def _commit_next(self) -> bool:
        """Commit one frame, or answer one position request. Returns whether there may be more."""
        with self._lock:
            while not self._queue and not self._closing:
                if not self._lock.wait(self._sync_due_in_s()):
                    break
            if not self._queue and self._closing:
                return False
            batch = self._take_batch()
            # It stays in the queue until it is answered: a failure answers everything that is there.
            request = self._queue[0] if not batch and self._queue else None
        if batch:
            self._write_frame(batch)
            due_in_s = self._sync_due_in_s()
            if self._settings.durability == "fsync" or (due_in_s is not None and due_in_s <= 0):
                self._sync()
            self._check_fence()
            self._acknowledge()
        else:
            self._sync()
            if isinstance(request, _PositionRequest):
                self._check_fence()
                with self._lock:
                    self._queue.popleft()
                if request.future.set_running_or_notify_cancel():
                    request.future.set_result(self._written)
        return True

    def _sync_due_in_s(self) -> float | None:
        """Seconds until the ``interval`` policy's next sync, ``None`` when nothing waits for one."""
        if self._settings.durability != "interval" or self._unsynced_since_s is None:
            return None
        due_s = self._unsynced_since_s + self._settings.interval_ms / 1000
        return max(0.0, due_s - self._monotonic_s())

    def _take_batch(self) -> list[_Append]:
        batch: list[_Append] = []
        events = payload_bytes = 0
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _PositionRequest):
                break
            size = sum(len(event.payload) for event in head.events)
            full = (
                events + len(head.events) > _MAX_FRAME_EVENTS
                or payload_bytes + size > _MAX_FRAME_PAYLOAD_BYTES
            )
            if batch and full:
                break
            batch.append(head)
            self._queue.popleft()
            events += len(head.events)
            payload_bytes += size
        return batch

    def _write_frame(self, batch: list[_Append]) -> None:
        events = [event for append in batch for event in append.events]
        times_us = [append.time_us for append in batch for _ in append.events]
        payload_bytes = sum(len(event.payload) for event in events)
        if self._encoder.offset + payload_bytes > self._settings.segment_bytes or (
            self._encoder.remaining_bytes < payload_bytes + _FRAME_OVERHEAD_BYTES
        ):
            self._roll_over()
        offset = self._encoder.offset
        data, header = self._encoder.frame(events, times_us, batch[0].first_seq, self._synced_seq)
        self._preallocate(offset + len(data))
        self._file.write_at(offset, data)
        self._written = Position(self.epoch, header.last_seq, header.checksum)
        if self._unsynced_since_s is None:
            self._unsynced_since_s = self._monotonic_s()

    def _preallocate(self, end: int) -> None:
        if end > self._allocated:
            # Written zeros, so that the sync of an append changes no file size and allocates no block.
            size = -(-(end - self._allocated) // _PREALLOCATE_BYTES) * _PREALLOCATE_BYTES
            self._file.write_at(self._allocated, bytes(size))
            self._file.sync()
            self._allocated += size

    def _sync(self) -> None:
        if self._synced_seq < self._written.seq:
            self._file.sync()
            self._synced_seq = self._written.seq
        self._unsynced_since_s = None

    def _check_fence(self) -> None:
        if self._store.exists(self._fence):
            raise WriterFencedError(
                f"epoch {self.epoch} of the log in {self._start.directory} was taken over: {self._fence.name} exists. "
                "Another process writes this run now; this one must stop."
            )

    def _acknowledge(self) -> None:
        with self._lock:
            self._acknowledged_seq = self._written.seq
            due = []
            while self._waiters and self._waiters[0][0] <= self._acknowledged_seq:
                due.append(heapq.heappop(self._waiters)[-1])
        for future in due:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _create_segment(self, *, first: bool) -> tuple[StoredFile, FrameEncoder]:
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
        file = self._store.open(path) if first else self._store.create(path)
        capacity = self._settings.segment_bytes + _MAX_FRAME_PAYLOAD_BYTES + _FRAME_OVERHEAD_BYTES
        encoder = FrameEncoder(info, capacity)
        opening = encoder.opening(self._synced_seq)
        self._allocated = 0
        self._file = file
        self._preallocate(len(opening))
        file.write_at(0, opening)
        file.sync()
        self._store.sync_directory(self._start.directory)
        # Frames of this segment chain to its opening frame.
        self._written = Position(self.epoch, self._written.seq, encoder.last_checksum)
        return file, encoder

    def _end_segment(self) -> None:
        self._sync()
        end = self._encoder.offset
        self._file.write_at(end, END_OF_STREAM)
        self._file.truncate(end + len(END_OF_STREAM))
        self._file.sync()

    def _roll_over(self) -> None:
        self._end_segment()
        self._file.close()
        self._index += 1
        self._file, self._encoder = self._create_segment(first=False)

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
            waiters = [future for *_, future in self._waiters]
            waiters += [item.future for item in self._queue if isinstance(item, _PositionRequest)]  # type: ignore[misc]
            self._waiters.clear()
            self._queue.clear()
        for future in waiters:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
