"""The proof holds for every honest run, and fails, by name, for each way of losing or repeating work."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kinlog_builders import Story, append_now, new_log, prompt_ref
from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.lineage.scan import scan_log
from kinlog.replay.proof import Proof, prove, render_proof
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason


def _prove(run: DiskRun) -> Proof:
    return prove(scan_log(run.directory.log))


def _told(path: Path, *events: e.Event) -> Proof:
    """The proof of a log with exactly these events, whether or not they can be folded."""
    opened = new_log(path)
    append_now(opened, *events)
    opened.close()
    return prove(scan_log(path))


@pytest.mark.parametrize("seed", range(4))
def test_the_proof_holds_for_a_run_that_is_killed_again_and_again(tmp_path: Path, seed: int):
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, seed, permits=8)
    for life in range(1, 4):
        chance.live(through_step=4 * life, groups_per_step=2, checkpoint_every=3)
        chance.turn(2)
        chance.turn(2)
        run.kill()
        run.restart()
    run.kill()
    proof = _prove(run)
    assert proof.holds
    assert proof.failures == ()
    assert proof.drawn == proof.applied + sum(proof.dropped.values()) + sum(proof.parked.values()) + (
        proof.alive or 0
    )
    assert (proof.drawn, proof.alive, proof.steps) == (run.p.drawn_total, run.p.alive_total, run.p.train_step)
    assert len(proof.restarts) == 3
    for restart in proof.restarts:
        assert restart.sealed_before == restart.reused + sum(restart.regenerated.values())
    assert sum(n for r in proof.restarts for n in r.regenerated.values()) <= sum(proof.sealed_redone.values())


def test_what_a_restart_reused_and_redid_is_counted_from_its_events(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    (restart,) = _prove(run).restarts
    assert (restart.checkpoint, restart.train_step) == ("step_000001", 1)
    assert (restart.sealed_before, restart.reused) == (4, 3)
    assert restart.regenerated == {"rows_missing": 1}
    assert restart.in_flight_redispatched == {"controller_restart": 2}
    assert (restart.tokens_reused, restart.tokens_regenerated) == (30, 10)


def test_the_proof_counts_what_the_plan_said(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, 9, permits=8)
    chance.live(through_step=7, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    run.kill()
    plan = run.restart()
    run.kill()
    (restart,) = _prove(run).restarts
    assert restart.reused == len(plan.reused)
    assert restart.tokens_reused == plan.tokens_saved
    assert restart.tokens_regenerated == plan.lost_tokens
    redone = sum(restart.regenerated.values()) + sum(restart.in_flight_redispatched.values())
    assert redone == len(plan.superseded)


def test_siblings_whose_group_the_restart_dropped_are_neither_reused_nor_redone(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.story.commit(e.GroupDropped(group_id=2, reason=Reason.STALE))
    run.kill()
    (restart,) = _prove(run).restarts
    assert (restart.sealed_before, restart.reused, restart.left_with_group) == (4, 2, {"stale": 1})


def test_steps_that_a_restart_undid_are_not_counted_as_trained(tmp_path: Path):
    told = Story()
    first, second = told.finalized(), told.finalized()
    told.train(first)
    told.commit(e.WriterOpened(host="here", pid=2))
    told.restore()
    told.train(second)
    told.train(first)
    proof = _told(tmp_path / "log", *told.events)
    assert proof.holds
    assert (proof.steps, proof.steps_rolled_back, proof.applied_twice) == (2, 1, ())


def test_a_group_applied_twice_on_the_surviving_history_is_named(tmp_path: Path):
    told = Story()
    group = told.finalized()
    told.train(group)
    again = e.StepApplied(train_step=2, group_ids=(group,))
    proof = _told(tmp_path / "log", *told.events, again)
    assert proof.applied_twice == (group,)
    assert not proof.holds
    assert "step_applied" in proof.impossible
    assert "1 group trained on twice" in render_proof(proof)


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
    proof = _told(tmp_path / "log", *told.events, skipping)
    assert (proof.draws_missing, proof.draw_cursor) == ((1,), 3)
    assert "1 prompt lost" in proof.failures


def test_a_sibling_redispatched_without_a_supersede_is_counted(tmp_path: Path):
    told = Story()
    group = told.generating()
    told.seal(group, 0)
    again = e.SiblingDispatched(
        group_id=group, generation=0, attempt=2, weight_version=0, worker="worker-0", seed=1
    )
    proof = _told(tmp_path / "log", *told.events, again)
    assert proof.redispatched_without_reason == 1
    assert not proof.holds


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
    proof = _told(tmp_path / "log", *told.events, *bad)
    assert not proof.conservation_holds
    assert proof.counted_twice or proof.draws_repeated
    assert "DOES NOT HOLD" in render_proof(proof)


def test_rewards_are_of_the_first_and_last_applied_steps(tmp_path: Path):
    told = Story()
    for reward in (0.0, 0.25, 0.5, 1.0):
        told.train(told.finalized(raw_reward=reward))
    proof = _told(tmp_path / "log", *told.events)
    assert proof.first_rewards is not None
    assert proof.last_rewards is not None
    assert (proof.first_rewards.first_step, proof.first_rewards.last_step) == (1, 2)
    assert (proof.first_rewards.mean_raw_reward, proof.last_rewards.mean_raw_reward) == (0.125, 0.75)
    assert proof.last_rewards.mean_shaped_reward == 0.375
    assert proof.last_rewards.siblings == 4


def test_placeholders_are_no_part_of_a_mean_reward(tmp_path: Path):
    told = Story()
    group = told.generating()
    told.seal(group, 0, raw_reward=1.0)
    told.seal(group, 1, placeholder=True)
    told.start_finalize(group)
    told.finish_finalize(group)
    told.train(group)
    proof = _told(tmp_path / "log", *told.events)
    assert proof.first_rewards is not None
    assert (proof.first_rewards.siblings, proof.first_rewards.mean_raw_reward) == (1, 1.0)


def test_a_run_without_steps_or_restarts_says_so(tmp_path: Path):
    text = render_proof(_told(tmp_path / "log", *Story().events))
    assert "no step was applied" in text
    assert "no restart" in text
    assert "\nHOLDS" in text


def test_the_text_fits_a_narrow_terminal(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    assert max(len(line) for line in render_proof(_prove(run)).split("\n")) <= 100
