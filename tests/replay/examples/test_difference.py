"""What a step was trained on is told from the log, and two runs are the same only if all of it is."""

from pathlib import Path

import pytest
from kinlog_run_fixtures import Chance, DiskRun
from msgspec.structs import replace

from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection
from kinlog.replay.examples.difference import Comparison, compare_examples, render_comparison
from kinlog.replay.examples.steps import StepExamples, trained_examples


def examples_of(run: DiskRun) -> dict[int, StepExamples]:
    run.position()  # what is appended is there once it is durable
    return trained_examples(scan_log(run.directory.log).events(), Projection())


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, StepExamples]:
    run = DiskRun(tmp_path_factory.mktemp("runs") / "run")
    chance = Chance(run, 3, permits=8)
    chance.live(through_step=6, groups_per_step=2, checkpoint_every=3)
    return examples_of(run)


def test_steps_are_told_in_order_with_every_sibling_that_was_trained_on(steps: dict[int, StepExamples]):
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    for step in steps.values():
        assert len(step.groups) == 2
        for group in step.groups:
            assert [s.generation for s in group.siblings] == list(range(len(group.siblings)))
            assert group.siblings
            assert group.staleness >= 0


def test_step_that_a_restart_undid_is_told_as_it_was_trained_again(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, 5, permits=8)
    chance.live(through_step=4, groups_per_step=2, checkpoint_every=3)
    before = examples_of(run)
    run.kill()
    run.restart()
    assert run.p.train_step == 3
    assert list(examples_of(run)) == [1, 2, 3]
    chance.live(through_step=4, groups_per_step=2, checkpoint_every=3)
    after = examples_of(run)
    assert list(after) == [1, 2, 3, 4]
    assert after[4].seq > before[4].seq


def test_run_is_the_same_as_itself_whatever_the_attempts_were(steps: dict[int, StepExamples]):
    again = {
        number: replace(
            step,
            seq=step.seq + 100,
            groups=tuple(
                replace(group, siblings=tuple(replace(s, attempt=s.attempt + 1) for s in group.siblings))
                for group in step.groups
            ),
        )
        for number, step in steps.items()
    }
    compared = compare_examples(steps, again)
    assert (compared.same, compared.steps_compared, compared.groups_compared) == (True, 6, 12)
    assert "SAME" in render_comparison(compared)


def changed(steps: dict[int, StepExamples], number: int, step: StepExamples) -> Comparison:
    compared = compare_examples(steps, {**steps, number: step})
    assert not compared.same
    assert "DIFFERENT: the runs part at step" in render_comparison(compared)
    return compared


def test_swapped_groups_are_another_order(steps: dict[int, StepExamples]):
    step = steps[4]
    (difference,) = changed(steps, 4, replace(step, groups=step.groups[::-1])).differences
    assert (difference.train_step, difference.what) == (4, "order of groups")


def test_another_prompt_is_told_with_its_place(steps: dict[int, StepExamples]):
    step = steps[2]
    other = replace(step.groups[1], prompt=replace(step.groups[1].prompt, draw_index=999))
    (difference,) = changed(steps, 2, replace(step, groups=(step.groups[0], other))).differences
    assert (difference.place, difference.what) == (1, "prompt")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, "tokens or log-probabilities"),
        ({"raw_reward": 99.0}, "raw reward"),
        ({"completion_tokens": 9999}, "completion tokens"),
        ({"max_weight_version": 77}, "weight version"),
    ],
)
def test_another_completion_is_told_by_its_plainest_fact(
    steps: dict[int, StepExamples], change: dict[str, object], what: str
):
    step = steps[3]
    group = step.groups[0]
    sibling = replace(group.siblings[1], row_digest="00" * 16, **change)
    other = replace(group, siblings=(group.siblings[0], sibling, *group.siblings[2:]))
    (difference,) = changed(steps, 3, replace(step, groups=(other, step.groups[1]))).differences
    assert (difference.place, difference.generation, difference.what) == (0, 1, what)


def test_missing_sibling_and_missing_group_are_told(steps: dict[int, StepExamples]):
    step = steps[1]
    group = step.groups[0]
    fewer = replace(group, siblings=group.siblings[1:])
    (difference,) = changed(steps, 1, replace(step, groups=(fewer, step.groups[1]))).differences
    assert (difference.generation, difference.second) == (0, "missing")
    (difference,) = changed(steps, 1, replace(step, groups=step.groups[:1])).differences
    assert difference.what == "number of groups"


def test_longer_run_is_not_the_same(steps: dict[int, StepExamples]):
    shorter = {number: step for number, step in steps.items() if number <= 4}
    compared = compare_examples(shorter, steps)
    assert (compared.same, compared.only_in_second, compared.differences) == (False, (5, 6), ())
    assert "only the second run has steps 5 to 6" in render_comparison(compared)
