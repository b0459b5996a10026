"""One vLLM for all tests that can share it: starting one takes some ten seconds."""

from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count

import pytest
import pytest_asyncio
import torch
from kinlog_vllm import Weights, vllm_config

from kinlog.schemas.settings import InFlightUpdates
from kinlog.workers.open_engine import prepare_engine
from kinlog.workers.vllm_engine import VllmEngine


@pytest.fixture(scope="session")
def weights() -> Weights:
    torch.set_num_threads(1)  # the engine's own threads are on the same cores
    return Weights()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine() -> AsyncIterator[VllmEngine]:
    """The engine that a generation worker would start. Its weights are whatever the last test left."""
    engine = await prepare_engine(vllm_config()).start()
    assert isinstance(engine, VllmEngine)
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def versions() -> Iterator[int]:
    """Versions that no test has used yet: even ones for the policy's own weights, odd ones for the others."""
    return count(2)


@pytest.fixture
def with_policy(engine: VllmEngine) -> Callable[[InFlightUpdates], VllmEngine]:
    """Return a maker of engines over the same vLLM, with another policy of updates."""

    def make(in_flight_updates: InFlightUpdates) -> VllmEngine:
        return VllmEngine(
            engine._llm,
            engine._model,
            in_flight_updates=in_flight_updates,
            weight_version=engine.weight_version,
        )

    return make
