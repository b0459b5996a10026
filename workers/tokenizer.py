"""A character tokenizer, and the few verbs by which rollouts reach any tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kinlog.schemas.errors import ConfigError

__all__ = ["ChatMessage", "Tokenizer", "CharacterTokenizer"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, as the policy is to read it."""

    role: str
    content: str
    name: str | None = None
    """Who of several speaks, if the template writes it."""
    tool_call_id: str | None = None
    """What a tool's message answers, if the template writes it."""


class Tokenizer(Protocol):
    """What a rollout needs of a tokenizer."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids: every id is below it."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends a completion; it is part of the completion."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that fills a row up to the batch's length; it never carries loss."""
        ...

    @property
    def eos_text(self) -> str:
        """What stands for the end token in the text of a conversation; empty if nothing does."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, special tokens left out."""
        ...

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of a conversation, up to where the policy's reply begins.

        Raises
        ------
        ConfigError
            The tokenizer has no chat template.
        ValueError
            The template does not take these messages.
        """
        ...


class CharacterTokenizer:
    """One token a character, over a small alphabet, after ``pad`` (0), ``bos`` (1) and ``eos`` (2).

    A small alphabet is what lets a policy of random weights hit a short answer often enough to learn from it.

    Parameters
    ----------
    alphabet:
        The characters, in the order of their ids.

    Raises
    ------
    ConfigError
        A character occurs twice.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    eos_text = ""
    _first_character_id = 3

    def __init__(self, alphabet: str) -> None:
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if repeated:
            raise ConfigError(
                f"model.alphabet: expected distinct characters, found {repeated} more than once"
            )
        self._characters = alphabet
        self._ids = {character: self._first_character_id + place for place, character in enumerate(alphabet)}

    @property
    def vocabulary_size(self) -> int:
        """Characters and special tokens."""
        return self._first_character_id + len(self._characters)

    def encode(self, text: str) -> list[int]:
        """Return one id a character.

        Raises
        ------
        ConfigError
            A character is not in the alphabet.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ConfigError(
                f"character {error.args[0]!r} of {text[:80]!r} is not in model.alphabet {self._characters!r}: "
                "add it there"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the characters of ``token_ids``; special tokens have none."""
        return "".join(
            self._characters[token_id - self._first_character_id]
            for token_id in token_ids
            if token_id >= self._first_character_id
        )

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """Return what was said, one after the other: the alphabet has no marks for who says it."""
        return "".join(message.content for message in messages)
