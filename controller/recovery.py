"""Restart: choose a checkpoint, load it, compare it with lineage, plan, and only then write.

Until the plan stands, nothing of the run is changed: a refusal leaves everything as it was.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

from kinlog.controller.protocols import DataPlane, Prompts
from kinlog.controller.runtime import Runtime, clear_rows, rows_cleared_events
from kinlog.controller.samplers import Sampler, evictions
from kinlog.lineage.ledger import Cut
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import GroupState, Projection
from kinlog.lineage.store import LocalStore
from kinlog.replay.recovery.capacity import groups_over_capacity
from kinlog.replay.recovery.held_rows import HeldRows
from kinlog.replay.recovery.inventory import Inventory
from kinlog.replay.recovery.journal import rows_to_put_back
from kinlog.replay.recovery.larger_steps import refuse_unfillable_step
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.replay.recovery.progress import Resumed, resumed_by
from kinlog.replay.recovery.restore import RestorePoint, restore_points, restored_projection
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import (
    ConfigError,
    DataPlaneError,
    DataPlaneTimeoutError,
    DatasetError,
    RolloutsFailError,
    RowsMissingError,
)
from kinlog.schemas.events import Event
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.orders import PutBack
from kinlog.schemas.reasons import Granularity, Partition, Reason
from kinlog.schemas.rows import RowTag

__all__ = ["Restored", "PhaseTimes", "restore_data_plane", "carry_out", "frames_of"]

#: Events of one frame when a plan is written: a restart of many groups is many frames.
_EVENTS_PER_FRAME = 1024


class PhaseTimes:
    """Seconds by phase of a restart, for the report."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self._clock_s()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock_s() - started


class Restored(NamedTuple):
    """What a restart found and decided, before it has written anything."""

    point: RestorePoint
    rolled_back: Projection
    """The whole log with the trainer's effects rolled back: what the plan was made from."""
    data_plane: DataPlane
    plan: RecoveryPlan
    put_back: PutBack
    """What the row journal gave back before the plan was made."""
    resumed: Resumed
    """What the next attempts go on from."""


async def restore_data_plane(
    config: RunConfig,
    directory: RunDirectory,
    scan: LogScan,
    *,
    wanted: str | None,
    discard_rollouts: bool,
    start_data_plane: Callable[[], Awaitable[DataPlane]],
    prompts: Prompts,
    sampler: Sampler,
    dataset_fingerprint: str,
    times: PhaseTimes,
) -> Restored:
    """Load the best restore point, and plan the recovery.

    Raises
    ------
    CheckpointError
        No checkpoint can be loaded.
    ConfigError, DatasetError
        The configuration does not fit the checkpoint or what is alive: correct it, and nothing is lost.
    DataPlaneTimeoutError
        The data plane did not answer in time. An older checkpoint would not make it faster.
    RowsMissingError
        Promised rows are missing, or the row journal is damaged where it is needed, and the policy is to refuse.
    """

    def refuse_unfit(name: str, manifest: Manifest) -> None:
        _refuse_unfit(name, manifest, config, dataset_fingerprint)

    points = restore_points(directory, scan, wanted=wanted, refuse_unfit=refuse_unfit)
    failed: str | None = None
    while True:
        with times.phase("choose checkpoint"):
            # Ends with a CheckpointError when there is none left.
            point = next(points) if failed is None else points.send(failed)
        policy = RecoveryPolicy.of(config, discard_rollouts=discard_rollouts)
        restored = restored_projection(point)
        # What can be refused without a data plane is refused before one is started.
        with times.phase("check prompts"):
            _refuse_groups(restored, config, policy, prompts, sampler)
        with times.phase("data plane start"):
            data_plane = await start_data_plane()
        try:
            if point.data_plane is not None:
                with times.phase("data plane load"):
                    await data_plane.load(point.data_plane, timeout_s=config.checkpointing.timeout_s)
            return await _plan(policy, point, restored, data_plane, directory, prompts, sampler, times)
        except DataPlaneTimeoutError:
            await data_plane.close()
            raise
        except DataPlaneError as error:
            # Loading is not transactional: what is in there now may be other rows' data. Start again, one older.
            await data_plane.close()
            if point.path is None:
                raise
            failed = str(error)
        except BaseException:
            await data_plane.close()
            raise


def _refuse_unfit(name: str, manifest: Manifest, config: RunConfig, dataset_fingerprint: str) -> None:
    units = config.data_plane.num_storage_units
    if manifest.num_storage_units != units:
        raise ConfigError(
            f"data_plane.num_storage_units is {units}, and checkpoint {name} was saved from "
            f"{manifest.num_storage_units}: it loads only into as many. Nothing was changed."
        )
    if manifest.dataset_fingerprint != dataset_fingerprint:
        raise DatasetError(
            f"checkpoint {name} is of the dataset with fingerprint {manifest.dataset_fingerprint}, found "
            f"{dataset_fingerprint}: restore the dataset's settings and version, or start a new run. Nothing was changed."
        )


def _refuse_groups(
    restored: Projection, config: RunConfig, policy: RecoveryPolicy, prompts: Prompts, sampler: Sampler
) -> None:
    """Raise when what is alive does not fit dataset or configuration."""
    for group in restored.live_groups():
        prompts.check(group.prompt)
        whole = group.granularity is Granularity.PROMPT_GROUP
        if whole and group.num_generations > config.rollout.max_inflight_siblings:
            raise ConfigError(
                f"rollout.max_inflight_siblings is {config.rollout.max_inflight_siblings}, and group "
                f"{group.group_id} of granularity prompt_group runs {group.num_generations} siblings at once"
            )
    refuse_unfillable_step(
        restored,
        groups_per_step=config.trainer.groups_per_step,
        max_live_groups=config.rollout.max_live_groups,
        is_stale=lambda group: sampler.is_stale(restored, group),
    )
    groups_over_capacity(
        [group for group in restored.live_groups() if not sampler.is_stale(restored, group)],
        max_live_groups=policy.max_live_groups,
        policy=policy.over_capacity,
    )


