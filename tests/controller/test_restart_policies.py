"""Restarts of whole runs under the policies about capacity and poison pills: what is refused is refused before anything is
started, and the offline plan says what a restart does.
"""

from pathlib import Path

import pytest
from kinlog_builders import directory_bytes
from kinlog_fake_parts import FakeParts
from kinlog_lives import Life, assert_conserved, first_life, history, next_life, replayed, run_config

from kinlog.controller.samplers import build_sampler, evictions
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import GroupPhase, Projection
from kinlog.replay.recovery.offline_plan import OfflinePlan, plan_offline
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.schemas import events as e
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import ConfigError, RolloutsFailError
from kinlog.schemas.reasons import Reason

FAR = {"sampler__max_staleness_versions": 9}


def holding(*siblings: tuple[int, int, int]) -> FakeParts:
    """Parts whose workers never answer for these attempts."""
    parts = FakeParts()
    parts.prepare = lambda parts: [parts.pool.hold(*sibling) for sibling in siblings] and None
    return parts


async def killed_with_six_groups_alive(path: Path) -> None:
    held = [(group, 0, 1) for group in range(2, 8)]
    life = await first_life(path, run_config(**FAR), holding(*held))
    await life.train_until(lambda p: p.train_step == 1 and p.alive_total == 6)
    await life.kill()


def offline(path: Path, config: RunConfig) -> OfflinePlan:
    """What ``kinlog plan`` would say, were this the run's configuration."""
    sampler = build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step)
    return plan_offline(
        RunDirectory(path),
        policy=RecoveryPolicy.of(config),
        is_stale=sampler.is_stale,
        evict=lambda p, ready: evictions(sampler, p, ready),
    )


async def test_too_many_groups_are_refused_before_anything_is_started_or_changed(tmp_path: Path):
    path = tmp_path / "run"
    await killed_with_six_groups_alive(path)
    before = directory_bytes(path / "log")
    config = run_config(rollout__max_live_groups=3, rollout_recovery__over_capacity="refuse", **FAR)
    parts = FakeParts()
    with pytest.raises(
        ConfigError, match="max_live_groups is 3, and 6 groups are alive. Nothing was changed"
    ):
        await Life(path, config, parts).begin(resume=True)
    assert not hasattr(parts, "data_plane")
    assert directory_bytes(path / "log") == before
    with pytest.raises(ConfigError, match="max_live_groups is 3, and 6 groups are alive"):
        offline(path, config)
    life = await next_life(path, run_config(**FAR))
    await life.train()
    assert_conserved(replayed(path))


async def test_offline_plan_says_what_is_evicted_and_the_report_counts_it(tmp_path: Path):
    path = tmp_path / "run"
    await killed_with_six_groups_alive(path)
    config = run_config(rollout__max_live_groups=3, rollout_recovery__over_capacity="evict", **FAR)
    planned = offline(path, config)
    life = await next_life(path, config)
    assert life.report is not None
    assert planned.report.groups_dropped == life.report.groups_dropped == {"evicted": 3}
    # Step 1 is undone, and the two groups of it hold permits beyond the limit.
    assert life.report.groups_alive == planned.report.groups_alive == 3 + 2
    dropped = [record.event for record in history(path) if isinstance(record.event, e.GroupDropped)]
    assert dropped == list(planned.plan.dropped)
    await life.train()
    assert_conserved(replayed(path))


def only_one_sibling_is_under_way(p: Projection) -> bool:
    live = list(p.live_groups())
    unsealed = [s for group in live for s in group.siblings.values() if s.sealed is None]
    return len(live) == 2 and len(unsealed) == 1 and unsealed[0].running


async def test_sibling_that_is_under_way_at_each_death_is_found_out_and_stops_the_run_once(tmp_path: Path):
    path = tmp_path / "run"
    config = run_config(
        rollout__max_controller_restarts=1, rollout__spent_retry_budget="fail_run", rollout__max_live_groups=2
    )
    life = await first_life(path, config, holding((0, 1, 1)))
    await life.train_until(only_one_sibling_is_under_way)
    await life.kill()
    life = await next_life(path, config, holding((0, 1, 2)))
    await life.train_until(only_one_sibling_is_under_way)
    await life.kill()
    assert offline(path, config).report.groups_parked == {"retry_budget": 1}
    stopped = Life(path, config)
    with pytest.raises(
        RolloutsFailError, match="group 0 is parked.*under way as the controller died 2 times"
    ):
        await stopped.begin(resume=True)
    await stopped.controller.close(cleanly=False)
    life = await next_life(path, config)
    await life.train()
    p = replayed(path)
    assert (p.groups[0].phase, p.groups[0].parked_reason) == (GroupPhase.PARKED, Reason.RETRY_BUDGET)
    assert p.train_step == config.trainer.max_steps
    assert_conserved(p)
