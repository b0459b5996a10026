"""The policy: a causal language model with its tokenizer, built small from settings or read from a local directory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import ModelSettings
from kinlog.workers.tokenizer import CharacterTokenizer, ChatMessage, Tokenizer

__all__ = ["Policy", "load_policy", "load_tokenizer"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model in float32, and what belongs to it."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    max_positions: int
    """Longest sequence, prompt and completion together, in tokens."""


def load_policy(settings: ModelSettings) -> Policy:
    """Return the policy that ``settings`` describe. The same settings give the same weights, bit for bit.

    Parameters
    ----------
    settings:
        ``path`` of a local Hugging Face directory, or the sizes, alphabet and seed of a small Qwen2 model.

    Raises
    ------
    ConfigError
        The sizes do not fit each other, or the directory's tokenizer has no end token.
    """
    if settings.path is not None:
        return _read_policy(settings.path, settings.max_positions)
    if settings.hidden_size % (2 * settings.num_heads):
        # Rotary embeddings turn pairs of features: a head of odd width cannot be rotated.
        raise ConfigError(
            f"model.hidden_size: expected a multiple of 2 * num_heads = {2 * settings.num_heads}, "
            f"found {settings.hidden_size}"
        )
    # Here and below, not at the top: importing it takes a second, and half of the processes never build a model.
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = CharacterTokenizer(settings.alphabet)
    config = Qwen2Config(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=False,
        initializer_range=settings.initializer_range,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is part of its checkpoint
        torch.manual_seed(settings.seed)
        model = Qwen2ForCausalLM(config)
    return Policy(model=model.float(), tokenizer=tokenizer, max_positions=settings.max_positions)


def load_tokenizer(settings: ModelSettings) -> Tokenizer:
    """Return the tokenizer of the policy that ``settings`` describe, without building the model.

    Raises
    ------
    ConfigError
        The directory's tokenizer has no end token.
    """
    if settings.path is None:
        return CharacterTokenizer(settings.alphabet)
    from transformers import AutoConfig

    return _read_tokenizer(settings.path, int(AutoConfig.from_pretrained(settings.path).vocab_size))


def _read_tokenizer(path: str, vocabulary_size: int) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer of {path} has no eos token, by which a completion ends")
    return _PretrainedTokenizer(tokenizer, vocabulary_size)


def _read_policy(path: str, max_positions: int) -> Policy:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    limit = min(max_positions, int(model.config.max_position_embeddings))
    tokenizer = _read_tokenizer(path, int(model.get_input_embeddings().num_embeddings))
    return Policy(model=model, tokenizer=tokenizer, max_positions=limit)


class _PretrainedTokenizer:
    """A Hugging Face tokenizer behind the verbs of :class:`Tokenizer`."""

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        # The embedding may be larger than the tokenizer's vocabulary, and its spare ids can be sampled.
        self.vocabulary_size = vocabulary_size
        self.eos_id = int(tokenizer.eos_token_id)
        self.eos_text = str(tokenizer.eos_token)
        self.pad_id = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_id)

    def encode(self, text: str) -> list[int]:
        return [int(token_id) for token_id in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        from jinja2.exceptions import (
            TemplateError,
        )  # transformers renders with it, and takes a while to import

        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"model.path: the tokenizer of {self._tokenizer.name_or_path} has no chat template, so it cannot say how "
                "a conversation reads: add a chat_template.jinja there, or let the agent send prompts to /v1/completions"
            )
        conversation = [
            {name: value for name, value in asdict(message).items() if value is not None}
            for message in messages
        ]
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error
        return str(rendered)
