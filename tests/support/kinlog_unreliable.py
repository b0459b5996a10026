"""Workers that fail, hang, answer late, lose rows and obey an abort or not, by chance and in virtual time."""

import asyncio
import random

from kinlog_bench import Bench
from kinlog_conformance import Act, RowKeeper
from kinlog_fake_parts import FakeFinalizer, FakePool, Identity

from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.supervise import supervise
from kinlog.controller.train_pump import TrainPump
from kinlog.schemas.errors import WorkerLostError
from kinlog.schemas.events import CanonicalRowRef, SiblingSealed
from kinlog.schemas.orders import FinalizeOrder, FinalizeRejected, RolloutFailed, RolloutOrder
from kinlog.schemas.reasons import Partition, Reason, Validity
from kinlog.schemas.receipts import staging_key

TIMEOUT_S = 10.0
"""What a run with such workers has for ``rollout.sibling_timeout_s``."""


class ChancePool(FakePool):
    """Generation workers. Some answer late: when another attempt runs, or when the group is gone."""

    chance: random.Random
    hangs = 0.0
    """Share of the calls that never end, unless an abort is obeyed, as every other one does."""
    stops: dict[Identity, asyncio.Event]

    def abort(self, worker: str, order: RolloutOrder) -> None:
        super().abort(worker, order)
        stopped = self.stops.get((order.group_id, order.generation, order.attempt))
        if stopped is not None:
            stopped.set()

    async def run(self, worker: str, order: RolloutOrder) -> SiblingSealed | RolloutFailed:
        self.calls.append(order)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            return await self._answer(order)
        finally:
            self.running -= 1

    async def _answer(self, order: RolloutOrder) -> SiblingSealed | RolloutFailed:
        if self.hangs and self.chance.random() < self.hangs:
            stopped = self.stops.setdefault(
                (order.group_id, order.generation, order.attempt), asyncio.Event()
            )
            await (stopped if self.chance.random() < 0.5 else asyncio.Event()).wait()
            return self._failed(order, Reason.SUPERSEDED_ATTEMPT)
        fate = self.chance.random()
        await asyncio.sleep(self.chance.expovariate(1.0) if fate < 0.95 else TIMEOUT_S * 3)
        if fate < 0.80 or fate >= 0.95:
            validity = Validity.FAILED if self.chance.random() < 0.1 else Validity.VALID
            return self.seal(order, validity=validity)
        if fate < 0.85:
            raise WorkerLostError("died")
        return self._failed(order, Reason.DATA_FAILURE if fate < 0.90 else Reason.INFRASTRUCTURE_FAILURE)

    def _failed(self, order: RolloutOrder, reason: Reason) -> RolloutFailed:
        return RolloutFailed(
            group_id=order.group_id,
            generation=order.generation,
            attempt=order.attempt,
            reason=reason,
            detail="by chance",
        )


class ChanceFinalizer(FakeFinalizer):
    """A finalizer that misses rows and loses answers."""

    chance: random.Random

    async def finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        await asyncio.sleep(self.chance.expovariate(2.0))
        rows = self._data_plane.rows[Partition.STAGING]
        for sealed in order.siblings:
            key = staging_key(sealed.group_id, sealed.generation, sealed.attempt, 0)
            missing = sealed.receipt is not None and key not in rows
            if missing or self.chance.random() < 0.02:
                return FinalizeRejected(
                    group_id=order.group_id,
                    generation=sealed.generation,
                    reason=Reason.ROWS_MISSING,
                    detail=key,
                )
        self.lose_answers = self.chance.random() < 0.1
        answer = await super().finalize(order)
        await asyncio.sleep(self.chance.expovariate(2.0))
        return answer


def make_unreliable(bench: Bench, chance: random.Random, *, hangs: float = 0.0) -> None:
    """Put such workers in."""
    bench.pool.__class__, bench.finalizer.__class__ = ChancePool, ChanceFinalizer
    bench.pool.chance = bench.finalizer.chance = chance  # type: ignore[attr-defined]
    bench.pool.hangs, bench.pool.stops = hangs, {}  # type: ignore[attr-defined]


def lived(events: int | None, chance: random.Random, *, hangs: float = 0.0) -> Act:
    """A life on unreliable workers: killed after so many events, unless it has ended before; ``None``: to its end."""

    async def act(bench: Bench) -> None:
        make_unreliable(bench, chance, hangs=hangs)
        last_seq = None if events is None else bench.p.last_seq + events
        life = asyncio.create_task(
            supervise(
                [
                    ("rollout", RolloutPump(bench.runtime, bench.driver).run()),
                    ("train", TrainPump(bench.runtime, RowKeeper(bench), lambda metrics: None).run()),
                ],
                until="train",
            )
        )
        life.add_done_callback(lambda _: bench.runtime.changes.notify())
        if last_seq is not None:
            await bench.runtime.changes.wait_for(
                lambda: True if life.done() or bench.p.last_seq >= last_seq else None
            )
            if not life.done():
                life.cancel()
        results = await asyncio.gather(life, return_exceptions=True)
        await bench.driver.close()
        for error in results:
            if isinstance(error, Exception):
                raise error

    return act
