"""Whole runs on in-memory parts: trained to the end, killed anywhere, and gone on with."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from kinlog_fake_parts import FakeParts
from kinlog_lives import (
    assert_conserved,
    events_of,
    first_life,
    history,
    interrupted_life,
    next_life,
    replayed,
    run_config,
)

from kinlog.lineage.fold import fold
from kinlog.lineage.log import create_log
from kinlog.lineage.state import GroupPhase, Projection, projection_digest
from kinlog.schemas import events as e
from kinlog.schemas.errors import (
    RunNotFoundError,
)
from kinlog.schemas.reasons import Granularity, Reason
from kinlog.schemas.receipts import staging_key


async def test_run_trains_every_step_on_full_groups_and_loses_nothing(tmp_path: Path):
    life = await (await first_life(tmp_path / "run")).train()
    steps = [event.group_ids for event in events_of(tmp_path / "run", e.StepApplied)]
    assert [len(groups) for groups in steps] == [2, 2, 2, 2]
    assert len({group for groups in steps for group in groups}) == 8
    assert_conserved(life.p)
    assert life.p.alive_total == 0
    assert projection_digest(replayed(tmp_path / "run")) == projection_digest(life.p)


def sealed_and_running(p) -> bool:
    return any(
        group.phase is GroupPhase.GENERATING
        and any(s.sealed for s in group.siblings.values())
        and any(s.running for s in group.siblings.values())
        for group in p.live_groups()
    )


async def test_live_projection_is_the_replayed_one_at_any_moment(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = lambda parts: parts.pool.hold(1, 2, 1) and None
    life = await first_life(tmp_path / "run", parts=parts)
    await life.train_until(sealed_and_running)
    await life.kill()
    assert projection_digest(replayed(tmp_path / "run")) == projection_digest(life.p)


async def test_sibling_sealed_before_the_checkpoint_is_not_generated_again(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    sealed_before = {
        (group.group_id, g)
        for group in life.p.live_groups()
        for g, s in group.siblings.items()
        if s.sealed is not None and s.sealed_seq <= life.p.checkpoints[-1].position.seq
    }
    running = [g for g, s in life.p.groups[group_id].siblings.items() if s.running]
    await life.kill()

    resumed = await next_life(tmp_path / "run", life.config)
    await resumed.train()
    generated = set(resumed.parts.pool.attempts())
    assert (group_id, 0) in sealed_before
    assert not generated & sealed_before
    assert {(group_id, g) for g in running} <= generated
    attempts = {o.attempt for o in resumed.parts.pool.calls if (o.group_id, o.generation) == (group_id, 2)}
    assert attempts == {2}
    assert resumed.report is not None
    assert resumed.report.siblings_reused >= len(sealed_before)
    assert_conserved(replayed(tmp_path / "run"))


async def test_siblings_sealed_after_the_checkpoint_are_redone_as_rows_missing(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    for group in life.p.live_groups():
        life.parts.pool.hold(group.group_id, 1, 1)  # let them seal past the checkpoint, without finishing
    checkpoint = life.p.checkpoints[-1]
    # A row that was put just before the save, and sealed just after, is there all the same.
    saved = (tmp_path / "run" / "checkpoints" / checkpoint.name / "data_plane" / "rows.json").read_text()

    def sealed_since() -> list[tuple[int, int]]:
        return [
            (group.group_id, g)
            for group in life.p.live_groups()
            for g, s in group.siblings.items()
            if s.sealed_seq > checkpoint.position.seq
            and staging_key(group.group_id, g, s.attempt, 0) not in saved
        ]

    async with asyncio.timeout(600):
        await life.controller._runtime.changes.wait_for(lambda: sealed_since() or None)
    for _ in range(200):
        await asyncio.sleep(0)
    await life.kill()
    assert life.p.checkpoints[-1] is checkpoint
    lost = sealed_since()
    resumed = await next_life(tmp_path / "run", life.config)
    superseded = {
        (event.group_id, event.generation)
        for event in events_of(tmp_path / "run", e.AttemptSuperseded)
        if event.reason is Reason.ROWS_MISSING
    }
    assert superseded == set(lost)
    assert resumed.report is not None
    assert resumed.report.siblings_redispatched.get("rows_missing", 0) == len(lost)
    await resumed.train()
    assert_conserved(replayed(tmp_path / "run"))


async def test_steps_past_the_checkpoint_are_rolled_back_and_applied_once(tmp_path: Path):
    life = await first_life(tmp_path / "run", run_config(trainer__max_steps=6))
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    resumed = await (await next_life(tmp_path / "run", life.config)).train()
    applied: Counter[int] = Counter()
    for record in history(tmp_path / "run"):
        if isinstance(record.event, e.RunRestored):
            applied = Counter({g: n for g, n in applied.items() if n <= record.event.train_step})
        if isinstance(record.event, e.StepApplied):
            for group in record.event.group_ids:
                assert group not in applied
                applied[group] = record.event.train_step
    assert len(applied) == 12
    assert resumed.p.train_step == 6
    assert_conserved(resumed.p)


async def test_restart_before_any_checkpoint_begins_again_and_keeps_every_draw(tmp_path: Path):
    life = await first_life(tmp_path / "run")
    await life.train_until(lambda p: p.train_step == 1)
    await life.kill()
    drawn = life.p.draw_cursor
    resumed = await next_life(tmp_path / "run", life.config)
    assert resumed.p.draw_cursor == drawn
    assert resumed.p.train_step == 0
    await resumed.train()
    draws = [event.prompt.draw_index for event in events_of(tmp_path / "run", e.GroupReserved)]
    assert draws == list(range(len(draws)))
    assert_conserved(replayed(tmp_path / "run"))


async def test_many_kills_in_a_row_lose_no_prompt_and_train_none_twice(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    for seals in range(4, 40, 4):
        try:
            await life.train_until(lambda p, seals=seals: p.sealed_total >= seals)
        except AssertionError:
            break
        await life.kill()
        life = await next_life(tmp_path / "run", config)
    await life.kill()
    final = await (await next_life(tmp_path / "run", config)).train()
    p = replayed(tmp_path / "run")
    assert_conserved(p)
    assert p.applied_total == 12
    assert projection_digest(p) == projection_digest(final.p)


async def test_restart_of_a_restart_changes_nothing_but_what_the_restarts_themselves_say(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    attempts: list[dict[tuple[int, int], int]] = []
    checkpoints = []
    for _ in range(10):
        resumed = await next_life(tmp_path / "run", life.config)
        assert resumed.report is not None
        checkpoints.append(resumed.report.checkpoint)
        await resumed.kill()
        p = replayed(tmp_path / "run")
        assert projection_digest(p) == projection_digest(resumed.p)
        assert_conserved(p)
        attempts.append(
            {(g.group_id, s.generation): s.attempt for g in p.live_groups() for s in g.siblings.values()}
        )
    assert len(set(checkpoints)) == 1
    # Nothing was dispatched in these lives: no attempt may have grown.
    assert attempts == [attempts[0]] * 10
    resumed = await (await next_life(tmp_path / "run", life.config)).train()
    assert resumed.p.train_step == 6
    assert_conserved(replayed(tmp_path / "run"))


async def test_prompt_group_is_redone_whole_at_restart(tmp_path: Path):
    config = run_config(trainer__max_steps=6, rollout_recovery__default_granularity=Granularity.PROMPT_GROUP)
    parts = FakeParts()
    parts.prepare = lambda parts: parts.pool.hold(4, 2, 1) and None
    life = await first_life(tmp_path / "run", config, parts)
    await life.train_until(
        lambda p: bool(p.checkpoints) and 4 in p.groups and p.groups[4].siblings[0].running
    )
    assert not any(s.sealed for s in life.p.groups[4].siblings.values())
    await life.kill()
    resumed = await (await next_life(tmp_path / "run", config)).train()
    attempts = {(o.generation, o.attempt) for o in resumed.parts.pool.calls if o.group_id == 4}
    assert attempts == {(0, 2), (1, 2), (2, 2)}
    assert_conserved(replayed(tmp_path / "run"))


async def test_changed_granularity_changes_nothing_for_groups_that_exist(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    await life.kill()
    config = run_config(trainer__max_steps=6, rollout_recovery__default_granularity=Granularity.PROMPT_GROUP)
    resumed = await (await next_life(tmp_path / "run", config)).train()
    assert (group_id, 0) not in resumed.parts.pool.attempts()


async def test_live_groups_never_exceed_the_permits_nor_siblings_the_worker_budget(tmp_path: Path):
    config = run_config(rollout__max_live_groups=3, rollout__max_inflight_siblings=4)
    parts = FakeParts()
    parts.prepare = lambda parts: setattr(parts.pool, "delay_ticks", lambda order: 500)
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    p = Projection()
    most = 0
    for record in history(tmp_path / "run"):
        fold(p, record)
        most = max(most, p.alive_total)
    assert most == 3
    assert life.parts.pool.max_running == 4


async def test_run_that_was_killed_before_its_first_event_is_begun_again(tmp_path: Path):
    config = run_config()
    log = create_log(
        tmp_path / "run" / "log", log_id="l", run_id="r", writer_version="0", settings=config.log
    )
    log.close()
    with pytest.raises(RunNotFoundError):
        await next_life(tmp_path / "run", config)
    life = await (await first_life(tmp_path / "run", config)).train()
    assert life.p.run_id == "r"
    assert life.p.train_step == 4
