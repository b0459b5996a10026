"""The journals of workers: what is only in a process, kept on disk until it is durable elsewhere or gone.

Each worker process appends to segments of its own, which are framed and checked as the log's are, with columns of their
own. There are two kinds:

- The row journal has the token rows that workers stage (:mod:`kinlog.schemas.journal_columns`). A row is durable here
  before its worker reports it, and so before the log calls its sibling sealed: what the data plane lost with the process
  is put back from here.
- The progress journal has the tokens of rollouts that have not ended (:mod:`kinlog.schemas.progress_columns`): another
  attempt may go on from them.
"""

import io
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias
from zlib import crc32

import msgspec
import pyarrow as pa

from kinlog.lineage.encoder import last_message_bytes
from kinlog.lineage.frame import METADATA_KEY, PLACEHOLDER, FrameHeader, seal_frame
from kinlog.lineage.segment import (
    END_OF_STREAM,
    JOURNAL_FEATURE,
    SegmentEnd,
    SegmentInfo,
    SegmentScan,
    scan_segment,
)
from kinlog.lineage.store import Store, StoredFile
from kinlog.schemas.errors import KinlogError, LogDamagedError, LogWriteError
from kinlog.schemas.journal_columns import JOURNAL_IDENTITY, journal_schema
from kinlog.schemas.progress_columns import progress_schema

__all__ = [
    "PROGRESS",
    "ROWS",
    "UNREADABLE",
    "Attempt",
    "Journal",
    "JournalKind",
    "ScannedJournal",
    "journal_attempts",
    "journal_batches",
    "journal_identities",
    "scan_journal",
]

_CUSTOM_METADATA = {METADATA_KEY: PLACEHOLDER}
_SUFFIX = ".arrows"

#: What reading a segment comes to that is damaged, on a failing disk, or of a kinlog whose columns are others: for those who
#: can do without it.
UNREADABLE = (KinlogError, OSError, pa.ArrowException, LookupError, ValueError)

#: Group, generation, attempt.
Attempt: TypeAlias = tuple[int, int, int]


class JournalKind(NamedTuple):
    """A kind of journal: what its segments are called, and their columns."""

    prefix: str
    schema: Callable[[dict[str, str] | None], pa.Schema]

    def owns(self, name: str) -> bool:
        """Whether a file of this name is a segment of it."""
        return name.startswith(self.prefix) and name.endswith(_SUFFIX)


ROWS = JournalKind("rows-", journal_schema)
PROGRESS = JournalKind("progress-", progress_schema)


class Journal:
    """Appends batches of rows to this process's own segments. For one thread.

    Parameters
    ----------
    directory:
        The run's directory for this kind; it is made if need be.
    kind:
        What is written.
    writer_version:
        For people: nothing is decided by it.
    segment_bytes:
        A segment that has grown to this is ended, and the next one begun.
    clock_us:
        Wall clock, microseconds since 1970-01-01 UTC: names of segments sort by it.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        kind: JournalKind = ROWS,
        *,
        writer_version: str,
        segment_bytes: int,
        clock_us: Callable[[], int],
    ) -> None:
        self._store = store
        self._directory = directory
        self._kind = kind
        self._writer_version = writer_version
        self._segment_bytes = segment_bytes
        # Never another's: no two processes, of this life or any other, append to the same segment.
        self._name = f"{kind.prefix}{clock_us():016d}-{uuid.uuid4().hex[:12]}"
        self._index = 0
        self._segment: _Segment | None = None
        self._failure: LogWriteError | None = None

    def append(self, rows: pa.RecordBatch) -> None:
        """Append rows as one frame, all of them or none. They are durable when this returns.

        Raises
        ------
        LogWriteError
            They may or may not be in the journal. Nothing more can be appended.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        try:
            if self._segment is None:
                self._segment = self._begin()
            self._segment.append(rows)
            if self._segment.size_bytes >= self._segment_bytes:
                self._end()
        except (OSError, MemoryError, pa.ArrowException) as error:
            # Whatever it was, a frame may be half made: one more behind it would be no frame.
            self._failure = LogWriteError(
                f"writing the journal in {self._directory} failed: {error}. Nothing that was reported is lost. Free "
                "or repair the disk, then resume the run."
            )
            raise self._failure from error

    def close(self) -> None:
        """End the segment."""
        if self._failure is None and self._segment is not None:
            self._end()

    def _begin(self) -> "_Segment":
        info = SegmentInfo(
            log_id=self._name,
            run_id="",
            epoch=0,
            index=self._index,
            first_seq=1,
            previous=0,
            writer_version=self._writer_version,
            required_features=(JOURNAL_FEATURE,),
        )
        self._store.make_directory(self._directory)
        file = self._store.create(self._directory / f"{self._name}-{self._index:06d}{_SUFFIX}")
        self._index += 1
        segment = _Segment(file, info, self._kind)
        self._store.sync_directory(self._directory)
        return segment

    def _end(self) -> None:
        assert self._segment is not None
        segment, self._segment = self._segment, None
        segment.end()


