"""A reader written from docs/format.md alone agrees with kinlog: on every golden log, and on damaged copies of them."""

import ast
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from kinlog_builders import open_ledger, story
from kinlog_damage_oracle import damaged_copies, lived_log
from kinlog_golden import (
    ALL,
    GOLDEN,
    READABLE,
    READER_PATH,
    REFUSED,
    as_data,
    expected_events,
    expected_refusal,
    expected_story,
    log_path,
    reader,
)
from kinlog_stores import MemoryStore

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.scan import scan_log
from kinlog.schemas import events, manifest, prompts, reasons, receipts
from kinlog.schemas.codec import payload_fields
from kinlog.schemas.columns import ENVELOPE_FIELDS
from kinlog.schemas.errors import LogDamagedError, LogUnsupportedError, RunNotFoundError
from kinlog.schemas.events import EVENT_TYPES, kind_of

DIRECTORY = Path("/log")
Files = dict[str, bytes]


def test_independent_reader_imports_nothing_of_kinlog():
    tree = ast.parse(READER_PATH.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"collections.abc", "json", "pathlib", "pyarrow", "re", "struct", "typing", "zlib"}
    code = (
        f"import runpy, sys, pathlib; reader = runpy.run_path({str(READER_PATH)!r})\n"
        f"files = reader['load'](pathlib.Path({str(log_path('v1/whole_run'))!r}))\n"
        "rows = list(reader['events'](files, reader['open_log'](files)))\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('kinlog', 'msgspec', 'zstandard')]\n"
        "sys.stdout.write(str(len(rows)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, str(len(expected_events("v1/whole_run")))), done.stderr


@pytest.mark.parametrize("name", READABLE)
def test_independent_reader_finds_the_committed_events(name):
    files = reader.load(log_path(name))
    rows = list(reader.events(files, reader.open_log(files)))
    expected = expected_events(name)
    assert len(rows) == len(expected)
    for row, then in zip(rows, expected, strict=True):
        assert [row[key] for key in ("seq", "epoch", "time_us")] == [
            then[key] for key in ("seq", "epoch", "time_us")
        ]
        if row["fields"] is None:
            assert then["fields"] == {"original_kind": row["kind"]}
            continue
        assert (row["kind"], row["version"]) == (then["kind"], then["version"])
        # What the writer added and this version does not know is ignored; what is not stored is null, or its default.
        found = {key: value for key, value in as_data(row["fields"]).items() if key in then["fields"]}
        assert repr(found) == repr({key: then["fields"][key] for key in found})
        assert {repr(value) for key, value in then["fields"].items() if key not in found} <= {"None", "''"}


@pytest.mark.parametrize("name", READABLE)
def test_independent_reader_finds_the_committed_end_and_stray_bytes(name):
    log, expected = reader.open_log(reader.load(log_path(name))), expected_story(name)
    assert list(log.end) == expected["end"]
    assert [list(stray) for stray in log.torn] == expected["torn"]
    assert [list(stray) for stray in log.fenced] == expected["fenced"]


@pytest.mark.parametrize("name", REFUSED)
def test_independent_reader_refuses_a_newer_writers_log_by_name(name):
    files, expected, rows = reader.load(log_path(name)), expected_refusal(name), []
    with pytest.raises(reader.UnsupportedError) as refused:
        for row in reader.events(files, reader.open_log(files)):
            rows.append(row)
    assert len(rows) == expected["read_before"]
    assert all(named in str(refused.value) for named in expected["names"])


@pytest.mark.parametrize("seed", [1, 2])
def test_independent_reader_finds_what_is_written_today(tmp_path, seed):
    with open_ledger(tmp_path / "log") as ledger:
        story(seed, ledger=ledger)
    files = reader.load(tmp_path / "log")
    records = list(scan_log(tmp_path / "log").events())
    rows = list(reader.events(files, reader.open_log(files)))
    assert len(rows) == len(records) > 100
    for row, record in zip(rows, records, strict=True):
        fields = as_data(record.event)
        assert (row["seq"], row["epoch"], row["kind"]) == (record.seq, record.epoch, fields.pop("kind"))
        own = {key: value for key, value in fields.items() if value is not None or key in row["fields"]}
        assert repr(sorted(as_data(row["fields"]).items())) == repr(sorted(own.items()))


def test_manifest_of_a_golden_checkpoint_is_as_the_document_says():
    checkpoint = GOLDEN / "v1" / "whole_run" / "checkpoints" / "step_000001"
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    for entry in manifest["files"]:
        content = (checkpoint / entry["path"]).read_bytes()
        assert (len(content), _blake2b_128(content)) == (entry["size_bytes"], entry["blake2b"])
    assert [entry["path"] for entry in manifest["files"]] == sorted(
        path.relative_to(checkpoint).as_posix()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
    snapshot = pa.CompressedInputStream(pa.OSFile(str(checkpoint / "projection.zst")), "zstd").read()
    digest = _blake2b_128(len(snapshot).to_bytes(8, "little") + snapshot)
    assert digest == manifest["projection_digest"]
    assert reader.unpack(snapshot)["last_seq"] == manifest["position"][1]
    log = reader.open_log(reader.load(checkpoint / "log"), marks=(tuple(manifest["position"]),))
    assert list(log.end) == manifest["position"]
    reader.open_log(reader.load(log_path("v1/whole_run")), marks=(tuple(manifest["position"]),))


def _blake2b_128(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# ---- damaged copies -----------------------------------------------------------------------------------------------------


def kinlogs_verdict(files: Files) -> object:
    store = MemoryStore({DIRECTORY / name: content for name, content in files.items()})
    try:
        scan = scan_log(DIRECTORY, store=store)
    except RunNotFoundError:
        return "no log"
    except LogUnsupportedError:
        return "unsupported"
    except LogDamagedError as error:
        return (error.segment, error.offset_bytes, error.seq)
    history = [
        (s.path.name, [f.checksum for f in s.scan.frames if f.last_seq <= s.through_seq])
        for s in scan.segments
    ]
    strays = [[(s.path.name, s.offset_bytes) for s in found] for found in (scan.torn, scan.fenced)]
    return (tuple(as_data(scan.end)), history, *strays)


def readers_verdict(files: Files) -> object:
    try:
        log = reader.open_log(files)
    except reader.NoLogError:
        return "no log"
    except reader.UnsupportedError:
        return "unsupported"
    except reader.RefusedError as error:
        return error.place
    history = [(name, [frame.checksum for frame in frames]) for name, frames in log.segments]
    return (log.end, history, log.torn, log.fenced)


SEGMENTS_ONLY = [
    name for name in ALL if all(path.name.startswith("segment-") for path in log_path(name).glob("*.*"))
]


@pytest.mark.parametrize(
    "name", [name for name in SEGMENTS_ONLY if "newer" not in name and "required" not in name]
)
def test_both_readers_judge_damaged_copies_alike(name):
    files = {
        path.name: path.read_bytes() for path in sorted(log_path(name).iterdir()) if path.suffix == ".arrows"
    }
    assert kinlogs_verdict(files) == readers_verdict(files)
    verdicts = set()
    for what, changed in damaged_copies(files, random.Random(name), 120):
        ours, theirs = kinlogs_verdict(changed), readers_verdict(changed)
        assert ours == theirs, what
        verdicts.add(repr(ours))
    assert len(verdicts) > 5


def compacted_log(*, drop_through_seq: int) -> Files:
    """The lived log once all but its newest segment was compacted, or dropped."""
    store = MemoryStore(lived_log())
    compact_log(store, DIRECTORY, epoch=3, checkpoints=[], drop_through_seq=drop_through_seq)
    return {path.name: bytes(content) for path, content in store.files.items() if path.parent == DIRECTORY}


def rows_by_kinlog(files: Files) -> object:
    store = MemoryStore({DIRECTORY / name: content for name, content in files.items()})
    try:
        scan = scan_log(DIRECTORY, store=store)
        rows = [(r.seq, r.epoch, r.time_us, kind_of(type(r.event))) for r in scan.events()]
    except (RunNotFoundError, LogDamagedError):
        return "refused"
    return tuple(as_data(scan.end)), rows


def rows_by_reader(files: Files) -> object:
    try:
        log = reader.open_log(files)
    except (reader.NoLogError, reader.RefusedError):
        return "refused"
    rows = [(r["seq"], r["epoch"], r["time_us"], r["kind"]) for r in reader.events(files, log)]
    return log.end, rows


@pytest.mark.parametrize("drop_through_seq", [0, 4])
def test_both_readers_judge_compacted_and_dropped_history_alike(drop_through_seq):
    files = compacted_log(drop_through_seq=drop_through_seq)
    intact = rows_by_kinlog(files)
    assert rows_by_reader(files) == intact
    assert len(intact[1]) == 8 - drop_through_seq
    for what, changed in damaged_copies(files, random.Random(drop_through_seq), 250):
        assert rows_by_reader(changed) == rows_by_kinlog(changed), what


# ---- the document's tables --------------------------------------------------------------------------------------------


def test_document_lists_every_kind_with_its_version_its_columns_and_its_payload():
    documented = {
        reader.names_in(kind)[0]: (int(version), reader.names_in(columns), reader.names_in(payload))
        for kind, version, columns, payload in reader.documented("events")
    }
    assert documented == {
        kind: (
            event_type.VERSION,
            [field for field in event_type.__struct_fields__ if field in ENVELOPE_FIELDS],
            payload_fields()[kind],
        )
        for kind, event_type in EVENT_TYPES.items()
    }


def test_document_lists_the_elements_of_every_structure_and_the_members_of_the_manifest():
    structures = {
        "prompt": prompts.PromptRef,
        "retry budget": events.RetryBudget,
        "receipt": receipts.Receipt,
        "model call": receipts.ModelCall,
        "canonical row": events.CanonicalRowRef,
        "position": events.Position,
    }
    documented = {
        name.strip(): reader.names_in(elements) for name, elements in reader.documented("structures")
    }
    assert documented == {name: list(struct.__struct_fields__) for name, struct in structures.items()}
    members = [name for first, _ in reader.documented("manifest") for name in reader.names_in(first)]
    assert sorted(members) == sorted(manifest.Manifest.__struct_fields__)


def test_document_lists_the_names_of_every_closed_set():
    closed = {
        "reason": reasons.Reason,
        "granularity": reasons.Granularity,
        "finish_reason": reasons.FinishReason,
        "validity": reasons.Validity,
        "checkpoint_kind": reasons.CheckpointKind,
        "partition": reasons.Partition,
    }
    assert {field: {name.value for name in names} for field, names in closed.items()} == reader.NAMES
