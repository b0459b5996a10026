"""Whatever happens, a run ends: every sampler, both policies about shortfalls, failing and hanging workers, and lives
that differ in sampler, batch, buffer, workers and dataset.

A wait that nothing can end is a ``Deadlock`` of the loop: nothing here is timed.
"""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinlog_conformance import Given, Outcome, restarted
from kinlog_fake_parts import FakeDataset
from kinlog_unreliable import TIMEOUT_S, lived

from kinlog.schemas import events as e
from kinlog.schemas.errors import ConfigError, RolloutsFailError
from kinlog.schemas.reasons import Granularity, Reason

MAX_STEPS = 5

SAMPLERS: dict[str, dict[str, object]] = {
    "in_order": {"sampler__name": "in_order", "sampler__shortfall": "top_up"},
    "in_order_shrinking": {"sampler__name": "in_order", "sampler__shortfall": "shrink"},
    "windowed": {"sampler__name": "windowed", "sampler__freshest_first": False},
    "windowed_freshest_first": {"sampler__name": "windowed", "sampler__freshest_first": True},
    "weight_fifo": {"sampler__name": "weight_fifo"},
    "ready_first": {"sampler__name": "ready_first"},
    "ones_own": {"sampler__name": "kinlog_conformance:AnyReady"},
}


def some_config(chance: random.Random, sampler: str) -> dict[str, object]:
    """Settings of one life. Each fits the others, as a configuration file that is accepted would."""
    groups_per_step = chance.choice([1, 2, 3])
    bounded = chance.random() < 0.5 and not sampler.startswith("in_order")
    return {
        **SAMPLERS[sampler],
        "sampler__max_ready_groups": groups_per_step + chance.choice([0, 1, 3]) if bounded else None,
        "sampler__max_staleness_versions": chance.choice([0, 1, 4]),
        "sampler__max_lookahead_versions": chance.choice([0, 1, 3]),
        "trainer__groups_per_step": groups_per_step,
        "rollout__max_live_groups": groups_per_step + chance.choice([0, 1, 4]),
        "rollout__max_inflight_siblings": chance.choice([3, 4, 9]),
        "rollout__max_infrastructure_retries": chance.choice([0, 1, 5]),
        "rollout__max_data_retries": chance.choice([0, 1, 3]),
        "rollout__spent_retry_budget": chance.choice(["park", "drop", "train_partial"]),
        "rollout__max_controller_restarts": chance.choice([None, 0, 2]),
        "rollout_recovery__future_weights": chance.choice(["reuse", "discard"]),
        "rollout_recovery__over_capacity": chance.choice(["keep", "evict", "refuse"]),
        "dataset__max_epochs": chance.choice([1, 2, 100]),
    }


def next_life(now: Outcome, chance: random.Random, sampler: str) -> Outcome:
    """Kill and resume with other settings; what is refused is resumed with a policy that refuses nothing."""
    settings_now = some_config(chance, sampler)
    tail_rows, from_start = chance.random() < 0.5, chance.random() < 0.1
    from_start = from_start and now.p.frontier_step == 0
    refused = settings_now["rollout_recovery__over_capacity"] == "refuse"
    try:
        return now.when(restarted(tail_rows=tail_rows, from_start=from_start, **settings_now)).then()
    except ConfigError as error:
        # Some earlier life's steps were smaller, not necessarily the last one's.
        if not refused and "trainer.groups_per_step" not in str(error):
            raise
        settings_now |= {"rollout_recovery__over_capacity": "keep", "rollout__max_live_groups": 99}
        return now.when(restarted(tail_rows=tail_rows, from_start=from_start, **settings_now)).then()


def assert_ended(done: Outcome) -> None:
    p = done.p
    config = done.bench.config
    if done.refused:
        assert p.alive_total == 0
        done.then(raises=(RolloutsFailError, "not one step was trained"), events=done.events)
        return
    done.then()
    if p.train_step < config.trainer.max_steps:
        assert done.bench.runtime.exhausted
        assert p.alive_total == 0, "it ended with groups that it could have trained on"
    # A step is short for a reason that is recorded.
    short = {step.train_step for step in done.of(e.StepShrunk)}
    for step in done.of(e.StepApplied):
        assert len(step.group_ids) >= config.trainer.groups_per_step or step.train_step in short
    shrinks = config.sampler.shortfall == "shrink" and config.sampler.name == "in_order"
    assert not short or shrinks or done.bench.runtime.exhausted


def run_to_its_end(chance: random.Random, samplers: list[str], *, hangs: float) -> Outcome:
    whole = {"even": Granularity.PROMPT_GROUP} if chance.random() < 0.5 else {}
    now = Given(
        dataset=FakeDataset(size=chance.choice([4, 12, 40])),
        rollout_recovery__task_granularity_overrides=whole,
        rollout__sibling_timeout_s=TIMEOUT_S,
        trainer__max_steps=MAX_STEPS,
        checkpointing__every_steps=chance.choice([1, 2]),
        **some_config(chance, samplers[0]),
    ).when()
    for sampler in samplers[1:]:
        now = now.when(lived(chance.randrange(1, 120), chance, hangs=hangs))
        if now.refused:
            return now
        now = next_life(now, chance, sampler)
    return now.when(lived(None, chance, hangs=hangs))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_run_of_one_life_trains_to_its_last_step_or_all_that_there_is(sampler: str):
    for seed in range(6):
        try:
            assert_ended(run_to_its_end(random.Random(seed), [sampler], hangs=0.0))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@settings(max_examples=20)
@example(samplers=["in_order_shrinking", "in_order_shrinking", "in_order"], seed=3_662_762_937)
@given(
    samplers=st.lists(st.sampled_from(sorted(SAMPLERS)), min_size=2, max_size=4), seed=st.integers(0, 2**32)
)
def test_run_whose_lives_differ_in_everything_ends(samplers: list[str], seed: int):
    assert_ended(run_to_its_end(random.Random(seed), samplers, hangs=0.0))


@settings(max_examples=12)
@given(sampler=st.sampled_from(sorted(SAMPLERS)), lives=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_workers_that_hang_for_ever_starve_nobody(sampler: str, lives: int, seed: int):
    done = run_to_its_end(random.Random(seed), [sampler] * lives, hangs=0.05)
    assert_ended(done)


def test_shortfalls_are_not_recorded_where_no_step_is_short():
    done = run_to_its_end(random.Random(3), ["windowed"], hangs=0.0)
    assert all(shrunk.reason is Reason.SHORTFALL for shrunk in done.of(e.StepShrunk))
