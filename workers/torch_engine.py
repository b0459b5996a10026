"""A generation engine in torch: continuous batching over a fixed number of slots, one decode loop, one torch thread."""

import asyncio
import inspect
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from kinlog.schemas.reasons import FinishReason
from kinlog.workers.engines import (
    Completion,
    EngineClosedError,
    GeneratedTokens,
    GenerationRequest,
    check_request,
)
from kinlog.workers.model import Policy
from kinlog.workers.slot_cache import SlotCache

__all__ = ["TorchEngine"]


class _Sequence:
    """A request under way: the event loop owns it between steps, the torch thread during one."""

    __slots__ = (
        "finish",
        "future",
        "generator",
        "joined",
        "request",
        "slot",
        "tokens",
    )

    def __init__(
        self, request: GenerationRequest, tokens: GeneratedTokens, future: asyncio.Future[Completion]
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.future = future
        self.generator = torch.Generator().manual_seed(request.seed)
        for _ in range(len(tokens)):  # one number a token: the next is drawn as if all had been drawn here
            _uniform(self.generator)
        self.slot = -1
        self.joined = False
        """Whether its slot holds the keys and values of all its tokens but the last."""
        self.finish: FinishReason | None = None

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """The prompt, and what was generated after it."""
        return (*self.request.prompt_token_ids, *self.tokens.token_ids)


def _uniform(generator: torch.Generator) -> torch.Tensor:
    return torch.rand((), dtype=torch.float64, generator=generator)


class TorchEngine:
    """Generate with a policy in this process. Implements :class:`kinlog.workers.engines.Engine`.

    Requests share a batch of ``max_batch_size`` slots: one that waits joins at the next token, one that ends leaves
    at once. Every decode step has the same shape, so that a request's tokens and log-probabilities follow from
    weights, prompt and seed alone, bit for bit with the same build of torch and number of threads.

    Torch runs in one thread of its own, so the event loop is never blocked; steps and weight updates queue for that
    thread, so an update always falls between two tokens. Keys and values that older weights computed are kept, as
    is usual for updates in flight: recorded log-probabilities are those of the distribution sampled from.

    An error in a step is fatal: it fails what is pending, and every later call, with that error.

    Parameters
    ----------
    policy:
        Its model becomes the engine's: in evaluation mode, and overwritten by weight updates.
    max_batch_size:
        Sequences decoded together.
    weight_version:
        Version of the policy's weights.
    num_threads:
        Torch threads of a step.
    """

    def __init__(
        self, policy: Policy, *, max_batch_size: int, weight_version: int = 0, num_threads: int = 1
    ) -> None:
        self._model = policy.model.eval()
        self._eos_id = policy.tokenizer.eos_id
        self._pad_id = policy.tokenizer.pad_id
        self._vocabulary_size = policy.tokenizer.vocabulary_size
        self._cache = SlotCache(
            self._model.config, num_slots=max_batch_size, max_positions=policy.max_positions
        )
        # transformers 5.24 renamed the argument; the old name warns on every call.
        forward_parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in forward_parameters else "past_key_values"
        self._weight_version = weight_version
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._free_slots = list(range(max_batch_size))
        self._work = asyncio.Event()
        self._failure: BaseException | None = None
        self._decode_task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="torch-engine", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._weight_version

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine: every further call raises it. ``None`` while it works."""
        return self._failure

    async def generate(self, request: GenerationRequest, tokens: GeneratedTokens | None = None) -> Completion:
        """Return the completion of ``request`` as soon as it has ended. Cancelling the await drops the request.

        Tokens that are given are read again as a whole, as the prompt is. The numbers that the others are drawn by are
        those of an uninterrupted call; the last bits of their log-probabilities need not be.

        Raises
        ------
        ValueError
            The prompt is empty, has ids outside the vocabulary, or leaves no room for ``max_new_tokens``.
        EngineClosedError
            The engine is closed.
        """
        if self._failure is not None:
            raise self._failure
        check_request(request, vocabulary_size=self._vocabulary_size, max_positions=self._cache.max_positions)
        tokens = GeneratedTokens() if tokens is None else tokens
        ended = tokens.end(eos_id=self._eos_id, max_new_tokens=request.max_new_tokens)
        if ended is not None:
            return tokens.completion(ended)
        sequence = _Sequence(request, tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(sequence)
        self._work.set()
        if self._decode_task is None:
            self._decode_task = asyncio.create_task(self._decode(), name="torch-engine-decode")
            self._decode_task.add_done_callback(self._fail_pending)
        return await sequence.future  # a cancelled await cancels the future, which the decode loop looks at

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy ``state_dict`` (parameters by name, float32) into the model between two tokens, as ``version``.

        Raises
        ------
        ValueError
            A parameter is missing, unknown, or of another shape; the weights are then unchanged.
        EngineClosedError
            The engine is closed.
        """
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._load_weights, state_dict, version)

    async def close(self) -> None:
        """Fail what is pending with :class:`EngineClosedError`, and end the torch thread. Harmless if repeated."""
        if self._failure is None:
            self._failure = EngineClosedError("the generation engine is closed")
        if self._decode_task is not None:
            self._decode_task.cancel()
            await asyncio.wait([self._decode_task])
        await asyncio.to_thread(self._thread.shutdown)

    def _fail_pending(self, decode_task: asyncio.Task[None]) -> None:
        if not decode_task.cancelled() and decode_task.exception() is not None:
            self._failure = decode_task.exception()
        failure = self._failure or EngineClosedError("the generation engine's event loop ended")
        self._failure = failure
        for sequence in (*self._running, *self._waiting):
            if not sequence.future.done():
                sequence.future.set_exception(failure)
        self._running.clear()
        self._waiting.clear()

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._drop_abandoned()
            joining = self._admit()
            if not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            await loop.run_in_executor(self._thread, self._step, joining)
            for sequence in self._running:
                if sequence.finish is not None and not sequence.future.done():
                    sequence.future.set_result(sequence.tokens.completion(sequence.finish))

    def _drop_abandoned(self) -> None:
        """Free the slots of sequences that were answered, or whose caller has gone."""
        for sequence in self._running:
            if sequence.future.done():
                self._free_slots.append(sequence.slot)
        self._running = [sequence for sequence in self._running if not sequence.future.done()]

    def _admit(self) -> list[_Sequence]:
        joining: list[_Sequence] = []
        while self._waiting and self._free_slots:
            sequence = self._waiting.popleft()
            if sequence.future.done():
                continue
            sequence.slot = self._free_slots.pop()
            joining.append(sequence)
        self._running.extend(joining)
        return joining

    def _load_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        parameters = dict(self._model.named_parameters())
        if parameters.keys() != state_dict.keys():
            difference = sorted(parameters.keys() ^ state_dict.keys())
            raise ValueError(
                f"expected the model's parameters by name, found differences in {difference[:4]}"
            )
        for name, parameter in parameters.items():
            if parameter.shape != state_dict[name].shape:
                raise ValueError(
                    f"{name}: expected shape {tuple(parameter.shape)}, found {tuple(state_dict[name].shape)}"
                )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state_dict[name])
        self._weight_version = version

    def _step(self, joining: list[_Sequence]) -> None:
        """Give every running sequence one token: the torch thread's work."""
        decoding = [sequence for sequence in self._running if sequence.joined]
        with torch.inference_mode():
            if decoding:
                self._decode_one_token(decoding)
            siblings: dict[tuple[int, ...], list[_Sequence]] = {}
            for sequence in joining:
                siblings.setdefault(sequence.known_token_ids, []).append(sequence)
                sequence.joined = True
            for token_ids, sequences in siblings.items():
                self._prefill(token_ids, sequences)

    def _prefill(self, token_ids: tuple[int, ...], sequences: list[_Sequence]) -> None:
        """Read a prompt, and what was generated after it before, once for all that join with it.

        Alone, in a shape that the prompt itself gives: reading several prompts as one batch would make the sums of
        each depend on the others.
        """
        prompt = torch.tensor([token_ids], dtype=torch.int64)
        mask = self._cache.point_at_slot(sequences[0].slot, len(token_ids))
        logits = self._forward(prompt, torch.arange(len(token_ids)).unsqueeze(0), mask)
        for sequence in sequences[1:]:
            self._cache.copy_slot(sequences[0].slot, sequence.slot)
        self._sample(logits.expand(len(sequences), -1), list(enumerate(sequences)))

    def _decode_one_token(self, sequences: list[_Sequence]) -> None:
        num_slots = self._cache.num_slots
        token_ids = [self._pad_id] * num_slots
        positions = [0] * num_slots
        for sequence in sequences:
            token_ids[sequence.slot] = sequence.tokens.token_ids[-1]
            positions[sequence.slot] = len(sequence.request.prompt_token_ids) + len(sequence.tokens) - 1
        position_ids = torch.tensor(positions, dtype=torch.int64).unsqueeze(1)
        mask = self._cache.point_at_all(position_ids)
        logits = self._forward(torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1), position_ids, mask)
        self._sample(logits, [(sequence.slot, sequence) for sequence in sequences])

    def _forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the last token's logits, float32 ``(batch, vocabulary)``."""
        output = self._model(
            input_ids=token_ids,
            position_ids=position_ids,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _sample(self, logits: torch.Tensor, sequences: list[tuple[int, _Sequence]]) -> None:
        """Draw a token for each ``(row of logits, sequence)`` by inverting the cumulative distribution.

        One uniform number a token from the sequence's own generator; sampling for the batch as a whole would tie a
        sequence's draw to its row.
        """
        temperatures = torch.ones(logits.shape[0], 1)
        uniforms = torch.zeros(logits.shape[0], 1, dtype=torch.float64)
        for row, sequence in sequences:
            temperatures[row] = sequence.request.temperature
            uniforms[row] = _uniform(sequence.generator)
        logprobs = torch.log_softmax(logits / temperatures, dim=-1)
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        drawn = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
        drawn.clamp_(max=logits.shape[1] - 1)
        drawn_logprobs = logprobs.gather(1, drawn)[:, 0].tolist()
        drawn_ids = drawn[:, 0].tolist()
        for row, sequence in sequences:
            sequence.tokens.append(drawn_ids[row], drawn_logprobs[row], self._weight_version)
            sequence.finish = sequence.tokens.end(
                eos_id=self._eos_id, max_new_tokens=sequence.request.max_new_tokens
            )
