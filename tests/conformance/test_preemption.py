"""Preemption: a run that is told to stop again and again charges nobody, and goes on from where it stood."""

import pytest
from kinlog_conformance import COHORT, SIBLING, Given, Like, living, reserved, restarted, worker_hangs
from kinlog_preemption import Preemption, preempted

from kinlog.lineage.state import Projection
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason

ONE_DEATH = e.RetryBudget(0, 0, 1)


def hangs_alone(p: Projection) -> bool:
    siblings = p.groups[0].siblings
    return siblings[1].running and not any(s.waiting for s in siblings.values())


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
def test_sibling_that_is_under_way_at_every_preemption_is_charged_with_nothing(granularity: Granularity):
    """Long rollouts are the ones that no grace period is enough for: were they charged, they would be the ones parked."""
    now = Given(reserved(siblings=3, budget=ONE_DEATH, granularity=granularity)).when()
    for attempt in range(1, 6):
        now = now.when(worker_hangs(0, 1, attempt), preempted(hangs_alone), restarted(tail_rows=True)).then()
        assert [s.restarts for s in now.p.groups[0].siblings.values()] == [0, 0, 0]
        assert Like(e.AttemptSuperseded, group_id=0, reason=Reason.PREEMPTED) in now.events
        assert not now.of(e.GroupParked, e.GroupDropped)
    now.when(living()).then(state={"train_step": 4, "parked_total": 0})


def test_preempted_run_hands_everything_sealed_to_its_next_life():
    now = Given(reserved(siblings=3), worker_hangs(0, 1, 1)).when(preempted(hangs_alone)).then()
    sealed = {(g.group_id, n) for g in now.p.live_groups() for n, s in g.siblings.items() if s.sealed}
    now = now.when(restarted(tail_rows=True)).then(events=[], only=(e.AttemptSuperseded,))
    assert sealed == {(g.group_id, n) for g in now.p.live_groups() for n, s in g.siblings.items() if s.sealed}


def test_sibling_that_was_under_way_goes_on_from_its_tokens_in_the_next_life():
    given = Given(reserved(siblings=3), worker_hangs(0, 1, 1))
    now = given.when(preempted(hangs_alone), restarted(tail_rows=True), living()).then()
    sent = {(d.group_id, d.generation, d.attempt): d for d in now.of(e.SiblingDispatched)}
    assert sent[0, 1, 2].resumes_attempt == 1


@pytest.mark.parametrize("step", range(1, 4))
def test_steps_that_were_trained_before_the_end_are_not_trained_again(step: int):
    came = Preemption()
    now = Given().when(preempted(lambda p: p.train_step >= step, then=came)).then()
    trained = now.p.train_step
    assert came.said
    assert trained >= step
    now = now.when(restarted(), living()).then(state={"train_step": 4})
    assert [event.train_step for event in now.of(e.StepApplied)] == list(range(trained + 1, 5))
