"""SQL over the views of a run, by DuckDB. Imported only when a query is asked: it is an extra.

DuckDB sees each view as a stream of Arrow batches that is read anew each time it is scanned. It is first asked, with empty
tables, which columns of which views a query reads: only those are then made. A column that it reads all the same is an
error inside of DuckDB, never a wrong answer, and the query is run again with every column.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from kinlog.lineage.scan import LogScan
from kinlog.replay.views.catalogue import VIEWS, View
from kinlog.replay.views.events import PAYLOAD_INPUTS, RAW_PAYLOAD, payload_texts
from kinlog.replay.views.reading import read_view
from kinlog.schemas.errors import KinlogError, QueryError

__all__ = ["Answer", "columns_read", "run_query"]

_ROWS_AT_A_TIME = 1000
_NOT_MADE = "kinlog did not make the column"

#: With these, a plan for empty tables would read less than one for a run.
_GUESSING = "filter_pushdown,statistics_propagation,empty_result_pullup"

_SQL_TYPES = {
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.utf8(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.binary(): "BLOB",
    pa.decimal128(20, 0): "DECIMAL(20, 0)",
    pa.timestamp("us", tz="UTC"): "TIMESTAMPTZ",
}


class Answer(NamedTuple):
    """What a query gives."""

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]
    """Of Python values, as DuckDB gives them."""


def run_query(scan: LogScan, query: str, *, allow_files: bool = False) -> Answer:
    """Answer a query over the views of a log.

    Parameters
    ----------
    allow_files:
        Let the query read and write files. Otherwise it can reach nothing but the views.

    Raises
    ------
    QueryError
        It is not one query, or it cannot be answered.
    KinlogError
        The log cannot be read.
    """
    wanted = columns_read(query, allow_files=allow_files)
    try:
        return _answer(scan, query, wanted, allow_files=allow_files)
    except _ColumnNotMadeError:
        return _answer(scan, query, _everything(), allow_files=allow_files)


def columns_read(query: str, *, allow_files: bool = False) -> dict[str, tuple[str, ...]]:
    """Return which views a query reads, and which columns of them.

    Raises
    ------
    QueryError
        It is not one query.
    """
    with _connected(allow_files=allow_files) as connection:
        for view in VIEWS.values():
            columns = ", ".join(f'"{c.name}" {_SQL_TYPES[c.type]}' for c in view.columns)
            connection.execute(f'CREATE TABLE "{view.name}" ({columns})')
        connection.execute(f"SET disabled_optimizers = '{_GUESSING}'")
        _check_one(connection, query)
        try:
            ((_, plan),) = connection.execute(f"EXPLAIN (FORMAT JSON) {query}").fetchall()
        except (duckdb.Error, ValueError):
            # Not everything that can be run can be explained. What is wrong with it, running it tells.
            return _everything()
    read: dict[str, set[str]] = {}
    for node in _nodes(json.loads(plan)):
        facts = node.get("extra_info", {})
        name = str(facts.get("Table", "")).rpartition(".")[2].strip('"')
        if name in VIEWS:
            columns = facts.get("Projections", list(VIEWS[name].names))
            read.setdefault(name, set()).update([columns] if isinstance(columns, str) else columns)
    return {name: tuple(c for c in VIEWS[name].names if c in columns) for name, columns in read.items()}


def _everything() -> dict[str, tuple[str, ...]]:
    return {view.name: view.names for view in VIEWS.values()}


def _nodes(plans: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for node in plans:
        yield node
        yield from _nodes(node.get("children", ()))


class _ColumnNotMadeError(Exception):
    """The query reads a column that its plan did not name."""


class _Stream:
    """A view as DuckDB scans it: each scan reads the log anew."""

    def __init__(self, scan: LogScan, name: str, columns: tuple[str, ...]) -> None:
        self._scan = scan
        self._name = name
        raw = [c for c in columns if c != "payload"] + [
            c for c in PAYLOAD_INPUTS if "payload" in columns and c not in columns
        ]
        # DuckDB counts rows also where it reads no column of them.
        self.columns = tuple(raw) or VIEWS[name].names[:1]
        self.error: KinlogError | None = None

    @property
    def _schema(self) -> pa.Schema:
        view = VIEWS[self._name]
        types = {c.name: c.type for c in view.columns} | {RAW_PAYLOAD: pa.binary()}
        return pa.schema((name, types[name]) for name in self.columns)

    def __arrow_c_schema__(self) -> object:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in read_view(self._scan, self._name, self.columns):
                yield pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)
        except KinlogError as error:
            # Kept, because DuckDB makes text of it.
            self.error = error
            raise


def _answer(scan: LogScan, query: str, wanted: Mapping[str, tuple[str, ...]], *, allow_files: bool) -> Answer:
    connection = _connected(allow_files=allow_files)
    streams = [_define(connection, scan, view, wanted.get(view.name, ())) for view in VIEWS.values()]
    connection.execute("SET lock_configuration = true")

    def told(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except duckdb.Error as error:
            for stream in streams:
                if stream.error is not None:
                    raise stream.error from None
            if _NOT_MADE in str(error):
                raise _ColumnNotMadeError(str(error)) from None
            raise QueryError(_one_line(error)) from None

    result = told(lambda: connection.execute(query))
    first = told(lambda: result.fetchmany(_ROWS_AT_A_TIME))

    def rows() -> Iterator[tuple[Any, ...]]:
        batch = first
        while batch:
            yield from batch
            batch = told(lambda: result.fetchmany(_ROWS_AT_A_TIME))

    return Answer(tuple(column[0] for column in result.description or ()), rows())


def _define(
    connection: duckdb.DuckDBPyConnection, scan: LogScan, view: View, columns: tuple[str, ...]
) -> _Stream:
    """Define a view for DuckDB, of which these columns can be read."""
    stream = _Stream(scan, view.name, columns)
    connection.register(f"kinlog_{view.name}", stream)
    if "payload" in columns:
        # Made by DuckDB's own call, so that it is made only for events that a query is left with.
        types = [_SQL_TYPES[c.type] for n in PAYLOAD_INPUTS for c in view.columns if c.name == n]
        connection.create_function(  # type: ignore[call-overload]
            "kinlog_payload",
            _payloads,
            [*types, "BLOB"],
            "VARCHAR",
            type="arrow",
            null_handling="special",
        )
    shown = []
    for column in view.columns:
        if column.name == "payload" and "payload" in columns:
            shown.append(f"kinlog_payload({', '.join(PAYLOAD_INPUTS)}) AS payload")
        elif column.name in columns:
            shown.append(f'"{column.name}"')
        else:
            shown.append(f"error('{_NOT_MADE}')::{_SQL_TYPES[column.type]} AS \"{column.name}\"")
    connection.execute(f'CREATE VIEW "{view.name}" AS SELECT {", ".join(shown)} FROM kinlog_{view.name}')
    return stream


def _payloads(
    kind: pa.ChunkedArray,
    version: pa.ChunkedArray,
    group_id: pa.ChunkedArray,
    generation: pa.ChunkedArray,
    attempt: pa.ChunkedArray,
    train_step: pa.ChunkedArray,
    weight_version: pa.ChunkedArray,
    reason: pa.ChunkedArray,
    raw_payload: pa.ChunkedArray,
) -> pa.Array:
    # DuckDB counts a function's parameters: they are the PAYLOAD_INPUTS.
    inputs = (kind, version, group_id, generation, attempt, train_step, weight_version, reason, raw_payload)
    return payload_texts(*(pa.concat_arrays(column.chunks) for column in inputs))


def _connected(*, allow_files: bool) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:")
    settings = {
        "TimeZone": "'UTC'",
        # A query that names a table finds no Python variable of that name.
        "python_enable_replacements": "false",
        "autoinstall_known_extensions": "false",
    }
    if not allow_files:
        settings |= {"temp_directory": "''", "enable_external_access": "false"}
    for name, value in settings.items():
        connection.execute(f"SET {name} = {value}")
    return connection


def _check_one(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise QueryError(_one_line(error)) from None
    if len(statements) != 1:
        raise QueryError(f"expected one query, found {len(statements)}")


def _one_line(error: duckdb.Error) -> str:
    """Return what DuckDB says, without its drawing of the place."""
    said = str(error).partition("\n\nLINE ")[0]
    return " ".join(said.split()) + (
        ". --allow-files lets a query read and write files"
        if isinstance(error, duckdb.PermissionException)
        else ""
    )
