"""Restart: choose a checkpoint, load it, compare it with lineage, plan, and only then write.

Until the plan stands, nothing of the run is changed: a refusal leaves everything as it was.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kinlog.controller.checkpoint import DATA_PLANE_NAME
from kinlog.controller.protocols import DataPlane, Prompts
from kinlog.controller.runtime import Runtime, clear_rows, rows_cleared_events
from kinlog.controller.samplers import Sampler
from kinlog.lineage.ledger import Cut
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import Projection
from kinlog.replay.inventory import Inventory
from kinlog.replay.plan import RecoveryPlan, RecoveryPolicy, plan_recovery
from kinlog.replay.restore import RestorePoint, restore_points, restored_projection
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import ConfigError, DataPlaneError, DataPlaneTimeoutError, DatasetError
from kinlog.schemas.events import Event
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import Granularity, Partition, Reason

__all__ = ["Restored", "PhaseTimes", "restore_data_plane", "carry_out"]

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
        Promised rows are missing, and the policy is to refuse.
    """

    def refuse_unfit(name: str, manifest: Manifest) -> None:
        _refuse_unfit(name, manifest, config, dataset_fingerprint)

    points = restore_points(directory, scan, wanted=wanted, refuse_unfit=refuse_unfit)
    failed: str | None = None
    while True:
        with times.phase("choose checkpoint"):
            # Ends with a CheckpointError when there is none left.
            point = next(points) if failed is None else points.send(failed)
        with times.phase("data plane start"):
            data_plane = await start_data_plane()
        try:
            if point.path is not None:
                with times.phase("data plane load"):
                    await data_plane.load(
                        point.path / DATA_PLANE_NAME, timeout_s=config.checkpointing.timeout_s
                    )
            policy = RecoveryPolicy(
                missing_rows=config.rollout_recovery.missing_rows,
                future_weights=config.rollout_recovery.future_weights,
                discard_rollouts=discard_rollouts,
            )
            return await _plan(config, policy, point, data_plane, prompts, sampler, times)
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


async def _plan(
    config: RunConfig,
    policy: RecoveryPolicy,
    point: RestorePoint,
    data_plane: DataPlane,
    prompts: Prompts,
    sampler: Sampler,
    times: PhaseTimes,
) -> Restored:
    restored = restored_projection(point)
    with times.phase("check prompts"):
        for group in restored.live_groups():
            prompts.check(group.prompt)
            whole = group.granularity is Granularity.PROMPT_GROUP
            if whole and group.num_generations > config.rollout.max_inflight_siblings:
                raise ConfigError(
                    f"rollout.max_inflight_siblings is {config.rollout.max_inflight_siblings}, and group "
                    f"{group.group_id} of granularity prompt_group runs {group.num_generations} siblings at once"
                )
    with times.phase("inventory"):
        inventory = Inventory(
            dict(await data_plane.list_rows(Partition.STAGING)),
            dict(await data_plane.list_rows(Partition.TRAINING)),
        )
    with times.phase("plan"):
        plan = plan_recovery(
            restored,
            inventory,
            checkpoint=point.name,
            promised=point.manifest.position if point.manifest is not None else None,
            policy=policy,
            is_stale=lambda group: sampler.is_stale(restored, group),
        )
    return Restored(point, restored, data_plane, plan)


async def carry_out(runtime: Runtime, cut: Cut, plan: RecoveryPlan) -> None:
    """Record a plan, durably, then clear the rows that nobody needs."""
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


async def _commit_in_frames(runtime: Runtime, cut: Cut, events: tuple[Event, ...]) -> None:
    """Record any number of events, and wait until the last is durable."""
    for start in range(0, len(events), _EVENTS_PER_FRAME):
        ticket = runtime.ledger.commit(cut, *events[start : start + _EVENTS_PER_FRAME])
    await ticket.durable()
