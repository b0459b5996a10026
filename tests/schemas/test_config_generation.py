"""What a generation engine cannot do is refused at configuration, not ignored."""

import pytest
import yaml

from kinlog.schemas.config import RunConfig, parse_config
from kinlog.schemas.errors import ConfigError

TASKS = {"dataset": {"tasks": [{"name": "sums", "generator": "chain_sum", "agent": "single"}]}}


def parsed(generation: dict[str, object], **sections: object) -> RunConfig:
    return parse_config(yaml.safe_dump({**TASKS, **sections, "generation": generation}))


@pytest.mark.parametrize("policy", ["recompute", "finish"])
def test_torch_engine_has_one_policy_for_calls_in_flight(policy: str):
    with pytest.raises(ConfigError, match=f"in_flight_updates is {policy}, and .*torch has continue only"):
        parsed({"in_flight_updates": policy})
    assert parsed({"in_flight_updates": policy, "engine": "vllm"}).generation.in_flight_updates == policy


def test_engine_of_the_command_line_counts_in_the_place_of_the_files():
    text = yaml.safe_dump({**TASKS, "generation": {"engine": "torch", "in_flight_updates": "finish"}})
    assert parse_config(text, engine="vllm").generation.engine == "vllm"
    assert parse_config(yaml.safe_dump(TASKS), engine="vllm").generation.engine == "vllm"
    with pytest.raises(ConfigError, match="continue only"):
        parse_config(text, engine="torch")


def test_section_that_is_no_mapping_is_refused_with_an_engine_of_the_command_line_too():
    with pytest.raises(ConfigError, match="generation"):
        parse_config(yaml.safe_dump({**TASKS, "generation": "fast"}), engine="vllm")


@pytest.mark.parametrize("name", ["model", "logprobs_mode", "worker_extension_cls", "max_num_seqs"])
def test_what_the_engine_sets_itself_cannot_be_passed_on(name: str):
    with pytest.raises(ConfigError, match=f"engine_args: {name} cannot be passed on"):
        parsed({"engine": "vllm", "vllm": {"engine_args": {name: "else"}}})
    parsed({"engine": "vllm", "vllm": {"engine_args": {"block_size": 32, "swap_space": 0.5}}})


def test_a_run_that_is_to_repeat_itself_bit_for_bit_does_not_generate_with_vllm():
    lock_step = {"deterministic": True, "rollout_recovery": {"prefix": "discard"}}
    with pytest.raises(ConfigError, match="deterministic is true, and generation.engine is vllm"):
        parsed({"engine": "vllm"}, **lock_step)
    parsed({"engine": "torch"}, **lock_step)


@pytest.mark.parametrize(
    ("num_gpus", "parallel", "fits"),
    [(0, 1, True), (0, 2, True), (1, 1, True), (0.5, 1, True), (2, 2, True), (1, 2, False), (2, 1, False)],
)
def test_gpus_of_a_worker_are_those_that_its_model_is_split_over(num_gpus: float, parallel: int, fits: bool):
    generation = {"engine": "vllm", "num_gpus": num_gpus, "vllm": {"tensor_parallel_size": parallel}}
    if fits:
        parsed(generation)
    else:
        with pytest.raises(ConfigError, match=r"num_gpus is .*tensor_parallel_size"):
            parsed(generation)
