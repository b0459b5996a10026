"""A generation worker whose engine has failed ends its process, whoever notices first: Ray starts another."""

import os
from collections.abc import Mapping

import pytest
import torch
from kinlog_attached import AttachedWorker, tiny_config

from kinlog.schemas.orders import RolloutFailed
from kinlog.workers.engines import Completion, GeneratedTokens, GenerationRequest


class Exited(BaseException):
    """The process would have ended."""


class FailingEngine:
    """Refuses everything; ``failure`` says whether for good."""

    weight_version = 0

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure

    async def generate(self, request: GenerationRequest, tokens: GeneratedTokens | None = None) -> Completion:
        raise self.failure or ValueError("not this request")

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        raise self.failure or ValueError("not these weights")

    async def close(self) -> None:
        return


@pytest.fixture(autouse=True)
def exiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_at_once(status: int) -> None:
        raise Exited

    monkeypatch.setattr(os, "_exit", exit_at_once)


@pytest.mark.parametrize("noticed_by", ["probe", "update", "rollout"])
async def test_engine_that_has_failed_ends_the_worker_at_whatever_is_asked_next(noticed_by: str):
    attached = AttachedWorker(
        tiny_config("single_turn", max_new_tokens=4), FailingEngine(RuntimeError("dead"))
    )
    with pytest.raises(Exited):
        match noticed_by:
            case "probe":
                await attached.worker.probe()
            case "update":
                await attached.worker.update_weights({}, 1)
            case "rollout":
                await attached.worker.run(attached.order())
    await attached.close()


async def test_engine_that_refuses_and_works_on_ends_nothing():
    attached = AttachedWorker(tiny_config("single_turn", max_new_tokens=4), FailingEngine(None))
    await attached.worker.probe()
    with pytest.raises(ValueError, match="not these weights"):
        await attached.worker.update_weights({}, 1)
    assert isinstance(await attached.worker.run(attached.order()), RolloutFailed)
    await attached.close()
