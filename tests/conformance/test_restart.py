"""Restart of a restart: killed while it recovers, ten times in a row, and none of it leaves a trace."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_conformance import (
    COHORT,
    Given,
    Like,
    Outcome,
    checkpointed,
    claimed,
    finalized,
    finalizing,
    generating,
    living,
    reserved,
    restarted,
    sealed,
    trained,
)
from msgspec.structs import replace

from kinlog.lineage.state import GroupPhase, projection_digest
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason


def a_run_in_every_phase() -> Given:
    """Checkpointed after its first step; groups 2 to 7 stand in every phase that there is."""
    return Given(
        finalized(siblings=3),
        finalized(siblings=3),
        trained(0, 1),
        finalized(siblings=3),
        generating(siblings=3),
        sealed(3, 0, 2),
        generating(siblings=3, granularity=COHORT),
        finalizing(siblings=3),
        reserved(siblings=3),
        checkpointed(),
        sealed(3, 1),
        claimed(2),
    )


def what_stands(done: Outcome) -> bytes:
    """The digest of everything but the counters of restarts themselves."""
    return projection_digest(replace(done.p, last_seq=0, restarts=0))


def test_ten_restarts_in_a_row_are_as_good_as_one():
    once = a_run_in_every_phase().when(restarted()).then()
    digest = what_stands(once)
    for restarts in range(2, 12):
        once = once.when(restarted()).then(
            events=[Like(e.RunRestored), Like(e.RecoveryPlanned, siblings_redispatched=0, groups_dropped=0)],
            only=(e.RunRestored, e.RecoveryPlanned, e.AttemptSuperseded, e.FinalizeFailed, e.GroupDropped),
            state={"restarts": restarts},
        )
        assert what_stands(once) == digest


def test_checkpoint_restore_checkpoint_restore_gives_the_same_digest():
    done = a_run_in_every_phase().when(restarted(), checkpointed(), restarted()).then()
    first = projection_digest(replace(done.p, last_seq=0, restarts=0, checkpoints=()))
    done = done.when(checkpointed(), restarted()).then()
    assert projection_digest(replace(done.p, last_seq=0, restarts=0, checkpoints=())) == first


def test_attempts_do_not_grow_for_siblings_that_were_never_dispatched():
    now = a_run_in_every_phase().when()
    for _ in range(10):
        now = now.when(restarted()).then(
            state={6: {"phase": GroupPhase.RESERVED, "attempts": (0, 0, 0)}, 3: {"attempts": (1, 1, 1)}}
        )


def test_what_is_redone_is_superseded_once_however_often_the_restart_is_killed():
    done = (
        a_run_in_every_phase()
        .when(restarted())
        .then(
            events=[
                Like(e.AttemptSuperseded, group_id=3, generation=1, reason=Reason.ROWS_MISSING),
                Like(e.AttemptSuperseded, group_id=4, generation=0, reason=Reason.CONTROLLER_RESTART),
                Like(e.AttemptSuperseded, group_id=4, generation=1, reason=Reason.COHORT_RESTART),
                Like(e.AttemptSuperseded, group_id=4, generation=2, reason=Reason.COHORT_RESTART),
            ],
            only=(e.AttemptSuperseded,),
            state={2: GroupPhase.FINALIZED, 3: {"sealed": {0, 2}}, 5: GroupPhase.FINALIZING},
        )
    )
    done.when(restarted()).then(events=[], only=(e.AttemptSuperseded,))


@settings(max_examples=25)
@given(kills=st.lists(st.integers(1, 12), min_size=1, max_size=5), tail_rows=st.booleans())
def test_kill_at_any_moment_of_the_recovery_is_recovered_from(kills: list[int], tail_rows: bool):
    now = a_run_in_every_phase().when()
    for events in kills:
        now = now.when(restarted(tail_rows=tail_rows)).then()
        if now.p.train_step == 4:
            break  # an earlier life had got to the end: there may be nothing left to be killed in
        last = now.p.last_seq + events
        # Near its end a life may have fewer events left than that.
        now = now.when(living(until=lambda p, last=last: p.last_seq >= last or p.train_step == 4)).then()
    done = now.when(restarted(), living()).then(state={"train_step": 4})
    steps = [step.train_step for step in done.of(e.StepApplied)]
    # What was left to train, without a gap; nothing, when the last life had got to its end.
    assert steps == list(range(5 - len(steps), 5))


def test_steps_past_the_checkpoint_are_trained_again_on_the_surviving_history():
    Given(
        finalized(siblings=3),
        finalized(siblings=3),
        finalized(siblings=3),
        finalized(siblings=3),
        trained(0, 1),
        checkpointed(),
        trained(2, 3),
    ).when(restarted(tail_rows=True)).then(
        state={"train_step": 1, 2: GroupPhase.FINALIZED, 3: GroupPhase.FINALIZED}
    ).when(living(until=lambda p: p.train_step >= 2)).then(
        events=[Like(e.StepApplied, train_step=2, group_ids=(2, 3))], only=(e.StepApplied,)
    )


@pytest.mark.parametrize("phase", ["claimed", "applied"])
def test_claim_that_the_kill_overtook_is_undone(phase: str):
    history = claimed(0) if phase == "claimed" else trained(0)
    Given(finalized(), checkpointed(), history).when(restarted()).then(
        state={0: GroupPhase.FINALIZED, "train_step": 0}
    )


def test_restart_from_the_start_keeps_every_draw():
    done = a_run_in_every_phase().when(restarted(from_start=True, tail_rows=True))
    done.then(state={"train_step": 0, "draw_cursor": 7, "drawn_total": 7, "alive_total": 7})
