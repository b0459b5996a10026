"""What the data plane lost comes back from the journals of all workers of all lives, and nothing but what was sealed."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from kinlog.lineage.journal import Journal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import DataPlaneError
from kinlog.schemas.orders import PutBack
from kinlog.schemas.reasons import Partition, Validity
from kinlog.schemas.receipts import ModelCall, Receipt
from kinlog.schemas.rows import RowTag
from kinlog.workers.finalizer import build_canonical_row
from kinlog.workers.journal_rows import rows_to_batch
from kinlog.workers.put_back import put_rows_back
from kinlog.workers.rows import StagedRow, row_digest


def row(group: int, *, attempt: int = 1, prompt: int = 3, completion: int = 5, token: int = 7) -> StagedRow:
    return StagedRow(
        group_id=group,
        generation=0,
        attempt=attempt,
        call=0,
        token_ids=torch.full((prompt + completion,), token, dtype=torch.int64),
        prompt_tokens=prompt,
        logprobs=torch.full((completion,), -0.25),
        weight_versions=torch.full((completion,), 2, dtype=torch.int32),
    )


def sealed(*rows: StagedRow) -> dict[str, RowTag]:
    """What lineage says of rows."""
    return {
        r.key: RowTag(
            group_id=r.group_id,
            generation=r.generation,
            attempt=r.attempt,
            call=r.call,
            digest=row_digest(r),
        )
        for r in rows
    }


class Staging:
    """A data plane in which a key that was begun to be put refuses to be put again."""

    def __init__(self, *half_put: str) -> None:
        self.rows: dict[str, StagedRow | None] = dict.fromkeys(half_put)

    async def clear(self, partition: Partition, keys: Iterable[str], cut: object) -> int:
        assert partition is Partition.STAGING
        return len([self.rows.pop(key) for key in keys if key in self.rows])

    async def put_staged(self, rows: Sequence[StagedRow]) -> None:
        for one in rows:
            if one.key in self.rows:
                raise DataPlaneError(f"{one.key} is there already")
            self.rows[one.key] = one

    @property
    def digests(self) -> dict[str, bytes]:
        return {key: row_digest(found) for key, found in self.rows.items() if found is not None}


def worker_staged(directory: Path, *rows: StagedRow, clock_us: int = 1, ended: bool = False) -> None:
    """Rows that one process of some life has staged, one after the other."""
    journal = Journal(
        LocalStore(), directory, writer_version="0", segment_bytes=1 << 16, clock_us=lambda: clock_us
    )
    for one in rows:
        journal.append(rows_to_batch([one]))
    if ended:
        journal.close()


async def back(
    directory: Path, *rows: StagedRow, staging: Staging | None = None
) -> tuple[PutBack, dict[str, bytes]]:
    staging = staging or Staging()
    return await put_rows_back(staging, LocalStore(), directory, sealed(*rows)), staging.digests


def expected(*rows: StagedRow) -> dict[str, bytes]:
    return {one.key: row_digest(one) for one in rows}


async def test_rows_come_back_from_all_workers_of_all_lives_whatever_their_clocks_said(tmp_path: Path):
    rows = [row(group, token=group) for group in range(6)]
    worker_staged(tmp_path, rows[0], rows[1], clock_us=9, ended=True)
    worker_staged(tmp_path, rows[2], clock_us=9)
    worker_staged(tmp_path, rows[3], rows[4], clock_us=2)  # a later life, on a machine whose clock is behind
    put_back, found = await back(tmp_path, *rows[:4], rows[5])
    assert found == expected(*rows[:4])
    assert (put_back.num_rows, put_back.completion_tokens) == (4, 20)
    assert put_back.missing == (rows[5].key,)
    assert put_back.damaged == ()


async def test_row_that_is_not_the_sealed_one_is_not_put_back_under_its_key(tmp_path: Path):
    worker_staged(tmp_path, row(1, token=8))
    put_back, found = await back(tmp_path, row(1, token=7))
    assert (put_back.num_rows, found, put_back.missing) == (0, {}, (row(1).key,))
    # The same content of another attempt is another row.
    put_back, _ = await back(tmp_path, row(1, token=8, attempt=2))
    assert put_back.num_rows == 0


async def test_sealed_row_is_found_also_when_another_was_journalled_under_its_key_before(tmp_path: Path):
    worker_staged(tmp_path, row(1, token=8), row(1, token=7), row(1, token=7))
    put_back, found = await back(tmp_path, row(1, token=7))
    assert (put_back.num_rows, found) == (1, expected(row(1, token=7)))


async def test_key_of_a_put_that_was_cut_short_is_cleared_first(tmp_path: Path):
    worker_staged(tmp_path, row(1))
    _, found = await back(tmp_path, row(1), staging=Staging(row(1).key))
    assert found == expected(row(1))


async def test_damaged_segment_is_named_and_the_others_are_put_back_from(tmp_path: Path):
    worker_staged(tmp_path, row(1), row(2), row(3), clock_us=1, ended=True)
    worker_staged(tmp_path, row(4), clock_us=2)
    first = min(tmp_path.iterdir())
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    put_back, found = await back(tmp_path, row(1), row(4))
    assert found == expected(row(4))
    assert put_back.missing == (row(1).key,)
    (problem,) = put_back.damaged
    assert first.name in problem


async def test_run_without_a_journal_gets_nothing_back(tmp_path: Path):
    put_back, found = await back(tmp_path / "none", row(1))
    assert (put_back, found) == (PutBack(missing=(row(1).key,)), {})


@pytest.mark.parametrize("completion", [1, 131_072 - 3])
async def test_rollout_of_up_to_131072_tokens_comes_back_and_is_finalized_as_if_nothing_had_happened(
    tmp_path: Path, completion: int
):
    staged = row(1, completion=completion, token=151_935)
    worker_staged(tmp_path, staged)
    staging = Staging()
    put_back = await put_rows_back(staging, LocalStore(), tmp_path, sealed(staged))
    assert (put_back.num_rows, put_back.completion_tokens) == (1, completion)
    came_back = staging.rows[staged.key]
    assert came_back is not None
    receipt = Receipt((ModelCall(0, -1, 3, completion, 2, 2, row_digest(staged)),))
    digests = {
        row_digest(
            build_canonical_row(
                group_id=1,
                generation=0,
                attempt=1,
                draw_index=0,
                receipt=receipt,
                staged={0: one},
                prompt_token_ids=(),
                validity=Validity.VALID,
                raw_reward=1.0,
                shaped_reward=1.0,
            )
        )
        for one in (staged, came_back)
    }
    assert len(digests) == 1
