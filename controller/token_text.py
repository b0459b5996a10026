"""From token ids and prompt references to text, with what is installed: nothing of it needs torch."""

from collections.abc import Callable, Sequence

from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import KinlogError
from kinlog.schemas.prompts import PromptRef

__all__ = ["prompt_lookup", "token_decoder"]


def token_decoder(config: RunConfig) -> Callable[[Sequence[int]], str] | None:
    """Return what makes text of token ids, or ``None`` where the tokenizer is not installed."""
    if config.model.path is None:
        from kinlog.workers.tokenizer import CharacterTokenizer

        return CharacterTokenizer(config.model.alphabet).decode
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None  # not installed, or the model's directory is not on this machine

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return decode


def prompt_lookup(config: RunConfig) -> Callable[[PromptRef], str | None]:
    """Return what looks the text of a prompt up in the run's dataset; it finds none where that is not at hand.

    A row that has changed since it was drawn is not the one that was trained on: it is none either.
    """
    try:
        from kinlog.workers.tasks import TaskMixture

        dataset = TaskMixture(config.dataset)
    except (ImportError, KinlogError):
        return lambda prompt: None

    def look_up(prompt: PromptRef) -> str | None:
        try:
            item = dataset.resolve(prompt.sample_id)
        except KinlogError:
            return None
        return item.prompt if item.content_digest == prompt.content_digest else None

    return look_up
