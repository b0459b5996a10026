"""The configurations that are shipped are accepted, differ in what they are there to show, and leave no sampler out."""

from importlib.resources import files
from pathlib import Path

import pytest
from kinlog_fake_parts import FakeParts
from kinlog_lives import first_life, history
from msgspec.structs import replace

from kinlog.controller.samplers import build_sampler
from kinlog.schemas.config import load_config
from kinlog.schemas.events import GroupReserved
from kinlog.schemas.reasons import Granularity
from kinlog.workers.agents import open_dataset

EXAMPLES = sorted(Path(str(files("kinlog.controller"))).joinpath("examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_accepted_and_says_at_its_top_what_it_is_for(path: Path):
    config = load_config(path)
    build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step)
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
async def test_example_is_trained_by_the_real_controller(path: Path, tmp_path: Path):
    """Its workers and its data plane are stand-ins; the end-to-end tests train some of them on real ones."""
    config = load_config(path)
    steps = min(3, config.trainer.max_steps)
    short = replace(
        config,
        trainer=replace(config.trainer, max_steps=steps),
        checkpointing=replace(config.checkpointing, every_steps=2),
    )
    life = await first_life(tmp_path / "run", short, FakeParts(open_dataset(config)))
    await life.train()
    assert (life.p.train_step, life.p.cleanly_closed) == (steps, True)
    granularities = {
        config.rollout_recovery.resolve(agent_name=task.agent, task_name=task.name)
        for task in config.dataset.tasks
    }
    reserved = [record.event for record in history(tmp_path / "run")]
    assert {event.granularity for event in reserved if isinstance(event, GroupReserved)} == granularities


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
