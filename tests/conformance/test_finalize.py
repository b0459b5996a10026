"""Finalize: ownership of a group's rows moves once, and an unknown outcome is driven again to exactly N rows."""

import asyncio

import pytest
from kinlog_bench import Bench
from kinlog_conformance import (
    COHORT,
    Given,
    Like,
    driven,
    finalize_answered,
    finalize_started,
    finalized,
    finalizer_loses_answers,
    finalizer_rejects,
    finalizing,
    generating,
    ready,
    restarted,
    sealed,
)
from kinlog_interleavings import ticks

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError, WorkerLostError
from kinlog.schemas.orders import FinalizeOrder
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import canonical_key


def three_rows(attempt: int = 1) -> set[str]:
    return {canonical_key(0, g, attempt) for g in range(3)}


def test_rows_move_from_the_siblings_to_the_buffer_at_once():
    done = (
        Given(ready(siblings=3))
        .when(driven(0))
        .then(
            events=[
                e.FinalizeStarted(group_id=0),
                Like(e.GroupFinalized, group_id=0, valid_fraction=1.0),
                Like(e.RowsCleared, partition=Partition.STAGING, reason=Reason.FINALIZED, num_rows=6),
            ],
            state={0: GroupPhase.FINALIZED},
        )
    )
    assert set(done.bench.data_plane.rows[Partition.TRAINING]) == three_rows()
    assert done.bench.data_plane.rows[Partition.STAGING] == {}


@pytest.mark.parametrize("again", [finalize_started(0), finalize_answered(0)], ids=["started", "answered"])
def test_ownership_that_has_moved_does_not_move_again(again):
    Given(finalized()).when(again).then(raises=(TransitionError, "found finalized"))


def test_group_is_not_finalized_before_all_siblings_are_sealed():
    Given(generating(), sealed(0, 1)).when(finalize_started(0)).then(
        raises=(TransitionError, "expected phase finalizing or ready, found generating")
    )


@pytest.mark.parametrize("lost", [1, 2])
def test_lost_answers_are_driven_again_to_each_row_once(lost: int):
    done = Given(ready(siblings=3), finalizer_loses_answers(lost)).when(driven(0))
    done.then(
        events=[*[e.FinalizeStarted(group_id=0)] * (lost + 1), Like(e.GroupFinalized, group_id=0)],
        only=(e.FinalizeStarted, e.GroupFinalized),
    )
    (event,) = done.of(e.GroupFinalized)
    assert len(event.rows) == 3
    assert set(done.bench.data_plane.rows[Partition.TRAINING]) == three_rows()


def test_finalize_of_unknown_outcome_is_driven_again_after_a_restart():
    done = Given(finalizing(siblings=3)).when(restarted(tail_rows=True), driven(0))
    done.then(
        events=[e.FinalizeStarted(group_id=0), Like(e.GroupFinalized, group_id=0)],
        only=(e.AttemptSuperseded, e.FinalizeStarted, e.GroupFinalized),
    )
    assert set(done.bench.data_plane.rows[Partition.TRAINING]) == three_rows()


def test_rows_that_a_killed_finalizer_had_put_are_kept_for_the_next_drive():
    done = Given(ready(siblings=3), finalizer_loses_answers(1)).when(
        finalize_started(0), calling_the_finalizer_in_vain, restarted(tail_rows=True)
    )
    assert set(done.then().bench.data_plane.rows[Partition.TRAINING]) == three_rows()
    again = done.when(driven(0)).then(state={0: GroupPhase.FINALIZED})
    assert set(again.bench.data_plane.rows[Partition.TRAINING]) == three_rows()


async def calling_the_finalizer_in_vain(bench: Bench) -> None:
    """The call was sent, and its answer was lost with the controller."""
    group = bench.p.groups[0]
    results = tuple(sibling.sealed for sibling in group.siblings.values() if sibling.sealed is not None)
    order = FinalizeOrder(group_id=0, prompt=group.prompt, siblings=results)
    with pytest.raises(WorkerLostError):
        await bench.finalizer.finalize(order)


def test_finalizer_is_called_outside_of_any_cut():
    async def checkpoint_while_the_finalizer_hangs(bench: Bench) -> None:
        hangs, finalize = asyncio.Event(), bench.finalizer.finalize

        async def hanging(order):
            await hangs.wait()
            return await finalize(order)

        bench.finalizer.finalize = hanging
        task = asyncio.create_task(bench.driver.drive(0))
        await ticks()
        assert bench.p.groups[0].phase is GroupPhase.FINALIZING
        async with bench.runtime.barrier.exclusive("checkpoint"):
            hangs.set()  # it was granted although the call has not come back
        await task

    Given(ready()).when(checkpoint_while_the_finalizer_hangs).then(state={0: GroupPhase.FINALIZED})


@pytest.mark.parametrize("reason", [Reason.ROWS_MISSING, Reason.DIGEST_MISMATCH])
def test_rejected_sibling_is_generated_again_and_the_others_are_not(reason: Reason):
    Given(ready(siblings=3), finalizer_rejects(0, 1, reason)).when(driven(0)).then(
        events=[
            Like(e.FinalizeFailed, group_id=0, reason=reason),
            Like(e.AttemptSuperseded, generation=1, attempt=1, reason=reason),
            Like(e.SiblingDispatched, generation=1, attempt=2),
            Like(e.GroupFinalized, group_id=0),
        ],
        only=(e.FinalizeFailed, e.AttemptSuperseded, e.SiblingDispatched, e.GroupFinalized),
        state={0: {"attempts": (1, 2, 1)}},
    )


def test_rejected_sibling_of_a_cohort_redoes_the_cohort():
    Given(ready(siblings=3, granularity=COHORT), finalizer_rejects(0, 1, Reason.ROWS_MISSING)).when(
        driven(0)
    ).then(state={0: {"phase": GroupPhase.FINALIZED, "attempts": (2, 2, 2)}})


def test_finalizer_that_never_answers_has_its_group_parked_in_one_life():
    done = Given(ready(siblings=3), finalizer_loses_answers(99), rollout__max_infrastructure_retries=2).when(
        driven(0)
    )
    done.then(
        events=[*[e.FinalizeStarted(group_id=0)] * 3, Like(e.GroupParked, reason=Reason.RETRY_BUDGET)],
        only=(e.FinalizeStarted, e.GroupParked),
    )
    assert done.bench.data_plane.rows == {Partition.STAGING: {}, Partition.TRAINING: {}}


def test_group_whose_finalize_is_rejected_in_every_life_is_parked():
    """A staging partition that loses this group's rows again and again, with a crash after each."""
    now = Given(ready(siblings=2), rollout__max_infrastructure_retries=2).when()
    for _ in range(6):
        now = now.when(finalizer_rejects(0, 1, Reason.ROWS_MISSING), rejected_once, restarted(tail_rows=True))
    now.then(state={0: GroupPhase.PARKED})


async def rejected_once(bench: Bench) -> None:
    """A life that is killed when a finalize was rejected and the sibling generated again."""
    task = asyncio.create_task(bench.driver.drive(0))

    def is_time() -> bool | None:
        group = bench.p.groups[0]
        again = bool(bench.events(e.FinalizeFailed)) and group.all_sealed
        return True if again or not group.live else None

    await bench.runtime.changes.wait_for(is_time)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
