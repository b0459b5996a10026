"""A restart's plan beside what the naive run says it should be."""

from kinlog_builders import digest_of
from kinlog_naive_run import NaiveRun, Row, Verdict

from kinlog.replay.recovery.plan import RecoveryPlan
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import NO_CALL, RowTag


def row_tag(row: Row, held: str) -> RowTag:
    digest = digest_of("canonical", *row) if len(row) == 3 else digest_of("row", *row)
    if held == "half":
        return RowTag(done=False, group_id=-1, generation=-1, attempt=-1, call=-1, digest=b"")
    return RowTag(
        group_id=row[0],
        generation=row[1],
        attempt=row[2],
        call=row[3] if len(row) == 4 else NO_CALL,
        digest=digest if held == "good" else b"another content.",
    )


def row_key(row: Row) -> str:
    return staging_key(*row) if len(row) == 4 else canonical_key(*row)


def assert_as_judged(plan: RecoveryPlan, verdict: Verdict, naive: NaiveRun, plane: dict[Row, str]) -> None:
    """The plan is what the naive run comes to."""
    assert {drop.group_id for drop in plan.dropped} == verdict.dropped
    assert all(drop.reason is Reason.STALE for drop in plan.dropped)
    unfinalized = {failed.group_id: failed.reason for failed in plan.finalize_failed}
    assert len(unfinalized) == len(plan.finalize_failed)
    assert set(unfinalized) == set(verdict.unfinalized)
    assert all(reason in verdict.unfinalized[number] for number, reason in unfinalized.items())
    redone = {(event.group_id, event.generation): event for event in plan.superseded}
    assert len(redone) == len(plan.superseded)
    assert set(redone) == set(verdict.redone)
    for who, event in redone.items():
        assert event.reason in verdict.redone[who]
        assert event.attempt == naive.groups[who[0]].siblings[who[1]].attempt
    for number in {number for number, _ in redone}:
        reasons = [event.reason for (of, _), event in redone.items() if of == number]
        assert any(reason is not Reason.COHORT_RESTART for reason in reasons)
    assert {(kept.group_id, kept.generation) for kept in plan.reused} == verdict.reused
    assert set(plan.refinalized) == verdict.refinalized
    assert set(plan.finalized) == verdict.finalized
    assert set(plan.waiting) == verdict.waiting
    tokens = {who: 5 * naive.groups[who[0]].siblings[who[1]].calls for who in (*verdict.reused, *redone)}
    assert plan.tokens_saved == sum(tokens[who] for who in verdict.reused)
    assert plan.lost_tokens == sum(tokens[who] for who in redone)
    found = {
        key: retired
        for retired, by_partition in ((True, plan.retired), (False, plan.unreferenced))
        for keys in by_partition.values()
        for key in keys
    }
    applied = set(naive.in_status("applied"))
    assert found == {
        row_key(row): row[0] in applied and plane[row] != "half"
        for row in plane
        if row not in verdict.kept_rows
    }
