"""What the data plane should hold follows from lineage alone."""

from kinlog_builders import Story
from msgspec.structs import replace

from kinlog.replay.recovery.inventory import (
    RowProblem,
    canonical_rows,
    compare_rows,
    expected_inventory,
    staged_rows,
)
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import NO_CALL


def test_sealed_siblings_stand_on_their_staged_rows_and_finalized_groups_on_canonical_ones():
    told = Story()
    sealed, running, done, parked = told.generating(), told.generating(), told.finalized(), told.ready()
    told.seal(sealed, 1)
    told.commit(e.GroupParked(group_id=parked, reason=Reason.RETRY_BUDGET))
    inventory = expected_inventory(told.p)
    assert set(inventory.staging) == {staging_key(sealed, 1, 1, call) for call in (0, 1)}
    assert set(inventory.training) == {canonical_key(done, g, 1) for g in (0, 1)}
    assert all(tag.group_id != running for tag in inventory.staging.values())


def test_keys_carry_the_attempt_that_was_sealed():
    told = Story()
    group = told.generating()
    told.supersede(group, 0)
    told.dispatch(group, 0)
    told.seal(group)
    told.start_finalize(group)
    told.finish_finalize(group)
    staged = staged_rows(told.group(group), told.group(group).siblings[0])
    assert set(staged) == {staging_key(group, 0, 2, call) for call in (0, 1)}
    rows = canonical_rows(told.group(group))
    assert {(t.generation, t.attempt, t.call) for t in rows.values()} == {(0, 2, NO_CALL), (1, 1, NO_CALL)}


def test_placeholder_has_no_rows():
    told = Story()
    group = told.generating()
    told.seal(group, 0, placeholder=True)
    assert staged_rows(told.group(group), told.group(group).siblings[0]) == {}


def test_rows_that_are_missing_half_put_or_different_are_named_with_the_reason():
    told = Story()
    told.finalized(siblings=4)
    expected = expected_inventory(told.p).training
    gone, changed, half, kept = sorted(expected)
    rows = {
        changed: replace(expected[changed], digest=b"x" * 16),
        half: replace(expected[half], done=False),
        kept: expected[kept],
        "stranger": expected[kept],
    }
    assert compare_rows(expected, rows) == (
        RowProblem(gone, Reason.ROWS_MISSING),
        RowProblem(changed, Reason.DIGEST_MISMATCH),
        RowProblem(half, Reason.ROWS_MISSING),
    )
    assert compare_rows(expected, expected) == ()
