"""Driving one group from wherever it stands to its canonical rows, in this life or after a restart alike.

The driver keeps no state of its own: it looks at the projection, does the next thing, and looks again.
"""

import asyncio
from collections.abc import Coroutine, Sequence

from kinlog.controller.runtime import Runtime, clear_group_rows, clear_rows, rows_cleared_events
from kinlog.lineage import decide
from kinlog.lineage.ledger import Cut
from kinlog.lineage.state import GroupPhase, GroupState
from kinlog.replay.inventory import staged_rows
from kinlog.schemas.errors import DataPlaneError, RolloutsFailError, WorkerLostError
from kinlog.schemas.events import (
    CanonicalRowRef,
    Event,
    FinalizeFailed,
    FinalizeStarted,
    GroupAdmitted,
    GroupDropped,
    GroupFinalized,
    GroupParked,
    SiblingDispatched,
    SiblingSealed,
)
from kinlog.schemas.orders import FinalizeOrder, FinalizeRejected, RolloutFailed, RolloutOrder
from kinlog.schemas.prompts import PromptRef, digest_bytes
from kinlog.schemas.reasons import Granularity, Partition, Reason, Validity
from kinlog.schemas.receipts import canonical_key, staging_key

__all__ = ["GroupDriver", "sibling_seed"]

_Answer = SiblingSealed | RolloutFailed

#: A finalize is two calls to the data plane, each of which ends a little after its time-out at the latest.
_GRACE_S = 5.0


def sibling_seed(run_seed: int, group_id: int, generation: int, data_failures: int) -> int:
    """Return the sampling seed of a sibling, 63 bits.

    A sibling that is redone after a crash samples what it would have sampled. One that is redone because its result was
    no good does not: the same seed would give the same result.
    """
    numbers = (run_seed, group_id, generation, data_failures)
    return int.from_bytes(digest_bytes(*(n.to_bytes(8, "little") for n in numbers))[:8], "little") >> 1


