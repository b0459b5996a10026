"""Attempts: each from its dispatch to the end of its call, whether somebody still waits for the answer or not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeAlias

from kinlog.controller.runtime import Runtime, clear_rows
from kinlog.controller.worker_budget import HeldSlots
from kinlog.lineage import decide
from kinlog.lineage.ledger import Cut
from kinlog.schemas.errors import DataPlaneError, WorkerLostError
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import RolloutFailed, RolloutOrder
from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import staging_key

__all__ = ["Answer", "Attempts", "sibling_seed"]

Answer: TypeAlias = SiblingSealed | RolloutFailed

_logger = logging.getLogger(__name__)


def sibling_seed(run_seed: int, group_id: int, generation: int, data_failures: int) -> int:
    """Return the sampling seed of a sibling, 63 bits.

    A sibling that is redone after a crash samples what it would have sampled. One that is redone because its result was
    no good does not: the same seed would give the same result.
    """
    numbers = (run_seed, group_id, generation, data_failures)
    return int.from_bytes(digest_bytes(*(n.to_bytes(8, "little") for n in numbers))[:8], "little") >> 1


class _Attempt(NamedTuple):
    """An attempt that a worker was sent."""

    order: RolloutOrder
    worker: str
    call: "asyncio.Future[Answer]"
    slots: HeldSlots

    def failed(self, reason: Reason, detail: str) -> RolloutFailed:
        return RolloutFailed(
            group_id=self.order.group_id,
            generation=self.order.generation,
            attempt=self.order.attempt,
            reason=reason,
            detail=detail,
        )

    def answer(self) -> Answer:
        """Return what the call that has ended came to. What goes wrong is an answer too."""
        if self.call.cancelled():
            # Not by us. Passed on, it would end the sibling's task without an answer, and without an error.
            return self.failed(Reason.WORKER_LOST, f"the call to {self.worker} was cancelled")
        try:
            return self.call.result()
        except WorkerLostError as error:
            return self.failed(Reason.WORKER_LOST, str(error))
        except DataPlaneError as error:
            return self.failed(Reason.INFRASTRUCTURE_FAILURE, str(error))


@contextmanager
def _cancelling(attempts: "Sequence[_Attempt]") -> Iterator[None]:
    """Leave no call behind when the block fails or is cancelled."""
    try:
        yield
    except BaseException:
        for attempt in attempts:
            attempt.call.cancel()
        raise


class Attempts:
    """Sends attempts to workers, and rejects the answers that come too late. One instance for all of a run's groups."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._under_way: dict[asyncio.Future[Answer], _Attempt] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup | None = None

    def watch_late_results_in(self, tasks: asyncio.TaskGroup) -> None:
        """Watch for late results in a task group: what fails there fails the run, as it does everywhere else."""
        self._tasks = tasks

    async def close(self) -> None:
        """Stop watching for late results, and leave no call behind."""
        left: list[asyncio.Future[Any]] = [*self._late, *self._under_way]
        for waiting in left:
            waiting.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def send(self, group_id: int, generations: Sequence[int], slots: HeldSlots) -> list[_Attempt]:
        """Record the next attempt of siblings, durably, before any worker hears of it; then call the workers.

        Each call occupies one of the slots until it has ended. Empty when the group has left,
        or the run is asked to stop.
        """
        runtime = self._runtime
        async with runtime.barrier.cut("dispatch") as cut:
            group = runtime.projection.groups.get(group_id)
            if runtime.stop.asked or group is None or not group.live:
                return []
            assignments = [
                decide.Assignment(
                    generation,
                    runtime.pool.assign(),
                    sibling_seed(
                        runtime.config.seed, group_id, generation, group.siblings[generation].data_failures
                    ),
                )
                for generation in generations
            ]
            recovery = runtime.config.rollout_recovery
            resumable = {
                generation: decide.resumable_attempts(
                    group, group.siblings[generation], max_resumes=recovery.resumes
                )
                for generation in generations
            }
            newest = {
                generation: group.siblings[generation].rolled_back_to
                for generation in generations
                if recovery.future_weights == "discard"
            }
            dispatched = decide.dispatch_siblings(
                runtime.projection, group_id, assignments, max_resumes=recovery.resumes
            )
            ticket = runtime.ledger.commit(cut, *dispatched)
        await ticket.durable()
        orders = [
            RolloutOrder(
                group_id=event.group_id,
                generation=event.generation,
                attempt=event.attempt,
                prompt=group.prompt,
                seed=event.seed,
                resumable_attempts=tuple(resumable[event.generation]),
                newest_weight_version=newest.get(event.generation),
            )
            for event in dispatched
        ]
        return [
            self._call(event.worker, order, slots) for event, order in zip(dispatched, orders, strict=True)
        ]

    def _call(self, worker: str, order: RolloutOrder, slots: HeldSlots) -> _Attempt:
        call = asyncio.ensure_future(self._runtime.pool.run(worker, order))
        attempt = _Attempt(order, worker, call, slots)
        slots.occupy(call)
        self._under_way[call] = attempt
        call.add_done_callback(self._under_way.pop)
        return attempt

    async def answers(
        self, attempts: Sequence[_Attempt], *, is_failure: Callable[[Answer], bool]
    ) -> tuple[list[Answer], list[_Attempt]]:
        """Return the answers so far, as soon as one of them is a failure or all are there; and who still runs.

        Who runs is settled here: a call that ends a moment later is late, and must be seen to be (``given_up``).
        """
        with _cancelling(attempts):
            return await self._until_failure(attempts, is_failure)

    @asynccontextmanager
    async def given_up(self, running: Sequence[_Attempt]) -> AsyncIterator[None]:
        """The block records that attempts are given up, which still run: at its end they are let go."""
        with _cancelling(running):
            yield
        for attempt in running:
            self._abort(attempt)
            self._watch(attempt)

    async def _until_failure(
        self, attempts: Sequence[_Attempt], is_failure: Callable[[Answer], bool]
    ) -> tuple[list[Answer], list[_Attempt]]:
        clock_s = asyncio.get_running_loop().time
        timeout_s = self._runtime.config.rollout.sibling_timeout_s
        deadline_s = clock_s() + timeout_s
        pending = {attempt.call for attempt in attempts}
        timed_out = False
        while pending and not timed_out:
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, deadline_s - clock_s()), return_when=asyncio.FIRST_COMPLETED
            )
            timed_out = not done
            if any(is_failure(attempt.answer()) for attempt in attempts if attempt.call in done):
                break
        running = [attempt for attempt in attempts if attempt.call in pending]
        answers = [attempt.answer() for attempt in attempts if attempt.call not in pending]
        if timed_out:
            detail = f"no answer from {running[0].worker} in {timeout_s:g} s"
            answers.append(running[0].failed(Reason.TIMEOUT, detail))
        return answers, running

    # ---- what nobody waits for any more -------------------------------------------------------------------------

    def abort(self, group_id: int) -> None:
        """Have workers stop what they do for a group that has left."""
        for attempt in list(self._under_way.values()):
            if attempt.order.group_id == group_id:
                self._abort(attempt)

    def _abort(self, attempt: _Attempt) -> None:
        if not attempt.call.done():
            self._runtime.pool.abort(attempt.worker, attempt.order)

    def _watch(self, attempt: _Attempt) -> None:
        late = self._see_off(attempt)
        try:
            task = asyncio.create_task(late) if self._tasks is None else self._tasks.create_task(late)
        except RuntimeError:  # another failure is ending the task group, and with it everything
            late.close()
            attempt.call.cancel()
            return
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _see_off(self, attempt: _Attempt) -> None:
        """Wait for the end of an attempt that was given up, and record that its answer is not used.

        Its slot is counted meanwhile, but not for ever: a worker that neither answers nor stops in another time-out
        hangs. It does nothing for anybody, which is for the health probes to see to; others need the slot.
        """
        try:
            limit_s = self._runtime.config.rollout.sibling_timeout_s
            done, _ = await asyncio.wait({attempt.call}, timeout=limit_s)
            if not done:
                name = f"group {attempt.order.group_id}/{attempt.order.generation} attempt {attempt.order.attempt}"
                _logger.warning(
                    "%s has not stopped %s in %g s: its slot is given to others",
                    attempt.worker,
                    name,
                    limit_s,
                )
                attempt.slots.vacate(attempt.call)
            answer = await attempt.call
        except (WorkerLostError, DataPlaneError):
            return  # it never answered: there is no result to reject
        except asyncio.CancelledError:
            attempt.call.cancel()
            raise
        if isinstance(answer, SiblingSealed):
            async with self._runtime.barrier.cut("reject") as cut:
                await self.reject(cut, answer)

    async def reject(self, cut: Cut, answer: SiblingSealed) -> None:
        """Record a result that comes too late, and clear its rows."""
        outcome, events = decide.seal_sibling(self._runtime.projection, answer)
        if outcome is decide.SealOutcome.LATE:
            self._runtime.ledger.commit(cut, *events)
            await self.clear_rejected(cut, answer)

    async def clear_rejected(self, cut: Cut, answer: SiblingSealed) -> None:
        """Clear the staged rows of a result that is not used."""
        calls = answer.receipt.calls if answer.receipt is not None else ()
        identity = (answer.group_id, answer.generation, answer.attempt)
        keys = [staging_key(*identity, call.call) for call in calls]
        await clear_rows(self._runtime, cut, Partition.STAGING, keys)
