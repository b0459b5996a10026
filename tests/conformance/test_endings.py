"""Ends of a run: not a success with nothing trained, and no work that nobody would train on."""

import pytest
from kinlog_conformance import (
    Given,
    checkpointed,
    finalized,
    living,
    reserved,
    restarted,
    trained,
    worker_fails,
)
from kinlog_fake_parts import FakeDataset

from kinlog.schemas import events as e
from kinlog.schemas.errors import RolloutsFailError

SMALL = 4


def everything_fails():
    return [
        worker_fails(group, sibling, attempt)
        for group in range(SMALL)
        for sibling in range(3)
        for attempt in range(1, 9)
    ]


@pytest.mark.parametrize(("policy", "told"), [("park", "4 groups are parked"), ("drop", "4 were dropped")])
def test_small_dataset_that_was_given_up_whole_is_no_success(policy: str, told: str):
    given = Given(
        *everything_fails(),
        dataset=FakeDataset(size=SMALL),
        dataset__max_epochs=1,
        rollout__spent_retry_budget=policy,
    )
    done = given.when(living())
    done.then(raises=(RolloutsFailError, rf"not one step was trained: .*{told}"), events=done.events)
    assert done.p.train_step == 0


def test_dataset_of_which_something_was_trained_ends_in_success():
    first_group_fails = everything_fails()[:24]
    given = Given(*first_group_fails, dataset=FakeDataset(size=SMALL), dataset__max_epochs=1)
    done = given.when(living()).then()
    assert (done.p.train_step, done.p.parked_total) == (2, 1)


def test_resume_past_the_last_step_generates_nothing_for_the_groups_that_are_left():
    given = Given(
        *[reserved(siblings=3)] * 2,
        *[finalized()] * 2,
        trained(2, 3),
        checkpointed(),
        trainer__max_steps=4,
    )
    resumed = given.when(restarted(trainer__max_steps=1), living())
    resumed.then(events=[], only=(e.SiblingDispatched,), state={"train_step": 1, "alive_total": 2})
