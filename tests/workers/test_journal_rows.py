"""What a worker stages comes back from the row journal bit for bit, however the worker died."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_stores import FaultyStore

from kinlog.lineage.journal import Journal, journal_batches, journal_identities, scan_journal
from kinlog.lineage.segment import SegmentEnd
from kinlog.lineage.store import LocalStore, Store
from kinlog.schemas.errors import LogDamagedError, LogWriteError
from kinlog.workers.journal_rows import rows_from_batch, rows_to_batch
from kinlog.workers.rows import StagedRow, row_digest


def row(group: int, *, prompt: int = 3, completion: int = 5, call: int = 0, token: int = 7) -> StagedRow:
    chance = torch.Generator().manual_seed(group * 31 + call)
    return StagedRow(
        group_id=group,
        generation=group % 4,
        attempt=1,
        call=call,
        token_ids=torch.full((prompt + completion,), token, dtype=torch.int64),
        prompt_tokens=prompt,
        logprobs=-torch.rand(completion, generator=chance),
        weight_versions=torch.full((completion,), 2, dtype=torch.int32),
    )


def journal_in(directory: Path, *, segment_bytes: int = 1 << 20, store: Store | None = None) -> Journal:
    return Journal(
        store or LocalStore(),
        directory,
        writer_version="0",
        segment_bytes=segment_bytes,
        clock_us=lambda: 1,
    )


def read_back(directory: Path) -> list[StagedRow]:
    return [
        found
        for path in sorted(directory.iterdir())
        for batch in journal_batches(scan_journal(LocalStore(), path))
        for found in rows_from_batch(batch)
    ]


def digests(rows: list[StagedRow]) -> list[bytes]:
    return [row_digest(each) for each in rows]


_LENGTHS = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(st.lists(_LENGTHS, min_size=1, max_size=4), min_size=1, max_size=5))
@settings(max_examples=25)
def test_rows_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, batches):
    directory = tmp_path_factory.mktemp("journal")
    journal = journal_in(directory)
    staged = []
    for place, lengths in enumerate(batches):
        rows = [row(place, prompt=p, completion=c, call=call) for call, (p, c) in enumerate(lengths)]
        journal.append(rows_to_batch(rows))
        staged += rows
    assert digests(read_back(directory)) == digests(staged)


def test_rows_are_readable_before_the_segment_is_ended_and_after(tmp_path: Path):
    journal = journal_in(tmp_path)
    journal.append(rows_to_batch([row(1), row(2)]))
    (path,) = tmp_path.iterdir()
    live = scan_journal(LocalStore(), path)
    assert (live.scan.end, live.closed) == (SegmentEnd.LIVE, False)
    assert list(journal_identities(live)) == [
        (1, 1, 1, 0, row_digest(row(1))),
        (2, 2, 1, 0, row_digest(row(2))),
    ]
    journal.close()
    assert scan_journal(LocalStore(), path).closed


def test_segments_are_ended_at_their_size_and_never_shared(tmp_path: Path):
    for _ in range(2):
        journal = journal_in(tmp_path, segment_bytes=4096)
        for group in range(6):
            journal.append(rows_to_batch([row(group, completion=300)]))
        journal.close()
    assert len(list(tmp_path.iterdir())) > 4
    assert len(read_back(tmp_path)) == 12


def test_rollout_of_131072_tokens_is_journalled(tmp_path: Path):
    long = row(1, prompt=1072, completion=130_000, token=151_935)
    journal = journal_in(tmp_path)
    journal.append(rows_to_batch([long]))
    assert digests(read_back(tmp_path)) == [row_digest(long)]


def test_torn_tail_costs_only_what_was_never_reported(tmp_path: Path):
    journal = journal_in(tmp_path)
    journal.append(rows_to_batch([row(1)]))
    (path,) = tmp_path.iterdir()
    reported = path.stat().st_size
    journal.append(rows_to_batch([row(2)]))
    whole = path.read_bytes()
    for cut in range(reported, len(whole), 7):
        path.write_bytes(whole[:cut])
        assert digests(read_back(tmp_path)) == digests([row(1)])


def test_damage_to_what_was_durable_is_refused_by_name_and_never_read(tmp_path: Path):
    journal = journal_in(tmp_path)
    for group in (1, 2, 3):
        journal.append(rows_to_batch([row(group)]))
    journal.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    chance = random.Random(7)
    for _ in range(200):
        broken = bytearray(whole)
        broken[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        with pytest.raises(LogDamagedError, match=path.name):
            scan_journal(LocalStore(), path)


def test_token_that_does_not_fit_is_refused_and_not_bent():
    with pytest.raises(ValueError, match="token ids are 0 to"):
        rows_to_batch([row(1, token=2**31)])


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), MemoryError()])
def test_failed_write_fails_everything_after_it(tmp_path: Path, failure: Exception):
    store = FaultyStore()
    journal = journal_in(tmp_path, store=store)
    journal.append(rows_to_batch([row(1)]))

    def fail(operation: str, path: Path) -> None:
        raise failure

    store.before = fail
    for _ in range(2):
        with pytest.raises(LogWriteError, match="Nothing that was reported is lost"):
            journal.append(rows_to_batch([row(2)]))
        store.before = lambda operation, path: None
    assert digests(read_back(tmp_path)) == digests([row(1)])
