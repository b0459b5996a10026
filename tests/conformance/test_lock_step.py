"""Lock-step: a run that generates nothing ahead of training is the same run however often it is killed."""

from pathlib import Path

import pytest
from kinlog_builders import Story
from kinlog_lives import Life, run_config

from kinlog.controller.samplers import InOrder, may_start
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection
from kinlog.replay.examples.steps import trained_examples
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason

LOCK_STEP = run_config(
    trainer__max_steps=6,
    sampler__name="in_order",
    sampler__max_lookahead_versions=0,
    checkpointing__every_steps=2,
)


def trained(path: Path) -> list[tuple[int, list[tuple[int, list[tuple[int, int]]]]]]:
    """By step, in order: the draw of each group, and by which weights each of its siblings was generated."""
    steps = trained_examples(scan_log(RunDirectory(path).log).events(), Projection())
    return [
        (
            number,
            [
                (
                    group.prompt.draw_index,
                    [(sibling.min_weight_version, sibling.max_weight_version) for sibling in group.siblings],
                )
                for group in step.groups
            ],
        )
        for number, step in sorted(steps.items())
    ]


async def killed_after(path: Path, appends: int, *, resume: bool) -> bool:
    """One life, killed once this many events were appended. Returns whether it came to its end before."""
    life = await Life(path, LOCK_STEP).begin(resume=resume)
    last = life.p.last_seq + appends
    try:
        await life.train_until(lambda p: p.last_seq >= last)
    except AssertionError:
        await life.finish()
        return True
    await life.kill()
    return False


@pytest.mark.parametrize("appends", [23, 37, 58, 79])
async def test_killed_run_trains_on_the_same_prompts_in_the_same_order_by_the_same_weights(
    tmp_path: Path, appends: int
):
    undisturbed = Life(tmp_path / "undisturbed", LOCK_STEP)
    await undisturbed.begin(resume=False)
    await undisturbed.train()
    lives = 0
    while not await killed_after(tmp_path / "killed", appends * (1 + lives // 4), resume=lives > 0):
        lives += 1
    assert lives >= 2
    assert trained(tmp_path / "killed") == trained(tmp_path / "undisturbed")


def test_group_that_was_drawn_for_a_later_step_waits_for_the_weights_that_it_was_drawn_for():
    told = Story()
    now, later = told.reserve(train_step=1), told.reserve(train_step=2)
    strict, ahead = InOrder(1, 0), InOrder(1, 1)
    starts = [may_start(strict, told.p, told.p.groups[group]) for group in (now, later)]
    assert starts == [True, False]
    assert all(may_start(ahead, told.p, told.p.groups[group]) for group in (now, later))


def test_nobody_waits_for_the_weights_of_a_step_that_has_no_groups():
    told = Story()
    now, later = told.reserve(train_step=1), told.reserve(train_step=2)
    told.commit(e.GroupDropped(group_id=now, reason=Reason.RETRY_BUDGET))
    assert may_start(InOrder(1, 0), told.p, told.p.groups[later])
