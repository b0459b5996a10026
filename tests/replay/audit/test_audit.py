"""The audit holds for every honest run, and fails, by name, for each way of losing or repeating work."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from kinlog_builders import Story, append_now, new_log, prompt_ref
from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.lineage.scan import scan_log
from kinlog.replay.audit.audit import Audit, audit_log
from kinlog.replay.audit.text import render_audit
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason


def _audited(run: DiskRun) -> Audit:
    return audit_log(scan_log(run.directory.log))


def _told(path: Path, *events: e.Event) -> Audit:
    """The audit of a log with exactly these events, whether or not they can be folded."""
    opened = new_log(path)
    append_now(opened, *events)
    opened.close()
    return audit_log(scan_log(path))


@pytest.mark.parametrize("seed", range(4))
def test_the_audit_holds_for_a_run_that_is_killed_again_and_again(tmp_path: Path, seed: int):
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, seed, permits=8)
    for life in range(1, 4):
        chance.live(through_step=4 * life, groups_per_step=2, checkpoint_every=3)
        chance.turn(2)
        chance.turn(2)
        run.kill()
        run.restart()
    run.kill()
    audit = _audited(run)
    assert audit.holds
    assert audit.failures == ()
    assert audit.drawn == audit.applied + sum(audit.dropped.values()) + sum(audit.parked.values()) + (
        audit.alive or 0
    )
    assert (audit.drawn, audit.alive, audit.steps) == (run.p.drawn_total, run.p.alive_total, run.p.train_step)
    assert len(audit.restarts) == 3
    for restart in audit.restarts:
        assert restart.sealed_before == restart.reused + sum(restart.regenerated.values())
    assert sum(n for r in audit.restarts for n in r.regenerated.values()) <= sum(audit.sealed_redone.values())


def test_what_a_restart_reused_and_redid_is_counted_from_its_events(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    (restart,) = _audited(run).restarts
    assert (restart.checkpoint, restart.train_step) == ("step_000001", 1)
    assert (restart.sealed_before, restart.reused) == (4, 3)
    assert restart.regenerated == {"rows_missing": 1}
    assert restart.in_flight_redispatched == {"controller_restart": 2}
    assert (restart.tokens_reused, restart.tokens_regenerated) == (30, 10)


def test_the_audit_counts_what_the_plan_said(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, 9, permits=8)
    chance.live(through_step=7, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    run.kill()
    plan = run.restart()
    run.kill()
    (restart,) = _audited(run).restarts
    assert restart.reused == len(plan.reused)
    assert restart.tokens_reused == plan.tokens_saved
    assert restart.tokens_regenerated == plan.lost_tokens
    redone = sum(restart.regenerated.values()) + sum(restart.in_flight_redispatched.values())
    assert redone == len(plan.superseded)


def test_siblings_whose_group_the_restart_dropped_are_neither_reused_nor_redone(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.story.commit(e.GroupDropped(group_id=2, reason=Reason.STALE))
    run.kill()
    (restart,) = _audited(run).restarts
    assert (restart.sealed_before, restart.reused, restart.left_with_group) == (4, 2, {"stale": 1})


def test_steps_that_a_restart_undid_are_not_counted_as_trained(tmp_path: Path):
    told = Story()
    first, second = told.finalized(), told.finalized()
    told.train(first)
    told.commit(e.WriterOpened(host="here", pid=2))
    told.restore()
    told.train(second)
    told.train(first)
    audit = _told(tmp_path / "log", *told.events)
    assert audit.holds
    assert (audit.steps, audit.steps_rolled_back, audit.applied_twice) == (2, 1, ())


def test_a_group_applied_twice_on_the_surviving_history_is_named(tmp_path: Path):
    told = Story()
    group = told.finalized()
    told.train(group)
    again = e.StepApplied(train_step=2, group_ids=(group,))
    audit = _told(tmp_path / "log", *told.events, again)
    assert audit.applied_twice == (group,)
    assert not audit.holds
    assert "step_applied" in audit.impossible
    assert f"1 group trained on twice: {group}" in render_audit(audit)


def test_a_prompt_that_was_skipped_is_lost(tmp_path: Path):
    told = Story()
    told.reserve()
    skipping = e.GroupReserved(
        group_id=1,
        prompt=prompt_ref(2),
        num_generations=2,
        granularity=Granularity.SIBLING,
        retry_budget=e.RetryBudget(1, 1),
        weight_version=0,
        draw_cursor=3,
    )
    audit = _told(tmp_path / "log", *told.events, skipping)
    assert (audit.draws_missing, audit.draw_cursor) == ((1,), 3)
    assert "1 prompt lost: 1" in audit.failures


def test_a_sibling_redispatched_without_a_supersede_is_counted(tmp_path: Path):
    told = Story()
    group = told.generating()
    told.seal(group, 0)
    again = e.SiblingDispatched(
        group_id=group, generation=0, attempt=2, weight_version=0, worker="worker-0", seed=1
    )
    audit = _told(tmp_path / "log", *told.events, again)
    assert audit.redispatched_without_reason == (f"{group}/0 attempt 2",)
    assert not audit.holds


def _drop_twice(told: Story, group: int) -> tuple[e.Event, ...]:
    told.train(group)
    return (e.GroupDropped(group_id=group, reason=Reason.STALE),)


def _draw_a_prompt_again(told: Story, group: int) -> tuple[e.Event, ...]:
    reserved = told.group(group)
    return (
        e.GroupReserved(
            group_id=group + 1,
            prompt=reserved.prompt,
            num_generations=2,
            granularity=Granularity.SIBLING,
            retry_budget=reserved.retry_budget,
            weight_version=0,
            draw_cursor=1,
        ),
    )


@pytest.mark.parametrize("spoil", [_drop_twice, _draw_a_prompt_again])
def test_a_group_in_two_places_breaks_the_law(
    tmp_path: Path, spoil: Callable[[Story, int], tuple[e.Event, ...]]
):
    told = Story()
    group = told.finalized()
    bad = spoil(told, group)
    audit = _told(tmp_path / "log", *told.events, *bad)
    assert not audit.conservation_holds
    assert audit.counted_twice or audit.draws_repeated
    assert "DOES NOT HOLD" in render_audit(audit)


# ---- what left untrained ------------------------------------------------------------------------------------------


def _groups_of(told: Story, calls_of: Iterable[int], leave: Callable[[Story, int], None]) -> None:
    for calls in calls_of:
        group = told.generating()
        told.seal(group, 0, calls=calls)
        told.seal(group, 1, calls=calls)
        told.start_finalize(group)
        told.finish_finalize(group)
        leave(told, group)


def _trained(told: Story, group: int) -> None:
    told.train(group)


def _dropped(told: Story, group: int) -> None:
    told.commit(e.GroupDropped(group_id=group, reason=Reason.STALE))


def _parked(told: Story, group: int) -> None:
    told.commit(e.GroupParked(group_id=group, reason=Reason.RETRY_BUDGET))


@pytest.mark.parametrize("leave", [_dropped, _parked])
def test_losing_the_long_ones_fails_the_audit_with_the_numbers(
    tmp_path: Path, leave: Callable[[Story, int], None]
):
    told = Story()
    _groups_of(told, range(1, 13), _trained)
    _groups_of(told, range(13, 25), leave)
    audit = _told(tmp_path / "log", *told.events)
    assert audit.conservation_holds
    assert not audit.holds
    (failure,) = audit.failures
    assert failure.startswith(
        "length bias: 12 groups left untrained, median 92.5 tokens, and 12 were trained on,"
    )
    assert "with probability 1.00 (Mann-Whitney, one-sided p = " in failure
    assert failure in render_audit(audit)


def test_losing_groups_of_all_lengths_is_no_bias(tmp_path: Path):
    told = Story()
    _groups_of(told, range(1, 25, 2), _trained)
    _groups_of(told, range(1, 25, 2), _dropped)
    audit = _told(tmp_path / "log", *told.events)
    assert audit.holds
    assert audit.length_bias.superiority == 0.5


def test_length_of_a_group_is_that_of_what_stood_sealed_when_it_left(tmp_path: Path):
    told = Story()
    group = told.generating(siblings=4)
    told.seal(group, 0, calls=20)
    told.supersede(group, 0, Reason.ROWS_MISSING)
    told.dispatch(group, 0)
    told.seal(group, 0, calls=2)
    told.seal(group, 1, calls=4)
    told.seal(group, 2, placeholder=True)
    _dropped(told, group)
    nothing_sealed = told.generating()
    _dropped(told, nothing_sealed)
    bias = _told(tmp_path / "log", *told.events).length_bias
    assert (bias.lost, bias.median_lost) == (1, 15.0)


def test_everything_redone_or_dropped_is_listed_with_its_reason(tmp_path: Path):
    told = Story()
    group = told.generating(siblings=3)
    told.seal(group, 1)
    told.supersede(group, 1, Reason.ROWS_MISSING)
    told.supersede(group, 0, Reason.TIMEOUT)
    told.dispatch(group, 0)
    told.seal(group, 0)
    _parked(told, group)
    _dropped(told, group)
    audit = _told(tmp_path / "log", *told.events)
    found = [
        (g.group_id, g.generation, g.attempt, g.reason, g.with_group, g.was_sealed) for g in audit.given_up
    ]
    assert found == [
        (group, 1, 1, Reason.ROWS_MISSING, False, True),
        (group, 0, 1, Reason.TIMEOUT, False, False),
        (group, 0, 2, Reason.RETRY_BUDGET, True, True),
        (group, 1, 1, Reason.RETRY_BUDGET, True, False),
        (group, 2, 1, Reason.RETRY_BUDGET, True, False),
    ]
    assert audit.given_up_by_reason(dropped=False) == {"rows_missing": 1, "timeout": 1}
    assert audit.given_up_by_reason(dropped=True) == {"retry_budget": 3}
    text = render_audit(audit, listed=True)
    for given_up in audit.given_up:
        assert re.search(
            rf"^ +{given_up.seq} +{given_up.group_id} +{given_up.generation} +{given_up.attempt} .*{given_up.reason}$",
            text,
            re.MULTILINE,
        )


def test_list_of_a_run_that_lost_nothing_says_so(tmp_path: Path):
    text = render_audit(_told(tmp_path / "log", *Story().events), listed=True)
    assert "nothing was redone, and nothing left untrained" in text


def test_restart_s_supersedes_are_in_the_list_too(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    audit = _audited(run)
    assert audit.given_up_by_reason(dropped=False) == {"rows_missing": 1, "controller_restart": 2}


# ---- rewards ------------------------------------------------------------------------------------------------------


def test_rewards_are_of_the_first_and_last_applied_steps(tmp_path: Path):
    told = Story()
    for reward in (0.0, 0.25, 0.5, 1.0):
        told.train(told.finalized(raw_reward=reward))
    audit = _told(tmp_path / "log", *told.events)
    assert audit.first_rewards is not None
    assert audit.last_rewards is not None
    assert (audit.first_rewards.first_step, audit.first_rewards.last_step) == (1, 2)
    assert (audit.first_rewards.mean_raw_reward, audit.last_rewards.mean_raw_reward) == (0.125, 0.75)
    assert audit.last_rewards.mean_shaped_reward == 0.375
    assert audit.last_rewards.siblings == 4


def test_placeholders_are_no_part_of_a_mean_reward(tmp_path: Path):
    told = Story()
    group = told.generating()
    told.seal(group, 0, raw_reward=1.0)
    told.seal(group, 1, placeholder=True)
    told.start_finalize(group)
    told.finish_finalize(group)
    told.train(group)
    audit = _told(tmp_path / "log", *told.events)
    assert audit.first_rewards is not None
    assert (audit.first_rewards.siblings, audit.first_rewards.mean_raw_reward) == (1, 1.0)


def test_a_run_without_steps_or_restarts_says_so(tmp_path: Path):
    text = render_audit(_told(tmp_path / "log", *Story().events))
    assert "no step was applied" in text
    assert "no restart" in text
    assert "\nHOLDS" in text


def test_the_text_fits_a_narrow_terminal(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    assert max(len(line) for line in render_audit(_audited(run)).split("\n")) <= 100
