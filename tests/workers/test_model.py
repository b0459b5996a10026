import msgspec
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import ModelSettings
from kinlog.workers.model import load_policy

pytest_plugins = ["kinlog_policy_fixtures"]


def test_same_settings_give_the_same_weights(model_settings):
    first, second = (load_policy(model_settings).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_gives_other_weights(model_settings):
    first = load_policy(model_settings).model.state_dict()
    second = load_policy(msgspec.structs.replace(model_settings, seed=8)).model.state_dict()
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])


def test_building_a_policy_leaves_the_random_state_alone(model_settings):
    before = torch.get_rng_state()
    load_policy(model_settings)
    assert torch.equal(before, torch.get_rng_state())


def test_model_is_float32_and_predicts_every_token(model_settings):
    policy = load_policy(model_settings)
    logits = policy.model(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert logits.dtype is torch.float32
    assert logits.shape == (1, 3, policy.tokenizer.vocabulary_size)


def test_heads_that_cannot_be_rotated_are_refused():
    with pytest.raises(ConfigError, match="hidden_size"):
        load_policy(ModelSettings(hidden_size=36, num_heads=4))


def test_local_directory_is_read_with_its_tokenizer(tmp_path):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "1": 2, "2": 3, "=": 4}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(tmp_path)
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=24,
        tie_word_embeddings=True,
    )
    saved = Qwen2ForCausalLM(config)
    saved.save_pretrained(tmp_path)

    policy = load_policy(ModelSettings(path=str(tmp_path), max_positions=160))

    assert policy.tokenizer.encode("12=") == [2, 3, 4]
    assert policy.tokenizer.decode([2, 3, 1]).replace(" ", "") == "12"
    assert (policy.tokenizer.eos_id, policy.tokenizer.pad_id, policy.tokenizer.vocabulary_size) == (1, 0, 8)
    assert policy.max_positions == 24
    assert torch.equal(policy.model.lm_head.weight, saved.lm_head.weight)
