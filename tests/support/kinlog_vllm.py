"""A vLLM engine over a small policy, and what torch says of the completions that come from it."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch
from msgspec.structs import replace
from transformers import DynamicCache

from kinlog.schemas.config import RunConfig, parse_config
from kinlog.workers.engines import Completion, GenerationRequest
from kinlog.workers.model import load_policy

TEMPERATURE = 0.7
PROMPT = (5, 6, 7, 8)
BLOCK_SIZE = 32
"""Tokens of which vLLM keeps the keys and values together, and finds them again."""

#: So many that a completion seldom ends by itself.
_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

_CONFIG = f"""\
model: {{hidden_size: 64, num_layers: 2, num_heads: 2, max_positions: 160, seed: 7, alphabet: {_ALPHABET}}}
generation:
  engine: vllm
  max_batch_size: 8
  vllm: {{dtype: float32, enforce_eager: true, kv_cache_gib: 0.125, engine_args: {{block_size: {BLOCK_SIZE}}}}}
dataset: {{tasks: [{{name: gcd, generator: gcd, agent: single_turn}}]}}
"""


def vllm_config(*, tensor_parallel_size: int = 1) -> RunConfig:
    config = parse_config(_CONFIG)
    vllm = replace(config.generation.vllm, tensor_parallel_size=tensor_parallel_size)
    return replace(config, generation=replace(config.generation, vllm=vllm))


def request(
    *, seed: int = 0, prompt: tuple[int, ...] = PROMPT, max_new_tokens: int = 12
) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt, max_new_tokens=max_new_tokens, temperature=TEMPERATURE, seed=seed
    )


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until something holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


class Weights:
    """Versions of the small policy: 0 is what an engine is started with, and odd ones are far from even ones.

    Except with version 0, completions hardly ever end by themselves.
    """

    def __init__(self) -> None:
        policies = [load_policy(vllm_config().model) for _ in range(3)]
        self._made, self._even, self._odd = (policy.model.eval() for policy in policies)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self._odd.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            for model in (self._even, self._odd):
                # Below the other tokens' on average, by more the surer the model is.
                model.get_parameter("lm_head.weight")[policies[0].tokenizer.eos_id] = 0.0

    def model(self, version: int) -> torch.nn.Module:
        if version == 0:
            return self._made
        return self._odd if version % 2 else self._even

    def state_dict(self, version: int) -> Mapping[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model(version).named_parameters()}

    def prefer(self, token_id: int) -> Mapping[str, torch.Tensor]:
        """Weights that all but certainly sample one token, whatever they read."""
        weights = {name: torch.zeros_like(value) for name, value in self.state_dict(0).items()}
        # One feature is 1 for every token: the norm makes it the square root of the width, and the head looks at it.
        weights["model.embed_tokens.weight"][:, 0] = 1.0
        weights["model.norm.weight"][0] = 1.0
        weights["lm_head.weight"][token_id, 0] = 10.0
        return weights


def logprobs_by_torch(
    weights: Weights,
    completion: Completion,
    *,
    prompt: tuple[int, ...] = PROMPT,
    read_again: bool = False,
) -> torch.Tensor:
    """What the model of each token's own version says of it, one token at a time.

    Keys and values stay as the weights computed them that read the token first; with ``read_again``, each change of
    version reads everything anew.
    """
    tokens = completion.token_ids.tolist()
    versions = completion.weight_versions.tolist()
    logprobs = []
    cache, read = DynamicCache(), 0
    for position, (token_id, version) in enumerate(zip(tokens, versions, strict=True)):
        if read_again and position > 0 and version != versions[position - 1]:
            cache, read = DynamicCache(), 0
        known = [*prompt, *tokens[:position]]
        with torch.no_grad():
            output = weights.model(version)(
                input_ids=torch.tensor([known[read:]]), past_key_values=cache, use_cache=True
            )
        read = len(known)
        logprobs.append(torch.log_softmax(output.logits[0, -1] / TEMPERATURE, dim=-1)[token_id])
    return torch.stack(logprobs)


def assert_logprobs(
    weights: Weights,
    completion: Completion,
    *,
    prompt: tuple[int, ...] = PROMPT,
    read_again: bool = False,
) -> None:
    expected = logprobs_by_torch(weights, completion, prompt=prompt, read_again=read_again)
    torch.testing.assert_close(completion.logprobs, expected, rtol=1e-4, atol=1e-4)


def engine_processes(owner: psutil.Process) -> list[psutil.Process]:
    """vLLM's processes that a process has started: its engine first, then those that compute."""
    return [child for child in owner.children(recursive=True) if child.name().startswith("VLLM::")]


def core_of(owner: psutil.Process) -> psutil.Process:
    return next(process for process in engine_processes(owner) if "EngineCore" in process.name())


def memory_files() -> set[str]:
    """The memory files of this process that hold weights."""
    return {
        target
        for link in Path("/proc/self/fd").iterdir()
        if "kinlog-weights" in (target := str(link.readlink() if link.is_symlink() else ""))
    }
