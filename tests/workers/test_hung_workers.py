"""Generation workers that hang: found out by their probes, killed so that Ray restarts them, and waited for by nobody."""

import asyncio

import pytest
import ray
from kinlog_interleavings import run_by_chance, ticks
from kinlog_lives import run_config
from ray.exceptions import RayActorError

from kinlog.controller.ray_parts import rollout_pool
from kinlog.schemas.errors import WorkerLostError
from kinlog.schemas.settings import InFlightUpdates
from kinlog.workers.ray_adapters import RayRolloutPool, RevivedActor


class Method:
    """A remote method: answers, or hangs until its actor is killed."""

    def __init__(self, actor: "Actor") -> None:
        self._actor = actor

    def remote(self, *arguments: object) -> "asyncio.Future[None]":
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._actor.hangs:
            self._actor.calls.append(call)
        else:
            call.set_result(None)
        return call


class Actor:
    """A handle of an actor that may hang."""

    def __init__(self) -> None:
        self.hangs = False
        self.killed = 0
        self.calls: list[asyncio.Future[None]] = []
        self.attach = self.probe = self.run = self.update_weights = Method(self)

    def kill(self) -> None:
        self.killed += 1
        self.hangs = False
        for call in self.calls:
            if not call.done():
                call.set_exception(RayActorError())


@pytest.fixture(autouse=True)
def killing(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(handle: Actor, *, no_restart: bool) -> None:
        assert not no_restart
        handle.kill()

    monkeypatch.setattr(ray, "kill", kill)


def workers_of(*actors: Actor) -> list[RevivedActor]:
    return [
        RevivedActor(f"generation-{number}", actor, restart_timeout_s=60.0)
        for number, actor in enumerate(actors)
    ]


async def pool_of(*actors: Actor) -> RayRolloutPool:
    pool = RayRolloutPool(workers_of(*actors), probe_timeout_s=5.0, max_unanswered=1)
    await pool.prepare()
    return pool


def test_worker_that_hangs_is_killed_and_what_it_was_asked_for_ends():
    async def main() -> None:
        sound, hung = Actor(), Actor()
        pool = await pool_of(sound, hung)
        hung.hangs = True
        call = asyncio.create_task(pool.run("generation-1", None))  # type: ignore[arg-type]
        await pool.probe()  # one worker answers: rollouts go on
        assert (hung.killed, call.done()) == (0, False)
        await pool.probe()
        assert (hung.killed, sound.killed) == (1, 0)
        with pytest.raises(WorkerLostError, match="generation-1"):
            await call
        await pool.available()
        await ticks()
        assert {pool.assign(), pool.assign()} == {"generation-0", "generation-1"}  # it is there again

    run_by_chance(main())


def test_only_worker_is_killed_before_the_run_would_be_stopped_and_comes_back():
    async def main() -> None:
        hung = Actor()
        pool = await pool_of(hung)
        hung.hangs = True
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="in a row unanswered"):
                await pool.probe()
        assert hung.killed == 1
        await pool.probe()  # it is being restarted, and given its time
        await pool.available()
        await pool.probe()

    run_by_chance(main())


def test_probe_that_is_answered_late_once_is_forgiven():
    async def main() -> None:
        slow = Actor()
        pool = await pool_of(slow)
        for _ in range(3):
            slow.hangs = True
            with pytest.raises(WorkerLostError):
                await pool.probe()
            slow.hangs = False
            await pool.probe()
        assert slow.killed == 0

    run_by_chance(main())


@pytest.mark.parametrize(("in_flight_updates", "more_s"), [("continue", 0.0), ("finish", 70.0)])
def test_worker_that_finishes_its_calls_before_it_takes_new_weights_is_given_their_time(
    in_flight_updates: InFlightUpdates, more_s: float
):
    config = run_config(
        generation__engine="vllm",
        generation__in_flight_updates=in_flight_updates,
        rollout__sibling_timeout_s=70.0,
        supervision__probe_timeout_s=10.0,
        supervision__max_failed_probes=4,
    )

    async def main() -> None:
        slow = Actor()
        pool = rollout_pool(config, workers_of(slow))
        await pool.prepare()
        slow.hangs = True
        began_s = asyncio.get_running_loop().time()
        await pool.update_weights("weights", 1)
        assert slow.killed == 1
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(3 * 5.0 + more_s)

    run_by_chance(main())
