import pytest

from kinlog.schemas.errors import ConfigError
from kinlog.workers.tokenizer import CharacterTokenizer

pytest_plugins = ["kinlog_policy_fixtures"]


def test_text_survives_encoding_and_decoding(tokenizer):
    assert tokenizer.decode(tokenizer.encode("g12,8=")) == "g12,8="


def test_special_tokens_are_distinct_and_have_no_text(tokenizer):
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id]
    assert len(set(special)) == 3
    assert tokenizer.decode([*special, *tokenizer.encode("7"), tokenizer.eos_id]) == "7"


def test_ids_fill_the_vocabulary_without_gaps():
    tokenizer = CharacterTokenizer("ab")
    assert sorted({0, 1, 2, *tokenizer.encode("ab")}) == list(range(tokenizer.vocabulary_size))


def test_character_outside_the_alphabet_is_named(tokenizer):
    with pytest.raises(ConfigError, match="character 'z'"):
        tokenizer.encode("g1z=")


def test_repeated_character_is_refused():
    with pytest.raises(ConfigError, match=r"model.alphabet.*'a'"):
        CharacterTokenizer("aba")
