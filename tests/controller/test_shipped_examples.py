"""The configurations that are shipped are accepted, differ in what they are there to show, and leave no sampler out."""

from importlib.resources import files
from pathlib import Path

import pytest

from kinlog.controller.samplers import build_sampler
from kinlog.schemas.config import load_config
from kinlog.schemas.reasons import Granularity

EXAMPLES = sorted(Path(str(files("kinlog.controller"))).joinpath("examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_accepted_and_says_at_its_top_what_it_is_for(path: Path):
    config = load_config(path)
    build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step)
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_examples_show_every_sampler_both_granularities_and_an_agent_of_several_turns():
    configs = {path.stem: load_config(path) for path in EXAMPLES}
    for sampler in ("in_order", "windowed", "weight_fifo", "ready_first"):
        assert configs[sampler].sampler.name == sampler
    assert (
        Granularity.PROMPT_GROUP
        in configs["prompt_group"].rollout_recovery.task_granularity_overrides.values()
    )
    assert {task.agent for task in configs["retry_agent"].dataset.tasks} == {"retry"}
    assert configs["windowed"].sampler.max_ready_groups is not None
    assert configs["vllm"].generation.engine == "vllm"
    assert configs["lock_step"].deterministic
    assert configs["lock_step"].sampler.max_lookahead_versions == 0
