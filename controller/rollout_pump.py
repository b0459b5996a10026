"""The rollout pump: draws prompts as sampler and permits allow, and has every live group driven."""

import asyncio

from kinlog.controller.group_driver import GroupDriver
from kinlog.controller.runtime import Runtime
from kinlog.controller.samplers import Draw
from kinlog.lineage import decide
from kinlog.schemas.errors import RolloutsFailError
from kinlog.schemas.events import DatasetExhausted, GroupAdmitted, RetryBudget
from kinlog.schemas.reasons import Reason

__all__ = ["RolloutPump"]

#: Groups that must have been given up, without one success, before the run is called hopeless.
_HOPELESS_GROUPS = 16


class RolloutPump:
    """Keeps groups coming until training has enough, or the dataset is exhausted."""

    def __init__(self, runtime: Runtime, driver: GroupDriver) -> None:
        self._runtime = runtime
        self._driver = driver

    async def run(self) -> None:
        """Drive restored groups and fresh ones side by side. Returns when nothing is left to draw or to drive."""
        async with asyncio.TaskGroup() as groups:
            self._driver.watch_late_results_in(groups)
            for group in list(self._runtime.projection.live_groups()):
                groups.create_task(self._driver.drive(group.group_id))
            while (group_id := await self._draw()) is not None:
                groups.create_task(self._driver.drive(group_id))

    async def _draw(self) -> int | None:
        """Reserve the next group, durably; ``None`` when there will be no more."""
        runtime = self._runtime
        while True:
            # Two phases: wait outside of any cut, then decide inside one, where nothing can have changed since.
            if await runtime.changes.wait_for(self._may_draw) is _ENOUGH:
                await self._record_exhausted()
                return None
            self._refuse_hopeless()
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
                    retry_budget=RetryBudget(settings.max_infrastructure_retries, settings.max_data_retries),
                    train_step=draw.train_step,
                )
                ticket = runtime.ledger.commit(cut, reserved, GroupAdmitted(group_id=reserved.group_id))
            await ticket.durable()
            return reserved.group_id

    def _may_draw(self) -> "Draw | _Enough | None":
        p, trainer = self._runtime.projection, self._runtime.config.trainer
        steps_left = trainer.max_steps - p.train_step
        if steps_left <= 0 or self._runtime.exhausted:
            return _ENOUGH
        draw = self._runtime.sampler.may_draw(p)
        if draw is not None and draw.train_step == p.train_step + 1:
            # The next step cannot be filled without it. There is a permit, unless a restart brought trained groups back
            # or lowered the limits: then whatever holds the permits waits for this very step.
            return draw
        permits = self._runtime.config.rollout.max_live_groups
        return draw if p.alive_total < min(permits, steps_left * trainer.groups_per_step) else None

    async def _record_exhausted(self) -> None:
        p = self._runtime.projection
        if self._runtime.exhausted and not p.exhausted:
            async with self._runtime.barrier.cut("exhausted") as cut:
                self._runtime.ledger.commit(cut, DatasetExhausted(draw_cursor=p.draw_cursor))

    def _refuse_hopeless(self) -> None:
        """Stop before a mistake that fails every rollout has set the whole dataset aside, group by group."""
        p = self._runtime.projection
        given_up = p.parked_total + p.dropped.get(Reason.RETRY_BUDGET, 0)
        if p.sealed_total == 0 and given_up >= max(
            _HOPELESS_GROUPS, self._runtime.config.rollout.max_live_groups
        ):
            raise RolloutsFailError(
                f"{given_up} groups were given up, and no rollout has succeeded yet. Run 'kinlog log show RUN --kind "
                "attempt_superseded' for what they failed of, and correct it. The run can then be resumed."
            )


class _Enough:
    """Nothing more will be drawn in this life of the run."""


_ENOUGH = _Enough()
