"""What is said where vLLM is not installed, and what it is started with where it is."""

import sys

import pytest
import yaml
from kinlog_policy_fixtures import MODEL

from kinlog.schemas.config import RunConfig, parse_config
from kinlog.schemas.errors import MissingExtraError
from kinlog.schemas.settings import GenerationSettings, ModelSettings, VllmSettings
from kinlog.workers.model import load_policy
from kinlog.workers.open_engine import prepare_engine
from kinlog.workers.vllm_start import engine_arguments, model_directory


def config() -> RunConfig:
    tasks = [{"name": "sums", "generator": "chain_sum", "agent": "single_turn"}]
    return parse_config(yaml.safe_dump({"dataset": {"tasks": tasks}}), engine="vllm")


async def test_missing_vllm_is_one_clear_error_that_says_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    prepared = prepare_engine(config())
    assert prepared.tokenizer.eos_id >= 0
    with pytest.raises(MissingExtraError, match=rf"not installed for {sys.executable}.*generation\.python"):
        await prepared.start()


def test_log_probabilities_are_asked_for_at_the_sampling_temperature():
    # vLLM's default is that of temperature 1, whatever was sampled at.
    arguments = engine_arguments(GenerationSettings(engine="vllm"), "model", 160)
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_settings_are_passed_on_and_those_of_the_engine_win():
    settings = GenerationSettings(
        engine="vllm",
        max_batch_size=7,
        vllm=VllmSettings(kv_cache_gib=0.5, engine_args={"block_size": 32, "max_num_seqs": 1}),
    )
    arguments = engine_arguments(settings, "model", 160)
    assert arguments["block_size"] == 32
    assert arguments["max_num_seqs"] == 7
    assert arguments["max_model_len"] == 160
    assert arguments["kv_cache_memory_bytes"] == 2**29


def test_model_of_settings_is_written_for_the_time_of_the_start(tmp_path):
    with model_directory(MODEL) as directory:
        assert (directory.path / "model.safetensors").exists()
        assert directory.max_positions == MODEL.max_positions
        policy = load_policy(MODEL)
        assert directory.parameter_shapes == {
            name: parameter.shape for name, parameter in policy.model.named_parameters()
        }
    assert not directory.path.exists()


def test_model_of_a_directory_is_left_where_it_is_and_not_loaded(tmp_path):
    policy = load_policy(MODEL)
    policy.model.save_pretrained(tmp_path)
    with model_directory(ModelSettings(path=str(tmp_path), max_positions=10_000)) as directory:
        assert directory.path == tmp_path
        assert directory.max_positions == MODEL.max_positions
        assert directory.parameter_shapes == {
            name: parameter.shape for name, parameter in policy.model.named_parameters()
        }
    assert (tmp_path / "model.safetensors").exists()
