"""A bound of the replay buffer that could starve a step, or that its sampler knows nothing of, is refused."""

import pytest

from kinlog.schemas.config import RunConfig, parse_config
from kinlog.schemas.errors import ConfigError


def configured(sampler: str) -> RunConfig:
    return parse_config(
        "dataset: {tasks: [{name: gcd, generator: gcd, agent: single_turn}]}\n"
        "trainer: {groups_per_step: 4}\n"
        f"sampler: {{{sampler}}}\n"
    )


@pytest.mark.parametrize("name", ["windowed", "weight_fifo", "ready_first", "somewhere:OnesOwn"])
def test_bound_of_a_step_s_groups_or_more_is_accepted(name: str):
    assert configured(f"name: '{name}', max_ready_groups: 4").sampler.max_ready_groups == 4


def test_bound_below_what_a_step_needs_is_refused():
    with pytest.raises(ConfigError, match=r"max_ready_groups is 3, less than trainer.groups_per_step \(4\)"):
        configured("name: windowed, max_ready_groups: 3")


def test_bound_of_a_sampler_that_evicts_nothing_is_refused():
    with pytest.raises(ConfigError, match="max_ready_groups is 8, which sampler .in_order. does not use"):
        configured("name: in_order, max_ready_groups: 8")
