"""Driving one group from wherever it stands to its canonical rows, in this life or after a restart alike.

The driver keeps no state of its own: it looks at the projection, does the next thing, and looks again.
"""

import asyncio

from kinlog.controller.attempts import Answer, Attempts
from kinlog.controller.failures import back_off, failure_of, give_up
from kinlog.controller.finalize import GroupFinalizer
from kinlog.controller.runtime import Runtime
from kinlog.controller.samplers import may_start
from kinlog.controller.worker_budget import Work
from kinlog.lineage import decide
from kinlog.lineage.state import GroupPhase, GroupState
from kinlog.schemas.events import GroupAdmitted, SiblingSealed
from kinlog.schemas.reasons import Granularity

__all__ = ["GroupDriver"]


class GroupDriver:
    """Drives groups. One instance for all of a run's groups."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._attempts = Attempts(runtime)
        self._finalizer = GroupFinalizer(runtime)

    def watch_late_results_in(self, tasks: asyncio.TaskGroup) -> None:
        """Watch for late results in a task group: what fails there fails the run, as it does everywhere else."""
        self._attempts.watch_late_results_in(tasks)

    async def close(self) -> None:
        """Stop watching for late results."""
        await self._attempts.close()

    async def drive(self, group_id: int, work: Work = Work.FRESH) -> None:
        """Bring a group to ``finalized``, or see it leave. ``work`` is what its siblings ask for worker slots as."""
        while (group := self._live(group_id)) is not None:
            match group.phase:
                case GroupPhase.RESERVED:
                    async with self._runtime.barrier.cut("admit") as cut:
                        if self._live(group_id) is not None:
                            self._runtime.ledger.commit(cut, GroupAdmitted(group_id=group_id))
                case GroupPhase.ADMITTED | GroupPhase.GENERATING:
                    await self._runtime.changes.wait_for(lambda: True if self._may_start(group_id) else None)
                    if group.granularity is Granularity.PROMPT_GROUP:
                        await self._run_cohort(group, work)
                    else:
                        await self._run_siblings(group, work)
                case GroupPhase.READY | GroupPhase.FINALIZING:
                    await self._finalizer.finalize(group_id)
                case _:
                    return

    def _live(self, group_id: int) -> GroupState | None:
        group = self._runtime.projection.groups.get(group_id)
        return group if group is not None and group.live else None

    def _may_start(self, group_id: int) -> bool:
        group = self._live(group_id)
        if group is None:
            return True
        return not self._runtime.stop.asked and may_start(
            self._runtime.sampler, self._runtime.projection, group
        )

    def _is_failure(self, answer: Answer) -> bool:
        return failure_of(self._runtime, answer) is not None

    # ---- granularity: sibling -----------------------------------------------------------------------------------

    async def _run_siblings(self, group: GroupState, work: Work) -> None:
        async with asyncio.TaskGroup() as tasks:
            for generation in group.siblings:
                tasks.create_task(self._run_sibling(group.group_id, generation, work))

    async def _run_sibling(self, group_id: int, generation: int, work: Work) -> None:
        """Attempt a sibling until it is sealed, or its group has left."""
        while (group := self._live(group_id)) is not None and group.siblings[generation].waiting:
            await back_off(self._runtime, group, [generation])
            async with self._runtime.budget.take(1, work) as slots:
                with self._runtime.waits.on(f"a generation worker to be ready for group {group_id}"):
                    await self._runtime.pool.available()
                attempts = await self._attempts.send(group_id, [generation], slots)
                if not attempts:
                    return
                (answer,), running = await self._attempts.answers(attempts, is_failure=self._is_failure)
            async with self._attempts.given_up(running):
                await self._settle(answer)
        if self._live(group_id) is None:
            self._attempts.abort(group_id)

    async def _settle(self, answer: Answer) -> None:
        async with self._runtime.barrier.cut("seal") as cut:
            failed = failure_of(self._runtime, answer)
            if failed is not None:
                await give_up(self._runtime, cut, failed)
                if isinstance(answer, SiblingSealed):
                    await self._attempts.clear_rejected(cut, answer)
                return
            assert isinstance(answer, SiblingSealed)
            outcome, events = decide.seal_sibling(self._runtime.projection, answer)
            if events:
                ticket = self._runtime.ledger.commit(cut, *events)
            if outcome is decide.SealOutcome.LATE:
                await self._attempts.clear_rejected(cut, answer)
        if events:
            await ticket.durable()

    # ---- granularity: prompt_group ------------------------------------------------------------------------------

    async def _run_cohort(self, group: GroupState, work: Work) -> None:
        """Attempt a whole group once. It seals whole, or every result of the attempt is discarded."""
        generations = list(group.siblings)
        await back_off(self._runtime, group, generations)
        async with self._runtime.budget.take(len(generations), work) as slots:
            with self._runtime.waits.on(f"a generation worker to be ready for group {group.group_id}"):
                await self._runtime.pool.available()
            attempts = await self._attempts.send(group.group_id, generations, slots)
            if not attempts:
                return
            answers, running = await self._attempts.answers(attempts, is_failure=self._is_failure)
        async with self._attempts.given_up(running):
            await self._settle_cohort(group.group_id, answers)

    async def _settle_cohort(self, group_id: int, answers: list[Answer]) -> None:
        ticket = None
        async with self._runtime.barrier.cut("seal") as cut:
            failed = next((f for a in answers if (f := failure_of(self._runtime, a)) is not None), None)
            sealed = {a.generation: a for a in answers if isinstance(a, SiblingSealed)}
            if failed is None and self._live(group_id) is not None:
                events = decide.seal_cohort(self._runtime.projection, group_id, sealed)
                ticket = self._runtime.ledger.commit(cut, *events)
            else:
                if failed is not None:
                    await give_up(self._runtime, cut, failed)
                for answer in sealed.values():
                    await self._attempts.reject(cut, answer)
        if ticket is not None:
            await ticket.durable()
