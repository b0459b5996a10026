"""Whole runs in which something fails: attempts, budgets, finalizes, rows that cannot be cleared."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from kinlog_fake_parts import FakeDataset, FakeParts
from kinlog_journal_parts import JournalledParts
from kinlog_lives import (
    assert_conserved,
    events_of,
    first_life,
    next_life,
    run_config,
)

from kinlog.schemas import events as e
from kinlog.schemas.errors import (
    DataPlaneError,
    LogWriteError,
    RolloutsFailError,
)
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import FinalizeRejected, RolloutOrder
from kinlog.schemas.reasons import Granularity, Partition, Reason, Validity


async def test_prompt_group_discards_every_result_of_an_attempt_in_which_one_failed(tmp_path: Path):
    config = run_config(rollout_recovery__task_granularity_overrides={"even": Granularity.PROMPT_GROUP})
    parts = FakeParts()
    parts.prepare = lambda parts: (
        [parts.pool.fail(group, 1, 1, Reason.INFRASTRUCTURE_FAILURE) for group in range(8)] and None
    )
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    whole = {
        event.group_id
        for event in events_of(tmp_path / "run", e.GroupReserved)
        if event.granularity is Granularity.PROMPT_GROUP
    }
    assert whole
    for group in whole:
        orders = Counter((o.generation, o.attempt) for o in life.parts.pool.calls if o.group_id == group)
        assert set(orders) == {(g, a) for g in range(3) for a in (1, 2)}
    for group in set(range(8)) - whole:
        generated = {(o.generation, o.attempt) for o in life.parts.pool.calls if o.group_id == group}
        assert generated == {(0, 1), (1, 1), (1, 2), (2, 1)}
    reasons = Counter(event.reason for event in events_of(tmp_path / "run", e.AttemptSuperseded))
    assert reasons[Reason.INFRASTRUCTURE_FAILURE] == 8
    assert reasons[Reason.COHORT_RESTART] == 2 * len(whole)
    staged = list(life.parts.data_plane.rows[Partition.STAGING])
    assert staged == []


async def test_late_result_of_a_timed_out_attempt_is_rejected_and_recorded(tmp_path: Path):
    config = run_config(rollout__sibling_timeout_s=0.05)
    parts = FakeParts()
    gates: list[asyncio.Event] = []
    parts.prepare = lambda parts: gates.append(parts.pool.hold(0, 1, 1))
    life = await first_life(tmp_path / "run", config, parts)
    await life.train_until(lambda p: p.superseded.get(Reason.TIMEOUT, 0) == 1)
    gates[0].set()
    await life.finish()
    rejected = events_of(tmp_path / "run", e.LateResultRejected)
    assert [(r.group_id, r.generation, r.attempt) for r in rejected] == [(0, 1, 1)]
    sealed = [
        s.attempt
        for s in events_of(tmp_path / "run", e.SiblingSealed)
        if (s.group_id, s.generation) == (0, 1)
    ]
    assert sealed == [2]
    assert life.parts.data_plane.rows[Partition.STAGING] == {}


async def test_lost_worker_costs_one_attempt(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = lambda parts: parts.pool.lose_worker(1, 0, 1)
    life = await (await first_life(tmp_path / "run", parts=parts)).train()
    assert life.p.superseded == {Reason.WORKER_LOST: 1}
    assert_conserved(life.p)


async def test_worker_whose_row_journal_fails_ends_the_run_and_costs_no_sealed_sibling(tmp_path: Path):
    parts = JournalledParts(tmp_path / "run")

    def fill_the_disk(parts: FakeParts) -> None:
        def answer(order: RolloutOrder) -> SiblingSealed:
            raise LogWriteError("writing the row journal failed: No space left on device")

        parts.pool.answers[5, 2, 1] = answer

    parts.prepare = fill_the_disk
    life = await first_life(tmp_path / "run", parts=parts)
    with pytest.raises(LogWriteError, match="the row journal failed: No space left"):
        await life.controller.run()
    await life.controller.close(cleanly=False)
    sealed = {(s.group_id, s.generation) for s in events_of(tmp_path / "run", e.SiblingSealed)}
    assert sealed
    again = await next_life(tmp_path / "run", parts=JournalledParts(tmp_path / "run"))
    await again.train()
    assert sealed.isdisjoint(again.parts.pool.attempts())
    assert_conserved(again.p)


async def test_spent_retry_budget_parks_the_group_and_training_goes_on(tmp_path: Path):
    config = run_config(rollout__max_data_retries=1)
    parts = FakeParts()
    parts.prepare = lambda parts: [parts.pool.fail(1, 0, a, Reason.DATA_FAILURE) for a in (1, 2)] and None
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.train_step == 4
    assert life.p.parked_total == 1
    assert life.p.groups[1].parked_reason is Reason.RETRY_BUDGET
    assert_conserved(life.p)


async def test_lost_finalize_answer_is_driven_again_and_gives_each_row_once(tmp_path: Path):
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        parts.finalizer.lose_answers = 2

    parts.prepare = script
    life = await (await first_life(tmp_path / "run", parts=parts)).train()
    finalized = Counter(event.group_id for event in events_of(tmp_path / "run", e.GroupFinalized))
    assert set(finalized.values()) == {1}
    assert len(life.parts.finalizer.calls) == 8 + 2


async def test_rejected_finalize_redoes_the_sibling_that_is_no_good(tmp_path: Path):
    parts = FakeParts()
    rejected = FinalizeRejected(group_id=2, generation=1, reason=Reason.DIGEST_MISMATCH, detail="scripted")
    parts.prepare = lambda parts: parts.finalizer.reject.update({2: rejected})
    life = await (await first_life(tmp_path / "run", parts=parts)).train()
    generated = sorted((o.generation, o.attempt) for o in life.parts.pool.calls if o.group_id == 2)
    assert generated == [(0, 1), (1, 1), (1, 2), (2, 1)]
    assert life.p.superseded == {Reason.DIGEST_MISMATCH: 1}


async def test_group_with_too_few_valid_siblings_is_dropped_with_its_reason(tmp_path: Path):
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        for generation in (0, 1):
            parts.pool.answers[3, generation, 1] = lambda order: parts.pool.seal(
                order, validity=Validity.FAILED
            )

    parts.prepare = script
    config = run_config(rollout__invalid_siblings="keep_masked")
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.dropped == {Reason.LOW_VALID_FRACTION: 1}
    assert life.parts.data_plane.rows[Partition.STAGING] == {}
    assert_conserved(life.p)


async def test_result_that_is_no_example_is_generated_again_within_the_budget(tmp_path: Path):
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        for attempt in (1, 2, 3):
            parts.pool.answers[3, 0, attempt] = lambda order: parts.pool.seal(
                order, validity=Validity.POISONED
            )
        parts.pool.answers[2, 0, 1] = lambda order: parts.pool.seal(order, validity=Validity.FAILED)

    parts.prepare = script
    config = run_config(rollout__max_data_retries=2)
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    sealed = {(s.group_id, s.generation): s for s in events_of(tmp_path / "run", e.SiblingSealed)}
    assert (sealed[2, 0].attempt, sealed[2, 0].validity) == (2, Validity.VALID)
    # The budget is spent: kept, so that the group has its N rows, and masked, so that it teaches nothing.
    assert (sealed[3, 0].attempt, sealed[3, 0].validity) == (3, Validity.POISONED)
    assert life.p.superseded == {Reason.DATA_FAILURE: 3}
    assert life.parts.data_plane.rows[Partition.STAGING] == {}
    assert_conserved(life.p)


@pytest.mark.parametrize("granularity", list(Granularity))
async def test_spent_budget_puts_a_placeholder_in_the_siblings_place_when_partial_groups_are_wanted(
    tmp_path: Path, granularity: Granularity
):
    parts = FakeParts()
    parts.prepare = lambda parts: [parts.pool.fail(1, 0, a, Reason.DATA_FAILURE) for a in (1, 2)] and None
    config = run_config(
        rollout__max_data_retries=1,
        rollout__spent_retry_budget="train_partial",
        rollout_recovery__default_granularity=granularity,
    )
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    placeholders = [
        s for s in events_of(tmp_path / "run", e.SiblingSealed) if s.validity is Validity.PLACEHOLDER
    ]
    if granularity is Granularity.PROMPT_GROUP:  # whole or nothing
        assert placeholders == []
        assert life.p.parked_total == 1
    else:
        assert [(s.group_id, s.generation, s.attempt, s.receipt) for s in placeholders] == [(1, 0, 3, None)]
        assert any(1 in event.group_ids for event in events_of(tmp_path / "run", e.StepApplied))
        (finalized,) = (f for f in events_of(tmp_path / "run", e.GroupFinalized) if f.group_id == 1)
        assert len(finalized.rows) == 3
        assert finalized.valid_fraction == pytest.approx(2 / 3)
    assert_conserved(life.p)


async def test_spent_budget_drops_the_group_when_that_is_wanted(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = lambda parts: [parts.pool.fail(1, 0, a, Reason.DATA_FAILURE) for a in (1, 2)] and None
    config = run_config(rollout__max_data_retries=1, rollout__spent_retry_budget="drop")
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.dropped == {Reason.RETRY_BUDGET: 1}
    assert life.p.parked_total == 0
    assert life.parts.data_plane.rows[Partition.STAGING] == {}
    assert_conserved(life.p)


async def test_spent_budget_stops_the_run_when_that_is_configured(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = lambda parts: parts.pool.fail(1, 0, 1, Reason.DATA_FAILURE)
    config = run_config(rollout__max_data_retries=0, rollout__spent_retry_budget="fail_run")
    life = await first_life(tmp_path / "run", config, parts)
    with pytest.raises(RolloutsFailError, match="group 1 is parked"):
        await life.controller.run()
    await life.kill()
    # Group 1 stays aside; the run goes on without it.
    resumed = await (await next_life(tmp_path / "run", config)).train()
    assert resumed.p.parked_total == 1
    assert resumed.p.train_step == 4


async def test_run_in_which_no_rollout_ever_succeeds_is_stopped_before_it_eats_the_dataset(tmp_path: Path):
    parts = FakeParts(FakeDataset(size=1000))
    parts.prepare = lambda parts: (
        [parts.pool.fail(group, 0, 1, Reason.DATA_FAILURE) for group in range(100)]
        and [parts.pool.hold(group, g, 1) for group in range(100) for g in (1, 2)]
        and None
    )
    life = await first_life(tmp_path / "run", run_config(rollout__max_data_retries=0), parts)
    with pytest.raises(RolloutsFailError, match="no rollout has succeeded yet"):
        await life.controller.run()
    assert 16 <= life.p.parked_total < 30
    await life.kill()


async def test_rows_that_could_not_be_cleared_are_cleared_the_next_time_and_end_nothing(tmp_path: Path):
    parts = FakeParts()
    life = await first_life(tmp_path / "run", parts=parts)
    refusals = iter([True, True, True])

    def refuse(partition: Partition, keys: list[str]) -> None:
        if next(refusals, False):
            raise DataPlaneError("scripted")

    parts.data_plane.on_clear = refuse
    await life.train()
    assert parts.data_plane.rows[Partition.STAGING] == {}
