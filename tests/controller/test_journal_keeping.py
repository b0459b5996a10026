"""Row journal segments go when nothing in them is needed, and not before."""

from pathlib import Path

import pyarrow as pa
import pytest
from kinlog_builders import prompt_ref
from kinlog_journal_parts import JournalledParts, journal_in, journal_rows
from kinlog_lives import first_life, run_config

from kinlog.controller.journal_keeping import JournalKeeper
from kinlog.lineage.journal import Attempt, Journal, scan_journal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import LogUnsupportedError
from kinlog.schemas.journal_columns import journal_schema
from kinlog.schemas.orders import RolloutOrder


def written(directory: Path, *groups: int, ended: bool = True) -> str:
    """A segment with one row of generation 0, attempt 1 of each group. Returns its name."""
    before = set(LocalStore().names(directory))
    journal = Journal(
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


def dropped(keep: JournalKeeper, needed: frozenset[Attempt] = frozenset()) -> list[str]:
    keep.note_ended()
    return keep.drop_unneeded(needed)


def test_segment_goes_once_none_of_its_rows_is_needed(tmp_path: Path):
    keep = keeper(tmp_path)
    first, second = written(tmp_path / "journal", 1, 2), written(tmp_path / "journal", 3)
    assert dropped(keep, frozenset({(2, 0, 1), (3, 0, 2)})) == [second]
    assert LocalStore().names(tmp_path / "journal") == [first]
    assert dropped(keep) == [first]
    assert LocalStore().names(tmp_path / "trash") == []


def test_all_that_dead_lives_left_goes_at_once_and_nothing_of_this_one(tmp_path: Path):
    journal = tmp_path / "journal"
    written(journal, 1)
    torn = written(journal, 2, ended=False)
    (journal / torn).write_bytes((journal / torn).read_bytes()[:-3])
    keep = keeper(tmp_path)
    own = written(journal, 3, ended=False)
    keep.drop_all()
    assert LocalStore().names(journal) == [own]
    keep.drop_all()


def test_segment_that_is_being_written_stays(tmp_path: Path):
    keep = keeper(tmp_path)
    written(tmp_path / "journal", 1, ended=False)
    assert dropped(keep) == []


def test_segment_that_ends_after_it_was_decided_what_is_needed_stays(tmp_path: Path):
    keep = keeper(tmp_path)
    old = written(tmp_path / "journal", 1)
    keep.note_ended()
    # An attempt that begins now is not among the needed ones, and its rows may end a segment before anything is removed.
    written(tmp_path / "journal", 2)
    assert keep.drop_unneeded(frozenset()) == [old]


def test_segment_of_an_earlier_life_goes_although_nobody_ended_it(tmp_path: Path):
    name = written(tmp_path / "journal", 1, ended=False)
    assert dropped(keeper(tmp_path)) == [name]


def test_damaged_segment_stays_for_people_to_look_at(tmp_path: Path):
    name = written(tmp_path / "journal", 1, 2, 3)
    path = tmp_path / "journal" / name
    broken = bytearray(path.read_bytes())
    broken[len(broken) // 2] ^= 1
    path.write_bytes(broken)
    assert dropped(keeper(tmp_path)) == []


def test_segment_of_a_newer_kinlog_stays_and_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as newer_kinlog:
        newer_kinlog.setattr("kinlog.lineage.journal.JOURNAL_FEATURE", "row_journal_of_tomorrow")
        newer = written(tmp_path / "journal", 1)
    with pytest.raises(LogUnsupportedError):
        scan_journal(LocalStore(), tmp_path / "journal" / newer)
    ours = written(tmp_path / "journal", 2)
    assert dropped(keeper(tmp_path)) == [ours]


def test_other_files_are_nobodys_business(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "notes.txt").write_text("mine")
    assert dropped(keeper(tmp_path)) == []


async def test_segment_that_ends_while_a_checkpoint_lets_go_of_others_stays(tmp_path: Path):
    config = run_config(trainer__max_steps=4)
    life = await first_life(tmp_path, config, JournalledParts(tmp_path))
    keeper, late = life.controller._journal, []
    drop = keeper.drop_unneeded

    def drop_later(needed: frozenset[Attempt]) -> list[str]:
        # Meanwhile a worker ends a segment, with rows of an attempt that began a moment ago.
        journal = journal_in(life.directory, clock_us=10 + len(late))
        journal.append(journal_rows(sealed_now))
        journal.close()
        late.append(max(p.name for p in life.directory.journal.iterdir()))
        dropped = drop(needed)
        assert late[-1] not in dropped
        return dropped

    sealed_now = life.parts.pool.seal(
        RolloutOrder(group_id=999, generation=0, attempt=1, prompt=prompt_ref(0), seed=0)
    )
    keeper.drop_unneeded = drop_later  # type: ignore[method-assign]
    await life.train()
    assert len(late) == 2
