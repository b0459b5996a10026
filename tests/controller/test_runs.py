"""Whole runs on in-memory parts: trained to the end, killed and resumed, in every way that first light promises."""

import asyncio
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from kinlog_fake_parts import FakeDataPlane, FakeDataset, FakeParts, FakeStream
from kinlog_lives import Life, assert_conserved, first_life, history, next_life, replayed, run_config

from kinlog.controller.adopt import adopt_checkpoint
from kinlog.controller.samplers import Draw
from kinlog.lineage.fold import fold
from kinlog.lineage.log import create_log
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import GroupPhase, GroupState, Projection, projection_digest
from kinlog.replay.checkpoints import MANIFEST_NAME
from kinlog.schemas import events as e
from kinlog.schemas.errors import (
    CheckpointError,
    ConfigError,
    DataPlaneError,
    DataPlaneTimeoutError,
    DatasetError,
    LogDamagedError,
    RolloutsFailError,
    RowsMissingError,
    RunExistsError,
    RunLockedError,
    RunNotFoundError,
)
from kinlog.schemas.orders import FinalizeRejected
from kinlog.schemas.reasons import Granularity, Partition, Reason, Validity
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import RowTag
from kinlog.schemas.settings import SamplerSettings


def events_of(path: Path, kind: type[e.Event]) -> list[e.Event]:
    return [record.event for record in history(path) if isinstance(record.event, kind)]


def files_of(path: Path) -> dict[str, bytes]:
    return {
        p.relative_to(path).as_posix(): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "writer.lock"
    }


def sealed_and_running(p) -> bool:
    return any(
        group.phase is GroupPhase.GENERATING
        and any(s.sealed for s in group.siblings.values())
        and any(s.running for s in group.siblings.values())
        for group in p.live_groups()
    )


async def interrupted_life(path: Path, config=None) -> tuple[Life, int]:
    """A life with a checkpoint at step 2, at which group ``g`` had generations 0 and 1 sealed and 2 running, and it
    still has. Returns the life and ``g``."""
    parts = FakeParts()
    held = 5

    def script(parts: FakeParts) -> None:
        for generation in (2,):
            parts.pool.hold(held, generation, 1)

    parts.prepare = script
    life = await first_life(path, config or run_config(trainer__max_steps=6), parts)
    await life.train_until(
        lambda p: (
            bool(p.checkpoints)
            and held in p.groups
            and p.groups[held].siblings[1].sealed is not None
            and p.groups[held].siblings[1].sealed_seq <= p.checkpoints[-1].position.seq
        )
    )
    return life, held


async def test_run_trains_every_step_on_full_groups_and_loses_nothing(tmp_path: Path):
    life = await (await first_life(tmp_path / "run")).train()
    steps = [event.group_ids for event in events_of(tmp_path / "run", e.StepApplied)]
    assert [len(groups) for groups in steps] == [2, 2, 2, 2]
    assert len({group for groups in steps for group in groups}) == 8
    assert_conserved(life.p)
    assert life.p.alive_total == 0
    assert projection_digest(replayed(tmp_path / "run")) == projection_digest(life.p)


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
    for _ in range(200):
        await asyncio.sleep(0)
    await life.kill()
    checkpoint = life.p.checkpoints[-1]
    # A row that was put just before the save, and sealed just after, is there all the same.
    saved = (tmp_path / "run" / "checkpoints" / checkpoint.name / "data_plane" / "rows.json").read_text()
    lost = [
        (group.group_id, g)
        for group in life.p.live_groups()
        for g, s in group.siblings.items()
        if s.sealed_seq > checkpoint.position.seq
        and staging_key(group.group_id, g, s.attempt, 0) not in saved
    ]
    assert lost
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


