"""Exported files hold the views, are complete or not there, and replace nothing."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from kinlog_run_fixtures import small_run
from kinlog_stores import FaultyStore

from kinlog.lineage.scan import LogScan, scan_log
from kinlog.replay.views import export
from kinlog.replay.views.catalogue import VIEWS
from kinlog.replay.views.export import EXPORT_FORMATS, export_views
from kinlog.replay.views.reading import view_table


@pytest.fixture
def scan(tmp_path: Path) -> LogScan:
    run = small_run(tmp_path / "run")
    run.kill()
    return scan_log(run.directory.log)


def _lines(path: Path) -> list[dict[str, object]]:
    content = path.read_bytes()
    if path.suffix == ".zst":
        content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
    return [json.loads(line) for line in content.splitlines()]


def test_parquet_has_every_view_as_it_is(scan: LogScan, tmp_path: Path):
    written = export_views(scan, tmp_path / "out", names=tuple(VIEWS), file_format="parquet")
    assert [one.view for one in written] == list(VIEWS)
    for one in written:
        table = pq.read_table(one.path)
        assert table.equals(view_table(scan, one.view))
        assert (one.rows, one.size_bytes) == (table.num_rows, one.path.stat().st_size)
        assert table.schema.types == VIEWS[one.view].schema().types
        assert table.schema.metadata[b"kinlog.last_seq"] == str(scan.end.seq).encode()


@pytest.mark.parametrize("file_format", ["jsonl", "jsonl.zst"])
def test_json_lines_have_every_row_with_every_field(scan: LogScan, tmp_path: Path, file_format: str):
    for one in export_views(scan, tmp_path / "out", names=tuple(VIEWS), file_format=file_format):
        rows, expected = _lines(one.path), view_table(scan, one.view).to_pylist()
        assert one.path.name == f"{one.view}{EXPORT_FORMATS[file_format]}"
        assert len(rows) == len(expected) == one.rows
        for row, then in zip(rows, expected, strict=True):
            assert list(row) == list(VIEWS[one.view].names)
            for column in VIEWS[one.view].columns:
                value = then[column.name]
                if pa.types.is_timestamp(column.type) and value is not None:
                    value = value.isoformat(timespec="microseconds").replace("+00:00", "Z")
                elif column.name == "payload":
                    value = json.loads(value)
                assert row[column.name] == value


def test_many_row_groups_are_one_view(scan: LogScan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export, "_ROW_GROUP_ROWS", 5)
    monkeypatch.setattr("kinlog.lineage.reading._JOINED_ROWS", 5)
    (one,) = export_views(scan, tmp_path / "out", names=("events",), file_format="parquet")
    file = pq.ParquetFile(one.path)
    assert file.num_row_groups > 3
    assert file.read().column("seq").to_pylist() == list(range(1, scan.end.seq + 1))


def test_what_exists_is_not_overwritten_and_nothing_is_written(scan: LogScan, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "steps.parquet").write_text("mine")
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        export_views(scan, out, names=("lives", "steps"), file_format="parquet")
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("steps.parquet", "mine")]


@pytest.mark.parametrize("file_format", EXPORT_FORMATS)
def test_disk_that_is_full_leaves_no_file_and_names_it(scan: LogScan, tmp_path: Path, file_format: str):
    store = FaultyStore()
    store.short_write_bytes = 1
    with pytest.raises(OSError, match="short write") as raised:
        export_views(scan, tmp_path / "out", names=tuple(VIEWS), file_format=file_format, store=store)
    assert Path(raised.value.filename).parent == tmp_path / "out"
    assert list((tmp_path / "out").iterdir()) == []


def test_file_has_its_name_only_when_it_is_durable(scan: LogScan, tmp_path: Path):
    out = tmp_path / "out"
    store, seen = FaultyStore(), []

    def look(operation: str, path: Path) -> None:
        if operation == "sync":
            seen.append(sorted(p.name for p in out.iterdir() if not p.name.startswith(".")))

    store.before = look
    export_views(scan, out, names=("lives", "steps"), file_format="jsonl", store=store)
    assert seen == [[], ["lives.jsonl"]]


def test_number_that_is_not_finite_is_null_in_json_and_kept_in_parquet():
    table = pa.table({"raw_reward": pa.array([float("nan"), float("inf"), 0.5])})
    assert export._json_lines(table) == b'{"raw_reward":null}\n{"raw_reward":null}\n{"raw_reward":0.5}\n'
