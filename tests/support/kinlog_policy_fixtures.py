"""Small policies, datasets and rows for the tests of the workers."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest
import torch

from kinlog.schemas.reasons import FinishReason
from kinlog.schemas.settings import DatasetSettings, ModelSettings, TaskSettings
from kinlog.workers.engines import Completion, GeneratedTokens, GenerationRequest
from kinlog.workers.grpo import TrainingRow
from kinlog.workers.model import load_policy
from kinlog.workers.tasks import TaskMixture
from kinlog.workers.tokenizer import CharacterTokenizer
from kinlog.workers.torch_engine import TorchEngine

MODEL = ModelSettings(hidden_size=32, num_layers=2, num_heads=2, max_positions=48, seed=7)
TASKS = (
    TaskSettings(
        name="divisors",
        generator="gcd",
        agent="single_turn",
        options={"min_value": 1, "max_value": 9},
        share=2,
    ),
    TaskSettings(name="bits", generator="count_bits", agent="retry", options={"min_n": 1, "max_n": 15}),
)


class ScriptedEngine:
    """Answers with given texts in turn, each ended by eos unless told otherwise, and keeps the requests."""

    weight_version = 3

    def __init__(self, answers: Sequence[str], *, stop: bool = True, logprob: float = -1.0) -> None:
        self._tokenizer = CharacterTokenizer(MODEL.alphabet)
        self._answers = list(answers)
        self._stop = stop
        self._logprob = logprob
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, tokens: GeneratedTokens | None = None) -> Completion:
        self.requests.append(request)
        token_ids = self._tokenizer.encode(self._answers[len(self.requests) - 1])
        token_ids += [self._tokenizer.eos_id] * self._stop
        return Completion(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            logprobs=torch.full((len(token_ids),), self._logprob),
            weight_versions=torch.full((len(token_ids),), self.weight_version, dtype=torch.int32),
            finish_reason=FinishReason.STOP if self._stop else FinishReason.LENGTH,
        )

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        raise AssertionError("a rollout never updates weights")

    async def close(self) -> None:
        self.requests.clear()


@pytest.fixture
def model_settings() -> ModelSettings:
    return MODEL


@pytest.fixture
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer(MODEL.alphabet)


@pytest.fixture
def dataset_settings() -> DatasetSettings:
    return DatasetSettings(size=30, seed=1, tasks=TASKS)


@pytest.fixture
def mixture(dataset_settings: DatasetSettings) -> TaskMixture:
    return TaskMixture(dataset_settings)


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
async def make_engine() -> AsyncIterator[Callable[..., TorchEngine]]:
    """Return a maker of engines over the same small policy; they are closed when the test ends."""
    engines: list[TorchEngine] = []

    def make(*, max_batch_size: int = 4, weight_version: int = 0) -> TorchEngine:
        engine = TorchEngine(load_policy(MODEL), max_batch_size=max_batch_size, weight_version=weight_version)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def rows() -> list[TrainingRow]:
    """Two groups of three siblings, uneven in length, with rewards that differ inside each group."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for group_id in (11, 12):
        for generation in range(3):
            length = 6 + 2 * generation + group_id % 2
            loss_mask = torch.zeros(length, dtype=torch.bool)
            loss_mask[4:] = True
            made.append(
                TrainingRow(
                    group_id=group_id,
                    generation=generation,
                    token_ids=torch.randint(3, 20, (length,), generator=generator),
                    loss_mask=loss_mask,
                    logprobs=torch.full((length,), -3.0),
                    weight_versions=torch.zeros(length, dtype=torch.int32),
                    reward=float(generation == 1) + 0.1 * generation,
                )
            )
    return made
