"""Actors that Ray loses or that hang, behind the controller's protocols: no cluster, handles that answer as told."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from kinlog.schemas.errors import DataPlaneError, WorkerLostError
from kinlog.workers.ray_adapters import RayRolloutPool, RevivedActor

Answer = Callable[..., Awaitable[object]]


async def nothing(*args: object) -> None:
    return


async def never(*args: object) -> None:
    await asyncio.get_running_loop().create_future()


def raises(error: BaseException) -> Answer:
    async def answer(*args: object) -> None:
        raise error

    return answer


class Method:
    def __init__(self, answer: Answer) -> None:
        self.remote = answer


class Handle:
    """An actor's handle. Every method answers nothing, unless told otherwise."""

    def __init__(self, **answers: Answer) -> None:
        for name in ("attach", "probe", "run", "update_weights"):
            setattr(self, name, Method(answers.get(name, nothing)))


def pool_of(*workers: RevivedActor) -> RayRolloutPool:
    return RayRolloutPool(list(workers), probe_timeout_s=0.01, max_unanswered=1)


async def prepared(name: str, handle: Handle) -> RevivedActor:
    actor = RevivedActor(name, handle, restart_timeout_s=5)
    await actor.prepare()
    return actor


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    handles: list[Handle] = []
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: handles.append(handle))
    return handles


LOST = [
    OutOfMemoryError("the node is out of memory"),
    ObjectLostError("00ff", None, "here"),
    OwnerDiedError("00ff", None, "here"),
    RaySystemError("the raylet is gone"),
    ActorUnavailableError("no connection", None),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_whatever_ray_loses_an_answer_by_is_a_lost_worker_and_not_the_end_of_the_run(error: RayError):
    actor = await prepared("generation-0", Handle(run=raises(error)))
    with pytest.raises(WorkerLostError, match=f"generation-0: {type(error).__name__}"):
        await pool_of(actor).run("generation-0", None)  # type: ignore[arg-type]
    assert not actor.ready, "it is attached again before it is used again"


async def test_error_that_the_actor_raised_is_raised_as_itself():
    cause = DataPlaneError("no answer")
    raised = RayTaskError("run", "traceback", cause)
    actor = await prepared("generation-0", Handle(run=raises(raised)))
    with pytest.raises(DataPlaneError) as caught:
        await pool_of(actor).run("generation-0", None)  # type: ignore[arg-type]
    assert caught.value is cause
    assert actor.ready


async def test_worker_that_does_not_take_new_weights_is_killed_and_the_others_go_on(killed: list[Handle]):
    good, hung = Handle(), Handle(update_weights=never)
    workers = await prepared("generation-0", good), await prepared("generation-1", hung)
    pool = pool_of(*workers)
    await pool.update_weights({}, 1)
    assert killed == [hung]
    assert [worker.ready for worker in workers] == [True, False]
    assert {pool.assign() for _ in range(4)} == {"generation-0"}, "it is out of rotation"
