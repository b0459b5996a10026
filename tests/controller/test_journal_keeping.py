"""Row journal segments go when nothing in them is needed, and not before."""

from pathlib import Path

import pyarrow as pa

from kinlog.controller.journal_keeping import JournalKeeper
from kinlog.lineage.journal import RowJournal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.journal_columns import journal_schema


def written(directory: Path, *groups: int, ended: bool = True) -> str:
    """A segment with one row of generation 0, attempt 1 of each group. Returns its name."""
    before = set(LocalStore().names(directory))
    journal = RowJournal(
        LocalStore(),
        directory,
        writer_version="0",
        segment_bytes=1 << 20,
        clock_us=lambda: len(before),
    )
    for group in groups:
        rows = [
            {
                "group_id": group,
                "generation": 0,
                "attempt": 1,
                "call": 0,
                "row_digest": bytes(16),
                "prompt_tokens": 1,
                "token_ids": [1, 2],
                "logprobs": [-0.5],
                "weight_versions": [0],
            }
        ]
        journal.append(pa.RecordBatch.from_pylist(rows, schema=journal_schema()))
    if ended:
        journal.close()
    (name,) = set(LocalStore().names(directory)) - before
    return name


def keeper(tmp_path: Path) -> JournalKeeper:
    return JournalKeeper(LocalStore(), tmp_path / "journal", tmp_path / "trash")


def test_segment_goes_once_none_of_its_rows_is_needed(tmp_path: Path):
    keep = keeper(tmp_path)
    first, second = written(tmp_path / "journal", 1, 2), written(tmp_path / "journal", 3)
    assert keep.drop_unneeded(frozenset({(2, 0, 1), (3, 0, 2)})) == [second]
    assert LocalStore().names(tmp_path / "journal") == [first]
    assert keep.drop_unneeded(frozenset()) == [first]
    assert LocalStore().names(tmp_path / "trash") == []


def test_segment_that_is_being_written_stays(tmp_path: Path):
    keep = keeper(tmp_path)
    written(tmp_path / "journal", 1, ended=False)
    assert keep.drop_unneeded(frozenset()) == []


def test_segment_of_an_earlier_life_goes_although_nobody_ended_it(tmp_path: Path):
    name = written(tmp_path / "journal", 1, ended=False)
    assert keeper(tmp_path).drop_unneeded(frozenset()) == [name]


def test_damaged_segment_stays_for_people_to_look_at(tmp_path: Path):
    name = written(tmp_path / "journal", 1, 2, 3)
    path = tmp_path / "journal" / name
    broken = bytearray(path.read_bytes())
    broken[len(broken) // 2] ^= 1
    path.write_bytes(broken)
    assert keeper(tmp_path).drop_unneeded(frozenset()) == []


def test_other_files_are_nobodys_business(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "notes.txt").write_text("mine")
    assert keeper(tmp_path).drop_unneeded(frozenset()) == []
