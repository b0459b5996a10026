"""Permits that samplers cannot get round: larger steps than before, and samplers of somebody's own."""

import pytest
from kinlog_conformance import AnyReady, Given, dropped, living, reserved, restarted

from kinlog.controller.samplers import Draw
from kinlog.lineage.state import Projection
from kinlog.schemas.errors import ConfigError

STEPS_OF_TWO = tuple(reserved(siblings=3, train_step=1 + number // 2) for number in range(4))
IN_ORDER = {"sampler__name": "in_order", "sampler__max_lookahead_versions": 1}


def most_alive(done) -> int:
    return max(p.alive_total for p in done.prefixes)


def test_larger_step_that_later_steps_leave_no_permits_for_is_refused_with_the_numbers_that_would_do():
    given = Given(*STEPS_OF_TWO, rollout__max_live_groups=4, **IN_ORDER)
    given.when(restarted(trainer__groups_per_step=4)).then(
        raises=(ConfigError, r"groups_per_step is 4.*step 1 was begun with 2.*max_live_groups to 6 or more")
    )


@pytest.mark.parametrize("permits", [6, 8])
def test_larger_step_is_filled_up_with_its_own_groups_when_there_are_permits(permits: int):
    given = Given(*STEPS_OF_TWO, rollout__max_live_groups=4, **IN_ORDER)
    done = given.when(restarted(trainer__groups_per_step=4, rollout__max_live_groups=permits)).when(living())
    done.then(state={"train_step": 4})
    assert most_alive(done) <= permits
    first = done.p.steps.get(1)
    assert first is None or {0, 1} <= set(first)


def test_place_of_a_group_that_left_is_no_larger_step():
    given = Given(
        *STEPS_OF_TWO, dropped(0), reserved(siblings=3, train_step=3), rollout__max_live_groups=4, **IN_ORDER
    )
    given.when(restarted(), living()).then(state={"train_step": 4})


class ForTheNextStep(AnyReady):
    """Claims that every draw is for the next step."""

    def may_draw(self, p: Projection) -> Draw | None:
        return Draw(p.train_step + 1)


@pytest.mark.parametrize("permits", [2, 3, 5])
def test_sampler_of_ones_own_does_not_get_round_the_permits(permits: int):
    done = Given(sampler__name=f"{__name__}:ForTheNextStep", rollout__max_live_groups=permits).when(living())
    done.then(state={"train_step": 4})
    assert most_alive(done) == permits


def test_sampler_of_ones_own_does_not_draw_more_than_the_steps_left_can_train():
    given = Given(
        sampler__name=f"{__name__}:ForTheNextStep", rollout__max_live_groups=50, trainer__max_steps=1
    )
    given.when(living()).then(state={"drawn_total": 2, "train_step": 1})
