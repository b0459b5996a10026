"""A step that is trained without a group that left, where groups that belong to no step are there to fill it up."""

import pytest
from kinlog_conformance import Given, Like, dropped, finalized, generating, living

from kinlog.schemas import events as e

SHRINK = {
    "sampler__name": "in_order",
    "sampler__shortfall": "shrink",
    "trainer__groups_per_step": 3,
    "rollout__max_live_groups": 6,
}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("of_no_step", [1, 2, 3])
def test_shrunk_step_is_filled_up_by_groups_of_another_sampler_and_nobody_waits(
    of_no_step: int, lookahead: int
):
    left = of_no_step + 1
    given = Given(
        *[finalized(siblings=3)] * of_no_step,
        finalized(siblings=3, train_step=1),
        generating(siblings=3, train_step=1),
        dropped(left),
        sampler__max_lookahead_versions=lookahead,
        **SHRINK,
    )
    done = given.when(living()).then(state={"train_step": 4})
    first = done.of(e.StepApplied)[0].group_ids
    assert of_no_step in first, "the group of the step itself"
    assert set(first) - {of_no_step} <= set(range(of_no_step)), (
        "nobody was drawn in place of the one that left"
    )
    shrunk = [Like(e.StepShrunk, train_step=1, found_groups=2)] if of_no_step == 1 else []
    assert done.of(e.StepShrunk) == shrunk
