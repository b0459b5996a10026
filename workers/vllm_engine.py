"""A generation engine on vLLM: every request its own, weights replaced in place, each token stamped with its version."""

import asyncio
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

import torch

from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.settings import InFlightUpdates
from kinlog.workers.engines import (
    Completion,
    EngineClosedError,
    GeneratedTokens,
    GenerationRequest,
    check_request,
)
from kinlog.workers.vllm_weights import WeightsFile, check_weights

__all__ = ["ServedModel", "VllmEngine"]


class _Pause(NamedTuple):
    mode: str
    clear_cache: bool


_PAUSES: Mapping[InFlightUpdates, _Pause] = {
    # Requests stay in their batch, with the keys and values that they have.
    "continue": _Pause("keep", clear_cache=False),
    # Clearing takes the keys and values of requests under way as well: they are queued again, and read anew.
    "recompute": _Pause("keep", clear_cache=True),
    "finish": _Pause("wait", clear_cache=True),
}


class ServedModel(NamedTuple):
    """What is known of a model without vLLM."""

    eos_id: int
    vocabulary_size: int
    max_positions: int
    """Longest sequence, prompt and completion together, in tokens."""
    parameter_shapes: Mapping[str, torch.Size]
    """By the names that weight updates have."""


class VllmEngine:
    """Generate with vLLM, in processes of its own. Implements :class:`kinlog.workers.engines.Engine`.

    Nothing here depends on where vLLM computes: the CPU build and the CUDA build are asked the same.

    An update pauses generation after a step, loads, has vLLM label what it samples from then on, and resumes. vLLM
    attaches that label where the tokens are made, so stamps are exact however late a token is read here. Requests that
    come during an update wait for its end.

    Keys and values that older weights computed are never found by later requests: each request looks its prompt up
    among those of its own weight version only, and ``recompute`` and ``finish`` clear the cache besides. With
    ``continue``, a request that was submitted before the update counts as under way, even if it had no token yet.

    Completions depend on their neighbours in the last bits: not one prompt and seed gives the very same
    log-probabilities in another batch.

    Parameters
    ----------
    llm:
        A ``vllm.v1.engine.async_llm.AsyncLLM`` that belongs to this object, as :mod:`kinlog.workers.vllm_start` makes
        it.
    model:
        What it serves.
    in_flight_updates:
        What an update does to requests under way. ``continue``: they go on with the keys and values they have.
        ``recompute``: they go on after the new weights have read all their tokens. ``finish``: the update waits for
        them.
    weight_version:
        Version of the weights that it was started with.
    """

    def __init__(
        self,
        llm: Any,
        model: ServedModel,
        *,
        in_flight_updates: InFlightUpdates = "continue",
        weight_version: int = 0,
    ) -> None:
        self._llm = llm
        self._model = model
        self._pause = _PAUSES[in_flight_updates]
        self._weight_version = weight_version
        self._pending: set[Any] = set()
        """Where vLLM puts the outputs of requests under way."""
        self._updating = asyncio.Lock()
        self._failure: BaseException | None = None

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._weight_version

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine: every further call raises it. ``None`` while it works."""
        if self._failure is None and self._llm.errored:
            self._failure = self._llm.dead_error
        return self._failure

    async def label(self) -> None:
        """Have vLLM stamp tokens with the version that it was started with. Called once, before anything else."""
        await self._llm.update_weight_version(str(self._weight_version))

    async def generate(self, request: GenerationRequest, tokens: GeneratedTokens | None = None) -> Completion:
        """Return the completion of ``request`` as soon as it has ended. Cancelling the await aborts the request.

        Tokens that are given are read as a part of the prompt is.

        Raises
        ------
        ValueError
            The prompt is empty, has ids outside the vocabulary, or leaves no room for ``max_new_tokens``.
        EngineClosedError
            The engine is closed.
        """
        self._raise_failure()
        check_request(
            request,
            vocabulary_size=self._model.vocabulary_size,
            max_positions=self._model.max_positions,
        )
        tokens = GeneratedTokens() if tokens is None else tokens
        ended = tokens.end(eos_id=self._model.eos_id, max_new_tokens=request.max_new_tokens)
        if ended is not None:
            return tokens.completion(ended)
        async with self._updating:
            self._raise_failure()
            outputs = await self._submit(request, tokens)
        self._pending.add(outputs)
        try:
            self._raise_failure()  # closed meanwhile
            await self._collect(outputs, tokens)
        except asyncio.CancelledError:
            await self._llm.abort(outputs.request_id, internal=True)
            raise
        finally:
            self._pending.discard(outputs)
        ended = tokens.end(eos_id=self._model.eos_id, max_new_tokens=request.max_new_tokens)
        if ended is None:
            # Nobody here asked for that: vLLM is going down, or the request met an error in its engine.
            raise self._fail(RuntimeError(f"vLLM ended a request after {len(tokens)} tokens, without an end"))
        return tokens.completion(ended)

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        """Load ``state_dict`` (parameters by name) in place, between two steps, as ``version``.

        An error while loading is fatal: nobody could say what the weights are then.

        Raises
        ------
        ValueError
            A parameter is missing, unknown, or of another shape; the weights are then unchanged.
        EngineClosedError
            The engine is closed.
        """
        self._raise_failure()
        check_weights(state_dict, self._model.parameter_shapes)
        async with self._updating:
            self._raise_failure()
            with WeightsFile() as file:
                await asyncio.to_thread(file.write, state_dict)
                try:
                    await self._unless_dead(self._load(file.path, version))
                except BaseException as error:
                    self._fail(error)
                    raise

    async def close(self) -> None:
        """Fail what is pending with :class:`EngineClosedError`, and end vLLM's processes. Harmless if repeated."""
        closed = EngineClosedError("the generation engine is closed")
        self._failure = self._failure or closed
        for outputs in self._pending:
            outputs.put(closed)
        await asyncio.to_thread(self._llm.shutdown)

    async def _load(self, path: str, version: int) -> None:
        await self._llm.pause_generation(mode=self._pause.mode, clear_cache=self._pause.clear_cache)
        await self._llm.collective_rpc("load_kinlog_weights", args=(path,))
        await self._llm.update_weight_version(str(version))
        self._weight_version = version
        await self._llm.resume_generation()

    async def _unless_dead(self, call: Coroutine[Any, Any, None]) -> None:
        """Await ``call``, or the death of vLLM's engine: what that had been asked would never be answered."""
        asked = asyncio.ensure_future(call)
        try:
            # This task of vLLM's runs since the first request, and ends with its engine.
            await asyncio.wait({asked, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._raise_failure()
            await asked
        finally:
            asked.cancel()

    async def _submit(self, request: GenerationRequest, tokens: GeneratedTokens) -> Any:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompt = tokens_input(
            [*request.prompt_token_ids, *tokens.token_ids],
            cache_salt=str(self._weight_version),  # other versions' keys and values are not found
        )
        parameters = SamplingParams(
            max_tokens=request.max_new_tokens - len(tokens),
            temperature=request.temperature,
            seed=_seed_after(request.seed, len(tokens)),
            logprobs=0,  # of the sampled token only
            stop_token_ids=[self._model.eos_id],
            ignore_eos=True,  # ends of the model's own choice: only ours counts
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        return await self._llm.add_request(uuid.uuid4().hex, prompt, parameters)

    async def _collect(self, outputs: Any, tokens: GeneratedTokens) -> None:
        """Append what is generated, as it comes, until the request has ended."""
        # Before anything is awaited: vLLM forgets it when the request ends. The last output then says it all.
        state = self._llm.output_processor.request_states.get(outputs.request_id)
        position = 0
        while True:
            output = await outputs.get()
            (completion,) = output.outputs
            versions = (
                [(span.version, span.start) for span in completion.weight_versions or ()]
                if output.finished or state is None
                else state.weight_version_starts
            )
            for token_id, logprobs in zip(completion.token_ids, completion.logprobs or (), strict=True):
                tokens.append(token_id, logprobs[token_id].logprob, _version_at(versions, position))
                position += 1
            if output.finished:
                return

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: BaseException) -> BaseException:
        """Note what ended the engine, and return what to raise: the first failure, of which others are consequences."""
        self._failure = self._failure or error
        return self._failure


def _version_at(starts: "list[tuple[str, int]]", position: int) -> int:
    """Return the version of the output token at ``position``, of spans given by where they start."""
    return int(next(version for version, start in reversed(starts) if start <= position))


def _seed_after(seed: int, generated_tokens: int) -> int:
    """Return the seed of a request that goes on after some tokens: the draws of those must not come again."""
    if generated_tokens == 0:
        return seed
    digest = digest_bytes(seed.to_bytes(16, "little", signed=True), generated_tokens.to_bytes(8, "little"))
    return int.from_bytes(digest[:8], "little") >> 1