async def _plan(
    policy: RecoveryPolicy,
    point: RestorePoint,
    restored: Projection,
    data_plane: DataPlane,
    directory: RunDirectory,
    prompts: Prompts,
    sampler: Sampler,
    times: PhaseTimes,
) -> Restored:
    def evict(ready: Sequence[GroupState]) -> list[GroupState]:
        # Once the dataset is exhausted nothing fresher would come instead.
        return evictions(sampler, restored, ready) if prompts.has(restored.draw_cursor) else []

    with times.phase("inventory"):
        held = HeldRows(await _take_inventory(data_plane))
    put_back = PutBack()
    with times.phase("plan"):
        wanted = {} if policy.discard_rollouts else rows_to_put_back(restored, held)
    if wanted:
        with times.phase("put rows back"):
            put_back = await _put_back(data_plane, directory, point, wanted)
            _refuse_damaged_journal(put_back, policy)
            held = HeldRows(await _take_inventory(data_plane))
    with times.phase("plan"):
        plan = plan_recovery(
            restored,
            held,
            checkpoint=point.name,
            promised=point.promised,
            promised_finalized_seq=point.promised_finalized_seq,
            policy=policy,
            is_stale=lambda group: sampler.is_stale(restored, group),
            evict=evict,
        )
    with times.phase("read progress"):
        resumed = await asyncio.to_thread(
            resumed_by, plan, restored, LocalStore(), directory.progress, max_resumes=policy.max_resumes
        )
    return Restored(point, restored, data_plane, plan, put_back, resumed)


async def _take_inventory(data_plane: DataPlane) -> Inventory:
    return Inventory(
        dict(await data_plane.list_rows(Partition.STAGING)),
        dict(await data_plane.list_rows(Partition.TRAINING)),
    )


async def _put_back(
    data_plane: DataPlane, directory: RunDirectory, point: RestorePoint, wanted: Mapping[str, RowTag]
) -> PutBack:
    """Put rows back from the run's journal, and what that lacks from the checkpoint's."""
    put_back = await data_plane.put_back(directory.journal, wanted)
    if point.journal is None or not put_back.missing:
        return put_back
    lacking = {key: wanted[key] for key in put_back.missing}
    more = await data_plane.put_back(point.journal, lacking)
    return PutBack(
        num_rows=put_back.num_rows + more.num_rows,
        completion_tokens=put_back.completion_tokens + more.completion_tokens,
        missing=more.missing,
        damaged=put_back.damaged + more.damaged,
    )


def _refuse_damaged_journal(put_back: PutBack, policy: RecoveryPolicy) -> None:
    if put_back.damaged and put_back.missing and policy.missing_rows == "refuse":
        raise RowsMissingError(
            f"{len(put_back.missing)} rows of sealed siblings are neither in the data plane nor in the row journal, and "
            f"the journal is damaged: {put_back.damaged[0]}. Nothing was changed. Repair the journal, or set "
            "rollout_recovery.missing_rows: redispatch to generate them again."
        )


async def carry_out(runtime: Runtime, cut: Cut, plan: RecoveryPlan) -> None:
    """Record a plan, durably, then clear the rows that nobody needs.

    Raises
    ------
    RolloutsFailError
        The plan parks a group, and the policy is to stop the run then. It is recorded: the next restart goes on.
    """
    await _commit_in_frames(runtime, cut, plan.events())
    for reason, by_partition in (
        (Reason.STEP_DURABLE, plan.retired),
        (Reason.UNREFERENCED, plan.unreferenced),
    ):
        for partition, rows in by_partition.items():
            if rows:
                group_ids = sorted({group_id for group_id in rows.values() if group_id >= 0})
                events = rows_cleared_events(partition, reason, len(rows), group_ids)
                await _commit_in_frames(runtime, cut, events)
                await clear_rows(runtime, cut, partition, rows)
    if plan.parked and runtime.config.rollout.spent_retry_budget == "fail_run":
        parked = plan.parked[0]
        raise RolloutsFailError(
            f"group {parked.group_id} is parked: the retry budget of {parked.detail} is spent, and "
            "rollout.spent_retry_budget is fail_run. Correct the cause, then resume the run."
        )


async def _commit_in_frames(runtime: Runtime, cut: Cut, events: tuple[Event, ...]) -> None:
    """Record any number of events, and wait until the last is durable."""
    for frame in frames_of(events, at_most=_EVENTS_PER_FRAME):
        ticket = runtime.ledger.commit(cut, *frame)
    await ticket.durable()


def frames_of(events: Sequence[Event], *, at_most: int) -> Iterator[tuple[Event, ...]]:
    """Cut events into frames. What is about one group stays together: a kill between two frames must not tear it."""
    frame: list[Event] = []
    for _, unit in groupby(enumerate(events), key=_group_or_place):
        unit_events = [event for _, event in unit]
        if frame and len(frame) + len(unit_events) > at_most:
            yield tuple(frame)
            frame = []
        frame += unit_events
    if frame:
        yield tuple(frame)


def _group_or_place(placed: tuple[int, Event]) -> tuple[str, int]:
    place, event = placed
    group_id = getattr(event, "group_id", None)
    return ("event", place) if group_id is None else ("group", group_id)