class GroupDriver:
    """Drives groups. One instance for all of a run's groups."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._late: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup | None = None

    def watch_late_results_in(self, tasks: asyncio.TaskGroup) -> None:
        """Watch for late results in a task group: what fails there fails the run, as it does everywhere else."""
        self._tasks = tasks

    async def drive(self, group_id: int) -> None:
        """Bring a group to ``finalized``, or see it leave."""
        while (group := self._live(group_id)) is not None:
            match group.phase:
                case GroupPhase.RESERVED:
                    async with self._runtime.barrier.cut("admit") as cut:
                        if self._live(group_id) is not None:
                            self._runtime.ledger.commit(cut, GroupAdmitted(group_id=group_id))
                case GroupPhase.ADMITTED | GroupPhase.GENERATING:
                    if group.granularity is Granularity.PROMPT_GROUP:
                        await self._run_cohort(group_id)
                    else:
                        await self._run_siblings(group)
                case GroupPhase.READY | GroupPhase.FINALIZING:
                    await self._finalize(group_id)
                case _:
                    return

    async def close(self) -> None:
        """Stop watching for late results."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    def _live(self, group_id: int) -> GroupState | None:
        group = self._runtime.projection.groups.get(group_id)
        return group if group is not None and group.live else None

    # ---- granularity: sibling -----------------------------------------------------------------------------------

    async def _run_siblings(self, group: GroupState) -> None:
        async with asyncio.TaskGroup() as tasks:
            for generation in group.siblings:
                tasks.create_task(self._run_sibling(group.group_id, generation))

    async def _run_sibling(self, group_id: int, generation: int) -> None:
        """Attempt a sibling until it is sealed, or its group has left."""
        while (group := self._live(group_id)) is not None and group.siblings[generation].waiting:
            await self._back_off(group, [generation])
            async with self._runtime.budget.take():
                await self._runtime.pool.available()
                dispatched = await self._dispatch(group_id, [generation])
                if not dispatched:
                    return
                answer = await self._call(group.prompt, dispatched[0])
            await self._settle(answer)

    async def _settle(self, answer: _Answer) -> None:
        async with self._runtime.barrier.cut("seal") as cut:
            failed = self._failure_of(answer)
            if failed is not None:
                await self._give_up(cut, failed)
                if isinstance(answer, SiblingSealed):
                    await self._clear_rejected(cut, answer)
                return
            assert isinstance(answer, SiblingSealed)
            outcome, events = decide.seal_sibling(self._runtime.projection, answer)
            if events:
                ticket = self._runtime.ledger.commit(cut, *events)
            if outcome is decide.SealOutcome.LATE:
                await self._clear_rejected(cut, answer)
        if events:
            await ticket.durable()

    def _failure_of(self, answer: _Answer) -> RolloutFailed | None:
        """Return what is wrong with an answer: a failure, or a result that is no example and may be tried again."""
        if isinstance(answer, RolloutFailed):
            return answer
        group = self._live(answer.group_id)
        settings = self._runtime.config.rollout
        if answer.validity is Validity.VALID or settings.invalid_siblings == "keep_masked" or group is None:
            return None
        sibling = group.siblings[answer.generation]
        if not sibling.running or sibling.attempt != answer.attempt:
            return None  # late, whatever it is worth
        if decide.retry_budget_spent(group, sibling, Reason.DATA_FAILURE):
            return None  # kept, masked: whether too few are valid is judged when the group is finalized
        return RolloutFailed(
            group_id=answer.group_id,
            generation=answer.generation,
            attempt=answer.attempt,
            reason=Reason.DATA_FAILURE,
            detail=f"the result is {answer.validity}",
        )

    # ---- granularity: prompt_group ------------------------------------------------------------------------------

    async def _run_cohort(self, group_id: int) -> None:
        """Attempt a whole group once. It seals whole, or every result of the attempt is discarded."""
        group = self._live(group_id)
        if group is None:
            return
        generations = list(group.siblings)
        await self._back_off(group, generations)
        async with self._runtime.budget.take(len(generations)):
            await self._runtime.pool.available()
            dispatched = await self._dispatch(group_id, generations)
            if not dispatched:
                return
            calls = [asyncio.create_task(self._call(group.prompt, event)) for event in dispatched]
            try:
                answers, pending = await self._until_failure(calls)
            except BaseException:
                for call in calls:
                    call.cancel()
                raise
        failures = [failure for answer in answers if (failure := self._failure_of(answer)) is not None]
        failed = failures[0] if failures else None
        sealed = {a.generation: a for a in answers if isinstance(a, SiblingSealed)}
        ticket = None
        async with self._runtime.barrier.cut("seal") as cut:
            if failed is None and self._live(group_id) is not None:
                events = decide.seal_cohort(self._runtime.projection, group_id, sealed)
                ticket = self._runtime.ledger.commit(cut, *events)
            else:
                if failed is not None:
                    await self._give_up(cut, failed)
                for answer in sealed.values():
                    await self._reject(cut, answer)
        if ticket is not None:
            await ticket.durable()
        for call in pending:
            self._watch(self._reject_when_done(call))

    async def _until_failure(
        self, calls: "list[asyncio.Task[_Answer]]"
    ) -> "tuple[list[_Answer], list[asyncio.Task[_Answer]]]":
        """Return the answers so far, as soon as one of them is a failure, or when all are there; and who still runs.

        Who runs is settled here: a call that ends a moment later is late, and must be seen to be.
        """
        pending = set(calls)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(self._failure_of(call.result()) is not None for call in done):
                break
        answers = [call.result() for call in calls if call not in pending]
        return answers, [call for call in calls if call in pending]

    # ---- attempts -----------------------------------------------------------------------------------------------

    async def _dispatch(self, group_id: int, generations: list[int]) -> tuple[SiblingDispatched, ...]:
        """Record the next attempt of siblings, durably, before any worker hears of it."""
        runtime = self._runtime
        async with runtime.barrier.cut("dispatch") as cut:
            group = self._live(group_id)
            if group is None:
                return ()
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
            dispatched = decide.dispatch_siblings(runtime.projection, group_id, assignments)
            ticket = runtime.ledger.commit(cut, *dispatched)
        await ticket.durable()
        return dispatched

    async def _call(self, prompt: PromptRef, event: SiblingDispatched) -> _Answer:
        """Have a worker run an attempt. What goes wrong is an answer too."""
        runtime = self._runtime
        order = RolloutOrder(
            group_id=event.group_id,
            generation=event.generation,
            attempt=event.attempt,
            prompt=prompt,
            seed=event.seed,
        )
        call = asyncio.ensure_future(runtime.pool.run(event.worker, order))
        timeout_s = runtime.config.rollout.sibling_timeout_s
        try:
            done, _ = await asyncio.wait({call}, timeout=timeout_s)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not done:
            self._watch(self._reject_when_done(call))
            return _failed(order, Reason.TIMEOUT, f"no answer from {event.worker} in {timeout_s:g} s")
        if call.cancelled():
            # Not by us. Passed on, it would end the sibling's task without an answer, and without an error.
            return _failed(order, Reason.WORKER_LOST, f"the call to {event.worker} was cancelled")
        try:
            return call.result()
        except WorkerLostError as error:
            return _failed(order, Reason.WORKER_LOST, str(error))
        except DataPlaneError as error:
            return _failed(order, Reason.INFRASTRUCTURE_FAILURE, str(error))

    async def _give_up(self, cut: Cut, failed: RolloutFailed) -> None:
        """Supersede a failed attempt; do with the group as configured when the sibling's budget is spent."""
        group = self._live(failed.group_id)
        if group is None:
            return
        sibling = group.siblings[failed.generation]
        if not sibling.running or sibling.attempt != failed.attempt:
            return
        superseded = decide.supersede_attempt(
            self._runtime.projection, failed.group_id, failed.generation, failed.reason, failed.detail
        )
        if not decide.retry_budget_spent(group, sibling, failed.reason):
            self._runtime.ledger.commit(cut, *superseded)
            return
        policy = self._runtime.config.rollout.spent_retry_budget
        detail = f"generation {failed.generation}: {failed.reason}: {failed.detail}"
        if policy == "train_partial" and group.granularity is Granularity.SIBLING:
            events = decide.seal_placeholder(
                self._runtime.projection, failed.group_id, failed.generation, failed.reason, failed.detail
            )
            self._runtime.ledger.commit(cut, *events)
        elif policy == "drop":
            dropped = GroupDropped(group_id=failed.group_id, reason=Reason.RETRY_BUDGET, detail=detail[:500])
            self._runtime.ledger.commit(cut, *superseded, dropped)
            await clear_group_rows(self._runtime, cut, [group], Reason.RETRY_BUDGET)
        else:
            await self._park(cut, group, detail, *superseded)
        if policy == "fail_run":
            raise RolloutsFailError(
                f"group {failed.group_id} is parked: the retry budget of {detail} is spent, and "
                "rollout.spent_retry_budget is fail_run. Correct the cause, then resume the run."
            )

    async def _park(self, cut: Cut, group: GroupState, detail: str, *before: Event) -> None:
        """Give a group up for good, in one unit with what led to it. Its sealed siblings' rows are nobody's then."""
        parked = GroupParked(group_id=group.group_id, reason=Reason.RETRY_BUDGET, detail=detail[:500])
        self._runtime.ledger.commit(cut, *before, parked)
        await clear_group_rows(self._runtime, cut, [group], Reason.RETRY_BUDGET)

    async def _back_off(self, group: GroupState, generations: list[int]) -> None:
        siblings = [group.siblings[generation] for generation in generations]
        failures = max(s.infrastructure_failures + s.data_failures for s in siblings)
        if failures:
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        """Wait before the next try: twice as long after each failure, up to a bound."""
        settings = self._runtime.config.supervision
        doublings = min(failures - 1, 64)  # budgets have no upper limit, floats do
        await self._runtime.sleep(min(settings.retry_backoff_s * 2**doublings, settings.max_retry_backoff_s))

    # ---- late results -------------------------------------------------------------------------------------------

    def _watch(self, late: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(late) if self._tasks is None else self._tasks.create_task(late)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _reject_when_done(self, call: "asyncio.Future[_Answer]") -> None:
        """Wait for the answer of an attempt that was given up, and record that it is not used."""
        try:
            answer = await call
        except (WorkerLostError, DataPlaneError):
            return  # it never answered: there is no result to reject
        if isinstance(answer, SiblingSealed):
            async with self._runtime.barrier.cut("reject") as cut:
                await self._reject(cut, answer)

    async def _reject(self, cut: Cut, answer: SiblingSealed) -> None:
        outcome, events = decide.seal_sibling(self._runtime.projection, answer)
        if outcome is decide.SealOutcome.LATE:
            self._runtime.ledger.commit(cut, *events)
            await self._clear_rejected(cut, answer)

    async def _clear_rejected(self, cut: Cut, answer: SiblingSealed) -> None:
        calls = answer.receipt.calls if answer.receipt is not None else ()
        identity = (answer.group_id, answer.generation, answer.attempt)
        keys = [staging_key(*identity, call.call) for call in calls]
        await clear_rows(self._runtime, cut, Partition.STAGING, keys)

    # ---- finalize -----------------------------------------------------------------------------------------------

    async def _finalize(self, group_id: int) -> None:
        """Publish a group's canonical rows, once; what comes to nothing is recorded."""
        runtime = self._runtime
        await runtime.finalizer.available()
        async with runtime.barrier.cut("finalize") as cut:
            group = self._live(group_id)
            if group is None:
                return
            ticket = runtime.ledger.commit(cut, FinalizeStarted(group_id=group_id))
        await ticket.durable()
        sealed = tuple(s.sealed for _, s in sorted(group.siblings.items()) if s.sealed is not None)
        order = FinalizeOrder(group_id=group_id, prompt=group.prompt, siblings=sealed)
        # Outside of any cut: a checkpoint must not wait for a remote call.
        try:
            async with asyncio.timeout(2 * runtime.config.data_plane.call_timeout_s + _GRACE_S):
                answer = await runtime.finalizer.finalize(order)
        except (WorkerLostError, DataPlaneError, TimeoutError) as error:
            await self._finalize_unanswered(group_id, sealed, error)
            return
        async with runtime.barrier.cut("finalized") as cut:
            if isinstance(answer, FinalizeRejected):
                if self._live(group_id) is not None:
                    await self._reject_finalize(cut, group, answer)
                    await self._clear_unanswered(cut, group_id, sealed)
            elif self._live(group_id) is None:
                await self._clear_published(cut, group, answer)
            else:
                await self._record_finalized(cut, group, answer)

    async def _finalize_unanswered(
        self, group_id: int, sealed: Sequence[SiblingSealed], error: Exception
    ) -> None:
        """Record a finalize whose outcome is unknown, and wait before it is driven again, or park the group.

        Canonical keys follow from identity: driving it again publishes the same rows.
        """
        reason = Reason.WORKER_LOST if isinstance(error, WorkerLostError) else Reason.INFRASTRUCTURE_FAILURE
        if isinstance(error, TimeoutError):
            reason = Reason.TIMEOUT
        async with self._runtime.barrier.cut("finalize_failed") as cut:
            group = self._live(group_id)
            if group is None:
                return
            failed = FinalizeFailed(group_id=group_id, reason=reason, charged=True, detail=str(error)[:500])
            if decide.finalize_budget_spent(group):
                tries = group.finalize_failures + 1
                await self._park(cut, group, f"finalized {tries} times without an answer: {error}", failed)
                await self._clear_unanswered(cut, group_id, sealed)
                return
            self._runtime.ledger.commit(cut, failed)
        await self._pause(group.finalize_failures)

    async def _record_finalized(self, cut: Cut, group: GroupState, rows: tuple[CanonicalRowRef, ...]) -> None:
        runtime, group_id = self._runtime, group.group_id
        results = [sibling.sealed for sibling in group.siblings.values()]
        valid = sum(r is not None and r.validity is Validity.VALID for r in results) / len(results)
        events: tuple[Event, ...] = (GroupFinalized(group_id=group_id, rows=rows, valid_fraction=valid),)
        too_few = valid < runtime.config.rollout.min_valid_fraction_per_group
        if too_few:
            # In the same frame: a group that is finalized for a moment may be claimed in it.
            detail = f"{valid:.3f} of its siblings are valid"
            dropped = GroupDropped(group_id=group_id, reason=Reason.LOW_VALID_FRACTION, detail=detail)
            events = (*events, dropped)
        await runtime.ledger.commit(cut, *events).durable()
        # Durable first: the staged rows are the group's only ones until the log says that the canonical ones are.
        await clear_group_rows(runtime, cut, [group], Reason.FINALIZED)
        if too_few:
            await clear_group_rows(runtime, cut, [group], Reason.LOW_VALID_FRACTION)

    async def _clear_published(self, cut: Cut, group: GroupState, rows: tuple[CanonicalRowRef, ...]) -> None:
        """Clear the canonical rows of a group that left while the finalizer was at work: nobody else knows of them."""
        keys = [canonical_key(group.group_id, row.generation, row.attempt) for row in rows]
        await self._clear(cut, Partition.TRAINING, Reason.UNREFERENCED, group.group_id, keys)

    async def _clear_unanswered(self, cut: Cut, group_id: int, sealed: Sequence[SiblingSealed]) -> None:
        """Clear the canonical rows that a finalize whose answer was lost may have published, and the log knows nothing of.

        Those of siblings that stay are published again, under the same keys, should the group come to that.
        """
        keys = [canonical_key(group_id, result.generation, result.attempt) for result in sealed]
        await clear_rows(self._runtime, cut, Partition.TRAINING, keys)

    async def _reject_finalize(self, cut: Cut, group: GroupState, answer: FinalizeRejected) -> None:
        """Have what is no good generated again, or park the group when that has been tried often enough."""
        failed = FinalizeFailed(
            group_id=answer.group_id, reason=answer.reason, charged=True, detail=answer.detail[:500]
        )
        superseded = decide.supersede_attempt(
            self._runtime.projection, answer.group_id, answer.generation, answer.reason, answer.detail
        )
        keys = [key for event in superseded for key in staged_rows(group, group.siblings[event.generation])]
        if decide.finalize_budget_spent(group):
            detail = f"generation {answer.generation}: {answer.reason}: {answer.detail}"
            await self._park(cut, group, detail, failed, *superseded)
        else:
            self._runtime.ledger.commit(cut, failed, *superseded)
        await self._clear(cut, Partition.STAGING, answer.reason, group.group_id, keys)

    async def _clear(
        self, cut: Cut, partition: Partition, reason: Reason, group_id: int, keys: list[str]
    ) -> None:
        if keys:
            events = rows_cleared_events(partition, reason, len(keys), [group_id])
            await self._runtime.ledger.commit(cut, *events).durable()
            await clear_rows(self._runtime, cut, partition, keys)


def _failed(order: RolloutOrder, reason: Reason, detail: str) -> RolloutFailed:
    return RolloutFailed(
        group_id=order.group_id,
        generation=order.generation,
        attempt=order.attempt,
        reason=reason,
        detail=detail,
    )
