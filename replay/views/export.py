"""Writing views to files that other tools read: Parquet, and JSON Lines.

A file is written under another name, made durable, and renamed: one with its own name is complete. What exists is never
overwritten.
"""

import errno
import uuid
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard

from kinlog.lineage.scan import LogScan
from kinlog.lineage.store import LocalStore, Store, StoredFile
from kinlog.replay.views.catalogue import VIEWS
from kinlog.replay.views.reading import read_views

__all__ = ["EXPORT_FORMATS", "ExportedFile", "export_views"]

#: Format -> how its files' names end.
EXPORT_FORMATS: dict[str, str] = {"parquet": ".parquet", "jsonl": ".jsonl", "jsonl.zst": ".jsonl.zst"}

#: Rows of a Parquet row group: enough to compress well, and few enough to be held for every view at a time.
_ROW_GROUP_ROWS = 128 * 1024
_COMPRESSION_LEVEL = 3


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file that was written."""

    view: str
    path: Path
    rows: int
    size_bytes: int


def export_views(
    scan: LogScan,
    directory: Path,
    *,
    names: Sequence[str],
    file_format: str,
    store: Store | None = None,
) -> tuple[ExportedFile, ...]:
    """Write views to a directory, a file each.

    Parameters
    ----------
    names:
        The views.
    file_format:
        One of ``EXPORT_FORMATS``.

    Raises
    ------
    FileExistsError
        A file of that name exists. Nothing was written.
    OSError
        A file cannot be written. None of its name is left.
    """
    store = store or LocalStore()
    targets = {name: directory / f"{name}{EXPORT_FORMATS[file_format]}" for name in names}
    for path in targets.values():
        if store.exists(path):
            raise FileExistsError(
                errno.EEXIST, "it exists, and nothing is overwritten: export to another directory", str(path)
            )
    store.make_directory(directory)
    files: dict[str, _Written] = {}
    try:
        for name, path in targets.items():
            files[name] = _Written(store, path, _facts(scan), view=name, file_format=file_format)
        for name, batch in read_views(scan, dict.fromkeys(names)):
            files[name].add(batch)
        for file in files.values():
            file.complete()
    except BaseException:
        for file in files.values():
            file.give_up()
        raise
    store.sync_directory(directory)
    return tuple(
        ExportedFile(view=name, path=file.path, rows=file.rows, size_bytes=file.size_bytes)
        for name, file in files.items()
    )


def _facts(scan: LogScan) -> dict[str, str]:
    """Return what a file says of where it comes from."""
    return {
        "kinlog.run_id": scan.run_id,
        "kinlog.log_id": scan.log_id,
        "kinlog.first_seq": str(scan.first_seq),
        "kinlog.last_seq": str(scan.end.seq),
    }


class _Encoding(Protocol):
    """Makes bytes of rows, and writes them."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> None: ...


class _Written:
    """A file that is being written under a temporary name."""

    def __init__(
        self, store: Store, path: Path, facts: dict[str, str], *, view: str, file_format: str
    ) -> None:
        self.path = path
        self.rows = 0
        self._store = store
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        self._file = store.create(self._temporary)
        self._sink = _Sink(self._file, path)
        self._schema = VIEWS[view].schema().with_metadata(facts)
        self._format = file_format
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._renamed = False

    @property
    def size_bytes(self) -> int:
        return self._sink.size_bytes

    @cached_property
    def _encoding(self) -> _Encoding:
        # Not before the file is known to be there: it writes its beginning at once.
        if self._format == "parquet":
            return _Parquet(self._sink, self._schema)
        return _JsonLines(self._sink, compressed=self._format == "jsonl.zst")

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        if self._waiting_rows >= _ROW_GROUP_ROWS:
            self._write()

    def complete(self) -> None:
        self._write()
        self._encoding.close()
        self._file.sync()
        self._file.close()
        self._store.rename(self._temporary, self.path)
        self._renamed = True

    def give_up(self) -> None:
        self._file.close()
        if not self._renamed:
            self._store.remove(self._temporary)

    def _write(self) -> None:
        if self._waiting:
            self._encoding.write(
                pa.Table.from_arrays(_joined(self._waiting, self._schema), schema=self._schema)
            )
            self.rows += self._waiting_rows
            self._waiting, self._waiting_rows = [], 0


def _joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> list[pa.ChunkedArray]:
    return [pa.chunked_array([batch.column(name) for batch in batches]) for name in schema.names]


class _Sink:
    """A stored file as Arrow writes to it."""

    def __init__(self, file: StoredFile, path: Path) -> None:
        self._file = file
        self._path = path
        self.size_bytes = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        content = memoryview(data)
        try:
            self._file.write_at(self.size_bytes, content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.size_bytes += len(content)
        return len(content)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


class _Parquet:
    def __init__(self, sink: _Sink, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"), schema, compression="zstd", compression_level=_COMPRESSION_LEVEL
        )

    def write(self, rows: pa.Table) -> None:
        self._writer.write(rows, row_group_size=_ROW_GROUP_ROWS)

    def close(self) -> None:
        self._writer.close()


class _JsonLines:
    def __init__(self, sink: _Sink, *, compressed: bool) -> None:
        self._sink = sink
        self._compressor = (
            zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True).compressobj()
            if compressed
            else None
        )

    def write(self, rows: pa.Table) -> None:
        lines = _json_lines(rows)
        self._sink.write(lines if self._compressor is None else self._compressor.compress(lines))

    def close(self) -> None:
        if self._compressor is not None:
            self._sink.write(self._compressor.flush())


_ENCODER = msgspec.json.Encoder()


def _json_lines(rows: pa.Table) -> bytes:
    """Return each row as a JSON object on a line of its own. The payload is an object in it, and no text."""
    columns = [_json_values(name, rows.column(name)) for name in rows.column_names]
    names = rows.column_names
    return _ENCODER.encode_lines(dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _json_values(name: str, column: pa.ChunkedArray) -> Iterable[object]:
    if pa.types.is_timestamp(column.type):
        text = column.cast(pa.timestamp("us")).cast(pa.utf8())
        column = pc.binary_join_element_wise(pc.replace_substring(text, " ", "T"), "Z", "")
    values: list[object] = column.to_pylist()
    if pa.types.is_decimal(column.type):
        return [None if value is None else int(str(value)) for value in values]
    if name == "payload":
        return [None if text is None else msgspec.Raw(str(text).encode()) for text in values]
    return values