class _Segment:
    """One segment that is being written."""

    def __init__(self, file: StoredFile, info: SegmentInfo, kind: JournalKind) -> None:
        self._file = file
        schema = kind.schema({"kinlog.segment": msgspec.json.encode(info).decode()})
        # One Arrow writer for the whole segment: it writes the schema once. What it made is taken out of the sink.
        self._sink = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._sink, schema)
        self.size_bytes = 0
        self._rows = 0
        self._last = 0
        opening = self._message(_empty_batch(schema))
        prefix = len(opening) - last_message_bytes(opening)
        self.size_bytes = prefix
        self._seal(opening[prefix:], 0, seed=crc32(opening[:prefix]))
        file.write_at(0, opening)
        file.sync()

    def append(self, rows: pa.RecordBatch) -> None:
        frame = self._message(rows)
        offset = self.size_bytes
        self._seal(frame, rows.num_rows, seed=0)
        self._file.write_at(offset, frame)
        self._file.sync()

    def end(self) -> None:
        self._file.write_at(self.size_bytes, END_OF_STREAM)
        self._file.sync()
        self._file.close()

    def _message(self, rows: pa.RecordBatch) -> memoryview:
        self._writer.write_batch(rows, custom_metadata=_CUSTOM_METADATA)
        message = memoryview(bytearray(self._sink.getvalue()))
        self._sink.seek(0)
        self._sink.truncate()
        return message

    def _seal(self, frame: memoryview, count: int, *, seed: int) -> None:
        header = FrameHeader(self.size_bytes, 0, self._rows + 1, count, 0, self._rows, self._last, 0)
        header = seal_frame(frame, header, seed)
        self.size_bytes = header.end
        self._rows += count
        self._last = header.checksum


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


class ScannedJournal(NamedTuple):
    """A verified journal segment, in memory."""

    path: Path
    data: memoryview
    scan: SegmentScan

    @property
    def closed(self) -> bool:
        """Whether its worker ended it: nothing more will be appended."""
        return self.scan.end is SegmentEnd.CLOSED


def scan_journal(store: Store, path: Path) -> ScannedJournal:
    """Verify a journal segment. A torn tail is what a killed worker leaves: it never reported what is in it.

    Raises
    ------
    LogDamagedError
        Rows that were durable do not verify.
    LogUnsupportedError
        It was written by a newer kinlog.
    """
    data = store.read(path)
    scan = scan_segment(data)
    if scan.end is SegmentEnd.DAMAGED:
        raise LogDamagedError(
            "damaged journal",
            segment=path.name,
            offset_bytes=scan.end_offset,
            seq=scan.frames[-1].last_seq if scan.frames else 0,
            expected=scan.expected,
            found=scan.found,
        )
    return ScannedJournal(path, data, scan)


def journal_batches(journal: ScannedJournal) -> Iterator[pa.RecordBatch]:
    """Yield the verified batches of rows."""
    yield from _batches(journal, None)


def journal_identities(journal: ScannedJournal) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Yield group, generation, attempt, call and digest of each row of the row journal, without its tokens."""
    names = (*JOURNAL_IDENTITY, "row_digest")
    for batch in _batches(journal, names):
        yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def journal_attempts(journal: ScannedJournal) -> frozenset[Attempt]:
    """Return the attempts that a segment of either kind has something of."""
    names = ("group_id", "generation", "attempt")
    return frozenset(
        attempt
        for batch in _batches(journal, names)
        for attempt in zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    )


def _batches(journal: ScannedJournal, columns: tuple[str, ...] | None) -> Iterator[pa.RecordBatch]:
    if not journal.scan.frames:
        return
    data = pa.py_buffer(journal.data[: journal.scan.frames[-1].end])
    fields = None
    if columns is not None:
        with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
            fields = [reader.schema.names.index(name) for name in columns]
    with pa.ipc.open_stream(
        pa.BufferReader(data), options=pa.ipc.IpcReadOptions(included_fields=fields)
    ) as reader:
        for batch in reader:
            if batch.num_rows:
                yield batch
