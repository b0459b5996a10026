"""Which generation engine a worker runs: chosen by ``generation.engine``."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kinlog.schemas.config import RunConfig
from kinlog.workers.engines import Engine
from kinlog.workers.model import load_policy, load_tokenizer
from kinlog.workers.tokenizer import Tokenizer
from kinlog.workers.torch_engine import TorchEngine
from kinlog.workers.vllm_start import start_vllm

__all__ = ["PreparedEngine", "prepare_engine"]


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine whose model is at hand, and that has not been started."""

    tokenizer: Tokenizer
    start: Callable[[], Awaitable[Engine]]
    """Called once, on the event loop that the engine is to belong to."""


def prepare_engine(config: RunConfig) -> PreparedEngine:
    """Read or make the model that ``config`` names, for its engine.

    Raises
    ------
    ConfigError
        The model does not fit.
    """
    if config.generation.engine == "vllm":
        tokenizer = load_tokenizer(config.model)
        return PreparedEngine(tokenizer, lambda: start_vllm(config, tokenizer))
    policy = load_policy(config.model)

    async def start() -> Engine:
        return TorchEngine(policy, max_batch_size=config.generation.max_batch_size)

    return PreparedEngine(policy.tokenizer, start)