async def test_prompt_group_discards_every_result_of_an_attempt_in_which_one_failed(tmp_path: Path):
    config = run_config(rollout_recovery__task_granularity_overrides={"even": Granularity.PROMPT_GROUP})
    parts = FakeParts()
    parts.prepare = lambda parts: (
        [parts.pool.fail(group, 1, 1, Reason.INFRASTRUCTURE_FAILURE) for group in range(8)] and None
    )
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    whole = {
        event.group_id
        for event in events_of(tmp_path / "run", e.GroupReserved)
        if event.granularity is Granularity.PROMPT_GROUP
    }
    assert whole
    for group in whole:
        orders = Counter((o.generation, o.attempt) for o in life.parts.pool.calls if o.group_id == group)
        assert set(orders) == {(g, a) for g in range(3) for a in (1, 2)}
    for group in set(range(8)) - whole:
        generated = {(o.generation, o.attempt) for o in life.parts.pool.calls if o.group_id == group}
        assert generated == {(0, 1), (1, 1), (1, 2), (2, 1)}
    reasons = Counter(event.reason for event in events_of(tmp_path / "run", e.AttemptSuperseded))
    assert reasons[Reason.INFRASTRUCTURE_FAILURE] == 8
    assert reasons[Reason.COHORT_RESTART] == 2 * len(whole)
    staged = list(life.parts.data_plane.rows[Partition.STAGING])
    assert staged == []


async def test_late_result_of_a_timed_out_attempt_is_rejected_and_recorded(tmp_path: Path):
    config = run_config(rollout__sibling_timeout_s=0.05)
    parts = FakeParts()
    gates: list[asyncio.Event] = []
    parts.prepare = lambda parts: gates.append(parts.pool.hold(0, 1, 1))
    life = await first_life(tmp_path / "run", config, parts)
    await life.train_until(lambda p: p.superseded.get(Reason.TIMEOUT, 0) == 1)
    gates[0].set()
    await life.finish()
    rejected = events_of(tmp_path / "run", e.LateResultRejected)
    assert [(r.group_id, r.generation, r.attempt) for r in rejected] == [(0, 1, 1)]
    sealed = [
        s.attempt
        for s in events_of(tmp_path / "run", e.SiblingSealed)
        if (s.group_id, s.generation) == (0, 1)
    ]
    assert sealed == [2]
    assert life.parts.data_plane.rows[Partition.STAGING] == {}


