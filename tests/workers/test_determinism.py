"""A run that asks for it refuses whatever would not repeat itself, in both processes that compute."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from kinlog.schemas.config import RunConfig, load_config
from kinlog.workers.rollout_worker import RolloutWorker
from kinlog.workers.trainer_worker import TrainerWorker


@pytest.fixture
def config() -> RunConfig:
    return load_config(Path(str(files("kinlog.controller"))) / "examples" / "lock_step.yaml")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("worker", [TrainerWorker, RolloutWorker])
def test_worker_of_a_deterministic_run_refuses_operations_that_may_differ(
    worker: type[TrainerWorker] | type[RolloutWorker], config: RunConfig
):
    worker(config)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("worker", [TrainerWorker, RolloutWorker])
def test_worker_of_any_other_run_does_not(
    worker: type[TrainerWorker] | type[RolloutWorker], config: RunConfig
):
    worker(replace(config, deterministic=False))
    assert not torch.are_deterministic_algorithms_enabled()
