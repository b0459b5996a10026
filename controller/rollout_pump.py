"""The rollout pump: draws prompts as sampler and permits allow, and has every live group driven."""

import asyncio

from kinlog.controller.group_driver import GroupDriver
from kinlog.controller.hopeless import refuse_hopeless
from kinlog.controller.runtime import Runtime
from kinlog.controller.samplers import Draw
from kinlog.controller.worker_budget import Work
from kinlog.lineage import decide
from kinlog.schemas.events import DatasetExhausted, GroupAdmitted, RetryBudget

__all__ = ["RolloutPump"]


class RolloutPump:
    """Keeps groups coming until training has enough, or the dataset is exhausted."""

    def __init__(self, runtime: Runtime, driver: GroupDriver) -> None:
        self._runtime = runtime
        self._driver = driver

    async def run(self) -> None:
        """Drive restored groups and fresh ones side by side. Returns when nothing is left to draw or to drive."""
        if self._steps_left <= 0:
            return  # what is still alive would be generated for nobody
        async with asyncio.TaskGroup() as groups:
            self._driver.watch_late_results_in(groups)
            for group in list(self._runtime.projection.live_groups()):
                groups.create_task(self._driver.drive(group.group_id, Work.RECOVERY))
            while (group_id := await self._draw()) is not None:
                groups.create_task(self._driver.drive(group_id))

    async def _draw(self) -> int | None:
        """Reserve the next group, durably; ``None`` when there will be no more."""
        runtime = self._runtime
        await runtime.prompts.prepare(runtime.projection.draw_cursor)
        if runtime.exhausted:
            runtime.changes.notify()  # only now is it known of a stream, and training waits for what it will not get
        while True:
            # Two phases: wait outside of any cut, then decide inside one, where nothing can have changed since.
            if await runtime.changes.wait_for(self._may_draw) is _ENOUGH:
                await self._record_exhausted()
                return None
            refuse_hopeless(runtime)
            async with runtime.barrier.cut("reserve") as cut:
                draw = self._may_draw()
                if not isinstance(draw, Draw):
                    continue
                p = runtime.projection
                prompt = runtime.prompts.draw(p.draw_cursor)
                assert prompt is not None, "_may_draw looks at the cursor"
                settings, recovery = runtime.config.rollout, runtime.config.rollout_recovery
                reserved = decide.reserve_group(
                    p,
                    prompt=prompt,
                    num_generations=settings.num_generations,
                    granularity=recovery.resolve(agent_name=prompt.agent_name, task_name=prompt.task_name),
                    retry_budget=RetryBudget(
                        settings.max_infrastructure_retries,
                        settings.max_data_retries,
                        settings.max_controller_restarts,
                    ),
                    train_step=draw.train_step,
                )
                ticket = runtime.ledger.commit(cut, reserved, GroupAdmitted(group_id=reserved.group_id))
            await ticket.durable()
            return reserved.group_id

    @property
    def _steps_left(self) -> int:
        return self._runtime.config.trainer.max_steps - self._runtime.projection.train_step

    def _may_draw(self) -> "Draw | _Enough | None":
        p, groups_per_step = self._runtime.projection, self._runtime.config.trainer.groups_per_step
        if self._steps_left <= 0 or self._runtime.exhausted:
            return _ENOUGH
        if self._runtime.stop.asked:
            return None
        draw = self._runtime.sampler.may_draw(p)
        if draw is not None and self._is_needed_now(draw):
            # There is a permit, unless a restart brought trained groups back or lowered the limits: then whatever holds
            # the permits waits for this very step.
            return draw
        permits = self._runtime.config.rollout.max_live_groups
        return draw if p.alive_total < min(permits, self._steps_left * groups_per_step) else None

    def _is_needed_now(self, draw: Draw) -> bool:
        """Whether the next step cannot be filled without a draw: too few groups are alive that were drawn for it."""
        p = self._runtime.projection
        due = sum(group.train_step == draw.train_step for group in p.live_groups())
        return draw.train_step == p.train_step + 1 and due < self._runtime.config.trainer.groups_per_step

    async def _record_exhausted(self) -> None:
        p = self._runtime.projection
        if self._runtime.exhausted and not p.exhausted:
            async with self._runtime.barrier.cut("exhausted") as cut:
                self._runtime.ledger.commit(cut, DatasetExhausted(draw_cursor=p.draw_cursor))


class _Enough:
    """Nothing more will be drawn in this life of the run."""


_ENOUGH = _Enough()