async def test_lost_worker_costs_one_attempt(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = lambda parts: parts.pool.lose_worker(1, 0, 1)
    life = await (await first_life(tmp_path / "run", parts=parts)).train()
    assert life.p.superseded == {Reason.WORKER_LOST: 1}
    assert_conserved(life.p)


async def test_spent_retry_budget_parks_the_group_and_training_goes_on(tmp_path: Path):
    config = run_config(rollout__max_data_retries=1)
    parts = FakeParts()
    parts.prepare = lambda parts: [parts.pool.fail(1, 0, a, Reason.DATA_FAILURE) for a in (1, 2)] and None
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.train_step == 4
    assert life.p.parked_total == 1
    assert life.p.groups[1].parked_reason is Reason.RETRY_BUDGET
    assert_conserved(life.p)


async def test_lost_finalize_answer_is_driven_again_and_gives_each_row_once(tmp_path: Path):
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        parts.finalizer.lose_answers = 2

    parts.prepare = script
    life = await (await first_life(tmp_path / "run", parts=parts)).train()
    finalized = Counter(event.group_id for event in events_of(tmp_path / "run", e.GroupFinalized))
    assert set(finalized.values()) == {1}
    assert len(life.parts.finalizer.calls) == 8 + 2


async def test_rejected_finalize_redoes_the_sibling_that_is_no_good(tmp_path: Path):
    parts = FakeParts()
    rejected = FinalizeRejected(group_id=2, generation=1, reason=Reason.DIGEST_MISMATCH, detail="scripted")
    parts.prepare = lambda parts: parts.finalizer.reject.update({2: rejected})
    life = await (await first_life(tmp_path / "run", parts=parts)).train()
    generated = sorted((o.generation, o.attempt) for o in life.parts.pool.calls if o.group_id == 2)
    assert generated == [(0, 1), (1, 1), (1, 2), (2, 1)]
    assert life.p.superseded == {Reason.DIGEST_MISMATCH: 1}


async def test_group_with_too_few_valid_siblings_is_dropped_with_its_reason(tmp_path: Path):
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        for generation in (0, 1):
            parts.pool.answers[3, generation, 1] = lambda order: parts.pool.seal(
                order, validity=Validity.FAILED
            )

    parts.prepare = script
    config = run_config(rollout__invalid_siblings="keep_masked")
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.dropped == {Reason.LOW_VALID_FRACTION: 1}
    assert life.parts.data_plane.rows[Partition.STAGING] == {}
    assert_conserved(life.p)


async def test_result_that_is_no_example_is_generated_again_within_the_budget(tmp_path: Path):
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        for attempt in (1, 2, 3):
            parts.pool.answers[3, 0, attempt] = lambda order: parts.pool.seal(
                order, validity=Validity.POISONED
            )
        parts.pool.answers[2, 0, 1] = lambda order: parts.pool.seal(order, validity=Validity.FAILED)

    parts.prepare = script
    config = run_config(rollout__max_data_retries=2)
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    sealed = {(s.group_id, s.generation): s for s in events_of(tmp_path / "run", e.SiblingSealed)}
    assert (sealed[2, 0].attempt, sealed[2, 0].validity) == (2, Validity.VALID)
    # The budget is spent: kept, so that the group has its N rows, and masked, so that it teaches nothing.
    assert (sealed[3, 0].attempt, sealed[3, 0].validity) == (3, Validity.POISONED)
    assert life.p.superseded == {Reason.DATA_FAILURE: 3}
    assert life.parts.data_plane.rows[Partition.STAGING] == {}
    assert_conserved(life.p)


@pytest.mark.parametrize("granularity", list(Granularity))
async def test_spent_budget_puts_a_placeholder_in_the_siblings_place_when_partial_groups_are_wanted(
    tmp_path: Path, granularity: Granularity
):
    parts = FakeParts()
    parts.prepare = lambda parts: [parts.pool.fail(1, 0, a, Reason.DATA_FAILURE) for a in (1, 2)] and None
    config = run_config(
        rollout__max_data_retries=1,
        rollout__spent_retry_budget="train_partial",
        rollout_recovery__default_granularity=granularity,
    )
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    placeholders = [
        s for s in events_of(tmp_path / "run", e.SiblingSealed) if s.validity is Validity.PLACEHOLDER
    ]
    if granularity is Granularity.PROMPT_GROUP:  # whole or nothing
        assert placeholders == []
        assert life.p.parked_total == 1
    else:
        assert [(s.group_id, s.generation, s.attempt, s.receipt) for s in placeholders] == [(1, 0, 3, None)]
        assert any(1 in event.group_ids for event in events_of(tmp_path / "run", e.StepApplied))
        (finalized,) = (f for f in events_of(tmp_path / "run", e.GroupFinalized) if f.group_id == 1)
        assert len(finalized.rows) == 3
        assert finalized.valid_fraction == pytest.approx(2 / 3)
    assert_conserved(life.p)


async def test_spent_budget_drops_the_group_when_that_is_wanted(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = lambda parts: [parts.pool.fail(1, 0, a, Reason.DATA_FAILURE) for a in (1, 2)] and None
    config = run_config(rollout__max_data_retries=1, rollout__spent_retry_budget="drop")
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.dropped == {Reason.RETRY_BUDGET: 1}
    assert life.p.parked_total == 0
    assert life.parts.data_plane.rows[Partition.STAGING] == {}
    assert_conserved(life.p)


async def test_spent_budget_stops_the_run_when_that_is_configured(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = lambda parts: parts.pool.fail(1, 0, 1, Reason.DATA_FAILURE)
    config = run_config(rollout__max_data_retries=0, rollout__spent_retry_budget="fail_run")
    life = await first_life(tmp_path / "run", config, parts)
    with pytest.raises(RolloutsFailError, match="group 1 is parked"):
        await life.controller.run()
    await life.kill()
    # Group 1 stays aside; the run goes on without it.
    resumed = await (await next_life(tmp_path / "run", config)).train()
    assert resumed.p.parked_total == 1
    assert resumed.p.train_step == 4


async def test_run_in_which_no_rollout_ever_succeeds_is_stopped_before_it_eats_the_dataset(tmp_path: Path):
    parts = FakeParts(FakeDataset(size=1000))
    parts.prepare = lambda parts: (
        [parts.pool.fail(group, 0, 1, Reason.DATA_FAILURE) for group in range(100)]
        and [parts.pool.hold(group, g, 1) for group in range(100) for g in (1, 2)]
        and None
    )
    life = await first_life(tmp_path / "run", run_config(rollout__max_data_retries=0), parts)
    with pytest.raises(RolloutsFailError, match="no rollout has succeeded yet"):
        await life.controller.run()
    assert 16 <= life.p.parked_total < 30
    await life.kill()


async def test_rows_that_could_not_be_cleared_are_cleared_the_next_time_and_end_nothing(tmp_path: Path):
    parts = FakeParts()
    life = await first_life(tmp_path / "run", parts=parts)
    refusals = iter([True, True, True])

    def refuse(partition: Partition, keys: list[str]) -> None:
        if next(refusals, False):
            raise DataPlaneError("scripted")

    parts.data_plane.on_clear = refuse
    await life.train()
    assert parts.data_plane.rows[Partition.STAGING] == {}


async def test_more_epochs_are_trained_when_a_later_life_allows_them(tmp_path: Path):
    config = run_config(trainer__max_steps=6, dataset__max_epochs=1)
    await (await first_life(tmp_path / "run", config, FakeParts(FakeDataset(size=6)))).train()
    assert replayed(tmp_path / "run").exhausted
    more = run_config(trainer__max_steps=6, dataset__max_epochs=2)
    resumed = await (await next_life(tmp_path / "run", more, FakeParts(FakeDataset(size=6)))).train()
    assert resumed.p.train_step == 6
    assert_conserved(resumed.p)


@pytest.mark.parametrize("shortfall", ["top_up", "shrink"])
async def test_place_of_a_group_that_left_is_drawn_again_or_the_step_shrinks_and_says_so(
    tmp_path: Path, shortfall: str
):
    config = run_config(
        sampler__name="in_order",
        sampler__shortfall=shortfall,
        rollout__invalid_siblings="keep_masked",
    )
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        for generation in (0, 1):
            parts.pool.answers[3, generation, 1] = lambda order: parts.pool.seal(
                order, validity=Validity.FAILED
            )

    parts.prepare = script
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.dropped == {Reason.LOW_VALID_FRACTION: 1}
    sizes = [len(event.group_ids) for event in events_of(tmp_path / "run", e.StepApplied)]
    shrunk = [
        (event.train_step, event.reason, event.expected_groups, event.found_groups)
        for event in events_of(tmp_path / "run", e.StepShrunk)
    ]
    if shortfall == "top_up":
        assert (sizes, shrunk) == ([2, 2, 2, 2], [])
    else:
        assert (sizes, shrunk) == ([2, 1, 2, 2], [(2, Reason.SHORTFALL, 2, 1)])
    assert_conserved(life.p)


async def test_streaming_dataset_goes_on_where_the_cursor_stands(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config, FakeParts(FakeStream(40)))
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    drawn = life.p.draw_cursor
    stream = FakeStream(40)
    resumed = await (await next_life(tmp_path / "run", config, FakeParts(stream))).train()
    assert stream.opened[-1] == drawn
    assert resumed.p.train_step == 6
    samples = [event.prompt.sample_id for event in events_of(tmp_path / "run", e.GroupReserved)]
    assert samples == [f"row-{n}" for n in range(len(samples))]
    assert_conserved(replayed(tmp_path / "run"))


class NewestFirst:
    """A sampler of somebody's own."""

    def __init__(self, settings: SamplerSettings, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step

    def may_draw(self, p: Projection) -> Draw | None:
        return Draw(None)

    def select(self, p: Projection) -> tuple[int, ...] | None:
        ready = [g.group_id for g in p.live_groups() if g.phase is GroupPhase.FINALIZED]
        return tuple(ready[-self._groups_per_step :]) if len(ready) >= self._groups_per_step else None

    def is_stale(self, p: Projection, group: GroupState) -> bool:
        return False


async def test_sampler_of_ones_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("somebodys_samplers")
    module.NewestFirst = NewestFirst  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = run_config(sampler__name="somebodys_samplers:NewestFirst")
    life = await (await first_life(tmp_path / "run", config)).train()
    assert life.p.train_step == 4
    for name, complaint in (
        ("somebodys_samplers:Oldest", "cannot be made"),
        ("nobodys:Class", "cannot be made"),
        ("random", "expected in_order"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            Life(tmp_path / "other", run_config(sampler__name=name))


async def test_promised_rows_that_are_missing_are_named_and_nothing_is_changed(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    await life.kill()
    before = files_of(tmp_path / "run")
    gone = staging_key(group_id, 0, 1, 0)

    parts = FakeParts()
    parts.tamper = lambda data_plane: data_plane.rows[Partition.STAGING].pop(gone) and None
    with pytest.raises(RowsMissingError, match=gone):
        await next_life(tmp_path / "run", life.config, parts)
    assert files_of(tmp_path / "run") == before
    assert parts.data_plane.closed

    # The choice to redo them is explicit.
    config = run_config(trainer__max_steps=6, rollout_recovery__missing_rows="redispatch")
    resumed = await (await next_life(tmp_path / "run", config, parts)).train()
    assert (group_id, 0) in resumed.parts.pool.attempts()
    assert_conserved(replayed(tmp_path / "run"))


async def test_promised_canonical_rows_that_differ_are_refused(tmp_path: Path):
    life = await first_life(tmp_path / "run", run_config(trainer__max_steps=6))
    await life.train_until(
        lambda p: any(
            c.position.seq > g.finalized_seq > 0 for c in p.checkpoints for g in p.live_groups() if g.rows
        )
    )
    position = life.p.checkpoints[-1].position.seq
    group = next(g for g in life.p.live_groups() if g.rows and g.finalized_seq <= position)
    await life.kill()
    key = canonical_key(group.group_id, 0, group.rows[0].attempt)

    def tamper(data_plane: FakeDataPlane) -> None:
        tag = data_plane.rows[Partition.TRAINING][key]
        data_plane.rows[Partition.TRAINING][key] = msgspec.structs.replace(tag, digest=bytes(16))

    parts = FakeParts()
    parts.tamper = tamper
    with pytest.raises(RowsMissingError, match=f"{key} \\(digest_mismatch\\)"):
        await next_life(tmp_path / "run", life.config, parts)


async def test_rows_that_nobody_refers_to_are_cleared_and_counted(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    orphan = RowTag(group_id=900, generation=0, attempt=1, call=0, digest=bytes(16))
    parts = FakeParts()
    parts.tamper = lambda data_plane: data_plane.rows[Partition.STAGING].update({"orphan": orphan})
    resumed = await next_life(tmp_path / "run", life.config, parts)
    assert "orphan" not in parts.data_plane.rows[Partition.STAGING]
    assert resumed.report is not None
    assert resumed.report.rows_cleared["staging"] >= 1
    cleared = [c for c in events_of(tmp_path / "run", e.RowsCleared) if c.reason is Reason.UNREFERENCED]
    assert any(900 in c.group_ids for c in cleared)
    await resumed.kill()


async def test_half_written_newest_checkpoint_is_skipped_with_the_reason(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: len(p.checkpoints) == 2)
    names = [c.name for c in life.p.checkpoints]
    await life.kill()
    (tmp_path / "run" / "checkpoints" / names[1] / MANIFEST_NAME).unlink()
    resumed = await next_life(tmp_path / "run", config)
    assert resumed.report is not None
    assert resumed.report.checkpoint == names[0]
    assert [s.name for s in resumed.report.skipped] == [names[1]]
    assert MANIFEST_NAME in resumed.report.skipped[0].reason
    await resumed.train()
    assert_conserved(replayed(tmp_path / "run"))


async def test_checkpoint_that_cannot_be_loaded_gives_way_to_an_older_one(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: len(p.checkpoints) == 2)
    names = [c.name for c in life.p.checkpoints]
    await life.kill()

    class Stubborn(FakeParts):
        loads = 0

        async def start_data_plane(self) -> FakeDataPlane:
            data_plane = await super().start_data_plane()
            load = data_plane.load

            async def once_broken(directory: Path, *, timeout_s: float) -> None:
                self.loads += 1
                if self.loads == 1:
                    raise DataPlaneError("scripted")
                await load(directory, timeout_s=timeout_s)

            data_plane.load = once_broken  # type: ignore[method-assign]
            return data_plane

    resumed = await next_life(tmp_path / "run", config, Stubborn())
    assert resumed.report is not None
    assert resumed.report.checkpoint == names[0]
    await resumed.kill()


async def test_failed_save_costs_a_checkpoint_and_not_the_run(tmp_path: Path):
    parts = FakeParts()
    life = await first_life(tmp_path / "run", parts=parts)
    parts.data_plane.fail_save = DataPlaneError("scripted")
    await life.train_until(lambda p: p.train_step == 3)
    parts.data_plane.fail_save = None
    await life.finish()
    assert [event.name for event in events_of(tmp_path / "run", e.CheckpointFailed)] == ["step_000002"]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000004"]


async def test_run_whose_last_checkpoint_fails_has_not_succeeded(tmp_path: Path):
    parts = FakeParts()
    life = await first_life(tmp_path / "run", parts=parts)
    parts.data_plane.fail_save = DataPlaneError("scripted")
    with pytest.raises(CheckpointError, match="last checkpoint step_000004 failed"):
        await life.controller.run()
    await life.kill()
    resumed = await (await next_life(tmp_path / "run")).train()
    assert resumed.p.train_step == 4
    assert [c.name for c in resumed.p.checkpoints] == ["step_000002", "step_000004"]


async def test_checkpoint_directory_alone_restarts_the_run(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / life.p.checkpoints[-1].name
    await life.kill()
    alone = tmp_path / "elsewhere" / "backup"
    shutil.copytree(checkpoint, alone)
    shutil.rmtree(tmp_path / "run")
    copied = tmp_path / "copied"
    adopt_checkpoint(alone, RunDirectory(copied))
    with pytest.raises(RunExistsError):
        adopt_checkpoint(alone, RunDirectory(copied))
    resumed = await (await next_life(copied, life.config)).train()
    assert (group_id, 0) not in resumed.parts.pool.attempts()
    assert resumed.p.train_step == 6
    assert_conserved(replayed(copied))
    # The copied log had yet to hear of the checkpoint that it is in: it is one to keep all the same.
    kept = [c.name for c in resumed.p.checkpoints]
    assert len(kept) == 2
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == kept


async def test_second_controller_is_refused_while_the_first_lives(tmp_path: Path):
    life = await first_life(tmp_path / "run")
    await life.train_until(lambda p: p.train_step == 1)
    with pytest.raises(RunLockedError):
        await next_life(tmp_path / "run", life.config)
    with pytest.raises(RunLockedError):
        await first_life(tmp_path / "run", life.config)
    await life.finish()
    with pytest.raises(RunExistsError):
        await first_life(tmp_path / "run", life.config)


async def test_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    segment = next((tmp_path / "run" / "log").glob("segment-*"))
    with open(segment, "r+b") as file:
        file.truncate(6000)
    with pytest.raises(LogDamagedError):
        await next_life(tmp_path / "run", life.config)


async def test_changed_dataset_row_is_refused_by_name(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    with pytest.raises(DatasetError, match="row-"):
        await next_life(tmp_path / "run", life.config, FakeParts(FakeDataset(salt="changed")))


async def test_configuration_that_does_not_fit_is_refused_and_costs_no_training(tmp_path: Path):
    life, group_id = await interrupted_life(tmp_path / "run")
    await life.kill()
    before = files_of(tmp_path / "run")
    config = run_config(trainer__max_steps=6, data_plane__num_storage_units=3)
    with pytest.raises(ConfigError, match="num_storage_units is 3.*saved from 2"):
        await next_life(tmp_path / "run", config)
    with pytest.raises(DatasetError, match="fingerprint"):
        await next_life(tmp_path / "run", life.config, FakeParts(FakeDataset(size=99)))
    assert files_of(tmp_path / "run") == before
    resumed = await (await next_life(tmp_path / "run", life.config)).train()
    assert (group_id, 0) not in resumed.parts.pool.attempts()


async def test_data_plane_that_is_too_slow_to_load_is_refused_not_answered_with_an_older_checkpoint(
    tmp_path: Path,
):
    life, _ = await interrupted_life(tmp_path / "run")
    await life.kill()
    before = files_of(tmp_path / "run")

    def too_slow(data_plane: FakeDataPlane) -> None:
        raise DataPlaneTimeoutError("scripted")

    parts = FakeParts()
    parts.tamper = too_slow
    with pytest.raises(DataPlaneTimeoutError):
        await next_life(tmp_path / "run", life.config, parts)
    assert files_of(tmp_path / "run") == before
    assert parts.data_plane.closed


async def test_start_of_the_run_is_gone_back_to_by_choice_only(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    name = life.p.checkpoints[-1].name
    await life.kill()
    (tmp_path / "run" / "checkpoints" / name / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="--checkpoint start"):
        await next_life(tmp_path / "run", life.config)
    resumed = Life(tmp_path / "run", life.config)
    report = await resumed.controller.resume(checkpoint="start")
    assert report.train_step == 0
    await resumed.train()
    assert_conserved(replayed(tmp_path / "run"))


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


async def test_what_a_killed_save_left_is_never_used_and_is_cleared_away(tmp_path: Path):
    life, _ = await interrupted_life(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    name = life.p.checkpoints[-1].name
    await life.kill()
    shutil.copytree(checkpoints / name, checkpoints / ".incomplete.step_000009.1")
    (checkpoints / "my_backup").mkdir()
    (tmp_path / "run" / "trash" / "step_000001.5").mkdir(parents=True)
    resumed = await next_life(tmp_path / "run", life.config)
    assert resumed.report is not None
    assert [(s.name, "never committed" in s.reason) for s in resumed.report.skipped] == [
        (".incomplete.step_000009.1", True),
        ("my_backup", False),
    ]
    await resumed.train()
    assert (checkpoints / "my_backup").is_dir()
    assert not (checkpoints / ".incomplete.step_000009.1").exists()
    assert list((tmp_path / "run" / "trash").iterdir()) == []


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


async def test_exhausted_dataset_trains_what_is_left_and_ends(tmp_path: Path):
    config = run_config(trainer__max_steps=50, dataset__max_epochs=1)
    life = await (await first_life(tmp_path / "run", config, FakeParts(FakeDataset(size=7)))).train()
    assert [len(event.group_ids) for event in events_of(tmp_path / "run", e.StepApplied)] == [2, 2, 2, 1]
    assert life.p.exhausted
    assert life.p.alive_total == 0
    again = await (await next_life(tmp_path / "run", config, FakeParts(FakeDataset(size=7)))).train()
    assert again.p.train_step == 4


async def test_resume_past_the_last_step_does_nothing_and_ends(tmp_path: Path):
    await (await first_life(tmp_path / "run")).train()
    resumed = await (await next_life(tmp_path / "run")).train()
    assert resumed.parts.pool.calls == []
    assert resumed.p.train_step == 4


@pytest.mark.parametrize("sampler", ["in_order", "windowed", "weight_fifo", "ready_first"])
async def test_every_sampler_trains_to_the_end_through_a_kill(tmp_path: Path, sampler: str):
    config = run_config(sampler__name=sampler, trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    resumed = await (await next_life(tmp_path / "run", config)).train()
    assert resumed.p.train_step == 6
    assert_conserved(replayed(tmp_path / "run"))


async def test_run_without_any_usable_checkpoint_and_a_forgotten_past_is_refused(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: len(p.checkpoints) == 2 and p.frontier_step > 0)
    await life.kill()
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        (checkpoint / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError):
        await next_life(tmp_path / "run", config)
