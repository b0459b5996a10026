"""Restored rows: nothing is dispatched before every row that lineage relies on was looked at."""

import pytest
from kinlog_conformance import (
    Given,
    Like,
    checkpointed,
    finalized,
    generating,
    living,
    parked,
    placeholder,
    ready,
    restarted,
    sealed,
    trained,
)

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import RowsMissingError
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import RowTag

REDISPATCH = {"rollout_recovery__missing_rows": "redispatch"}
STAGED = staging_key(0, 1, 1, 0)
CANONICAL = canonical_key(0, 1, 1)


@pytest.mark.parametrize("history", [ready(), finalized()], ids=["staged", "canonical"])
@pytest.mark.parametrize(("harm", "reason"), [("lose", "rows_missing"), ("alter", "digest_mismatch")])
def test_promised_row_that_is_gone_or_another_is_refused_by_name(history, harm: str, reason: str):
    given = Given(history, checkpointed())
    key = CANONICAL if given.p.groups[0].rows else STAGED
    given.when(restarted(**{harm: [key]})).then(raises=(RowsMissingError, rf"{key} \({reason}\)"))


@pytest.mark.parametrize(
    ("harm", "reason"), [("lose", Reason.ROWS_MISSING), ("alter", Reason.DIGEST_MISMATCH)]
)
def test_promised_staged_row_is_redone_by_choice_and_only_its_sibling(harm: str, reason: Reason):
    Given(ready(), checkpointed()).when(restarted(**{harm: [STAGED]}, **REDISPATCH)).then(
        events=[Like(e.AttemptSuperseded, generation=1, reason=reason, detail=STAGED)],
        only=(e.AttemptSuperseded,),
        state={0: {"sealed": {0}, "waiting": {1}}},
    )


@pytest.mark.parametrize(
    ("harm", "reason"), [("lose", Reason.ROWS_MISSING), ("alter", Reason.DIGEST_MISMATCH)]
)
def test_promised_canonical_row_is_redone_by_choice_with_its_group_out_of_the_buffer(
    harm: str, reason: Reason
):
    done = Given(finalized(), checkpointed()).when(restarted(**{harm: [CANONICAL]}, **REDISPATCH))
    done.then(
        events=[
            Like(e.FinalizeFailed, group_id=0, reason=reason),
            # Their staged rows were cleared when the group was finalized.
            Like(e.AttemptSuperseded, generation=0, reason=Reason.ROWS_MISSING),
            Like(e.AttemptSuperseded, generation=1, reason=Reason.ROWS_MISSING),
        ],
        only=(e.FinalizeFailed, e.AttemptSuperseded),
        state={0: {"phase": GroupPhase.GENERATING, "waiting": {0, 1}}},
    )
    assert done.bench.data_plane.rows[Partition.TRAINING] == {}


def test_rows_that_no_checkpoint_promised_are_redone_without_asking():
    Given(generating(), checkpointed(), sealed(0, 1)).when(restarted()).then(
        events=[
            Like(e.AttemptSuperseded, generation=0, reason=Reason.CONTROLLER_RESTART),
            Like(e.AttemptSuperseded, generation=1, reason=Reason.ROWS_MISSING),
        ],
        only=(e.AttemptSuperseded,),
    )


def test_rows_that_no_checkpoint_promised_and_that_are_there_are_used():
    Given(generating(), checkpointed(), sealed(0, 1)).when(restarted(tail_rows=True)).then(
        events=[Like(e.AttemptSuperseded, generation=0, reason=Reason.CONTROLLER_RESTART)],
        only=(e.AttemptSuperseded,),
        state={0: {"sealed": {1}}},
    )


def test_every_call_of_a_receipt_must_have_its_row():
    key = staging_key(0, 1, 1, 1)  # the second of two calls
    Given(ready(), checkpointed()).when(restarted(lose=[key], **REDISPATCH)).then(
        events=[Like(e.AttemptSuperseded, generation=1, detail=key)], only=(e.AttemptSuperseded,)
    )


def test_nothing_is_dispatched_before_the_plan_is_recorded():
    done = Given(ready(), generating(), checkpointed()).when(
        restarted(), living(until=lambda p: p.drawn_total >= 3)
    )
    kinds = [type(event) for event in done.then().events]
    assert kinds.index(e.RunRestored) < kinds.index(e.RecoveryPlanned) < kinds.index(e.SiblingDispatched)


def test_buffer_is_rebuilt_from_lineage_and_its_rows_are_trained_on_as_they_lie_there():
    done = Given(finalized(siblings=3), finalized(siblings=3), checkpointed()).when(
        restarted(), living(until=lambda p: p.train_step >= 1)
    )
    done.then(events=[Like(e.StepApplied, train_step=1, group_ids=(0, 1))], only=(e.StepApplied,))
    assert not {0, 1} & {order.group_id for order in done.bench.pool.calls}
    assert not {0, 1} & set(done.bench.finalizer.calls)


def test_row_that_nobody_refers_to_is_cleared_and_counted():
    orphan = RowTag(group_id=99, generation=0, attempt=1, call=0, digest=bytes(16))
    done = Given(generating()).when(restarted(add={"orphan": orphan}))
    done.then(
        events=[
            e.RowsCleared(
                partition=Partition.STAGING, reason=Reason.UNREFERENCED, num_rows=1, group_ids=(99,)
            )
        ],
        only=(e.RowsCleared,),
    )
    assert done.bench.data_plane.rows[Partition.STAGING] == {}


def test_rows_of_a_superseded_attempt_are_owned_by_nobody():
    given = Given(ready(), checkpointed())
    given.when(restarted(lose=[STAGED], **REDISPATCH)).then(
        events=[
            # The row of the other call of generation 1: its attempt was given up.
            Like(e.RowsCleared, partition=Partition.STAGING, reason=Reason.UNREFERENCED, num_rows=1)
        ],
        only=(e.RowsCleared,),
    )


def test_rows_of_a_parked_group_are_owned_by_nobody():
    done = Given(ready(), checkpointed(), parked(0)).when(restarted())
    done.then(
        events=[Like(e.RowsCleared, reason=Reason.UNREFERENCED, num_rows=4, group_ids=(0,))],
        only=(e.RowsCleared,),
        state={0: GroupPhase.PARKED},
    )


def test_rows_of_steps_that_the_checkpoint_covers_are_cleared_as_such():
    Given(finalized(), trained(0), checkpointed()).when(restarted()).then(
        events=[Like(e.RowsCleared, partition=Partition.TRAINING, reason=Reason.STEP_DURABLE, num_rows=2)],
        only=(e.RowsCleared,),
    )


def test_placeholder_is_restored_without_rows():
    Given(generating(), placeholder(0, 1), sealed(0), checkpointed()).when(restarted()).then(
        events=[], only=(e.AttemptSuperseded,), state={0: GroupPhase.READY}
    )
