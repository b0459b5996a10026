"""Every transition refuses what does not fit, before it changes anything; what fits counts once."""

import copy

import pytest
from kinlog_builders import Story, numbered, prompt_ref, story
from msgspec.structs import replace

from kinlog.lineage.fold import fold
from kinlog.lineage.state import GroupPhase, Projection, encode_projection
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.reasons import CheckpointKind, Granularity, Reason


@pytest.fixture
def told() -> Story:
    return Story()


def refused(told: Story, event: e.Event, match: str) -> None:
    """The event does not fit, and nothing was changed by trying."""
    before = encode_projection(told.p)
    with pytest.raises(TransitionError, match=match):
        fold(told.p, e.RecordedEvent(told.p.last_seq + 1, 1, 0, event))
    assert encode_projection(told.p) == before


def reserved(told: Story, **changed: object) -> e.GroupReserved:
    facts = {
        "group_id": told.p.next_group_id,
        "prompt": prompt_ref(told.p.draw_cursor),
        "num_generations": 2,
        "granularity": Granularity.SIBLING,
        "retry_budget": e.RetryBudget(1, 1),
        "weight_version": 0,
        "draw_cursor": told.p.draw_cursor + 1,
    }
    return e.GroupReserved(**{**facts, **changed})  # type: ignore[arg-type]


def test_events_are_folded_in_order_and_without_gaps(told):
    for seq in (told.p.last_seq, told.p.last_seq + 2):
        before = encode_projection(told.p)
        with pytest.raises(TransitionError, match="does not follow"):
            fold(told.p, e.RecordedEvent(seq, 1, 0, numbered(1)))
        assert encode_projection(told.p) == before


def test_refusal_names_seq_and_kind(told):
    refused(told, e.GroupAdmitted(group_id=9), rf"seq {told.p.last_seq + 1}, group_admitted: group 9")


def test_run_is_opened_once(told):
    refused(told, told.events[0], "was opened before")


def test_groups_and_draws_are_taken_in_order_and_none_is_skipped(told):
    told.reserve()
    refused(told, reserved(told, group_id=0), "expected group 1, found 0")
    refused(told, reserved(told, group_id=2), "expected group 1, found 2")
    refused(told, reserved(told, prompt=prompt_ref(2)), "expected draw 1, found 2")
    refused(told, reserved(told, draw_cursor=3), "expected draw 1")
    refused(told, reserved(told, num_generations=0), "0 generations")


def test_group_is_admitted_once_and_before_its_siblings_are_dispatched(told):
    group = told.reserve()
    dispatched = e.SiblingDispatched(
        group_id=group, generation=0, attempt=1, weight_version=0, worker="w", seed=1
    )
    refused(told, dispatched, "expected phase admitted or generating, found reserved")
    told.admit(group)
    refused(told, e.GroupAdmitted(group_id=group), "expected phase reserved, found admitted")


def test_sibling_has_at_most_one_live_attempt_and_a_sealed_one_is_not_sent_again(told):
    group = told.generating()
    again = e.SiblingDispatched(group_id=group, generation=0, attempt=2, weight_version=0, worker="w", seed=1)
    refused(told, again, "attempt 1 is running")
    told.seal(group, 0)
    refused(told, again, "attempt 1 is sealed")
    refused(told, replace(again, generation=7), "no generation 7; it has 0 to 1")


def test_attempt_numbers_only_grow(told):
    group = told.generating()
    told.supersede(group, 0)
    stale = e.SiblingDispatched(group_id=group, generation=0, attempt=1, weight_version=0, worker="w", seed=1)
    refused(told, stale, "attempt 1 does not follow 1")
    told.dispatch(group, 0)
    assert told.group(group).siblings[0].attempt == 2


def test_late_seal_of_superseded_attempt_is_rejected(told):
    group = told.generating()
    late = told.result(group, 0)
    told.supersede(group, 0)
    refused(told, late, r"attempt 1 is not running \(last attempt 1\)")
    told.dispatch(group, 0)
    refused(told, late, r"attempt 1 is not running \(last attempt 2\)")


def test_sealing_twice_is_refused_by_the_fold(told):
    group = told.generating()
    told.seal(group, 0)
    refused(told, told.result(group, 0), "is not running")


def test_group_is_ready_when_its_last_sibling_seals(told):
    group = told.generating(siblings=3)
    told.seal(group, 2, 0)
    assert told.phases()[group] is GroupPhase.GENERATING
    told.seal(group, 1)
    assert told.phases()[group] is GroupPhase.READY


def test_supersede_takes_back_a_seal_and_the_groups_readiness_and_says_why(told):
    group = told.ready()
    told.supersede(group, 1, Reason.ROWS_MISSING)
    sibling = told.group(group).siblings[1]
    assert (sibling.sealed, sibling.sealed_seq, sibling.waiting) == (None, 0, True)
    assert sibling.last_reason is Reason.ROWS_MISSING
    assert told.phases()[group] is GroupPhase.GENERATING
    assert told.p.superseded == {Reason.ROWS_MISSING: 1}
    refused(
        told,
        e.AttemptSuperseded(group_id=group, generation=1, attempt=1, reason=Reason.STALE),
        "neither running nor sealed",
    )


def test_supersede_of_another_attempt_than_the_current_is_refused(told):
    group = told.generating()
    told.supersede(group, 0)
    told.dispatch(group, 0)
    refused(
        told,
        e.AttemptSuperseded(group_id=group, generation=0, attempt=1, reason=Reason.STALE),
        "attempt 1 is neither",
    )


def test_only_failures_count_against_the_budget_of_their_class(told):
    group = told.generating(siblings=1)
    for reason in (Reason.TIMEOUT, Reason.WORKER_LOST, Reason.DATA_FAILURE, Reason.CONTROLLER_RESTART):
        told.supersede(group, 0, reason)
        told.dispatch(group, 0)
    sibling = told.group(group).siblings[0]
    assert (sibling.infrastructure_failures, sibling.data_failures) == (2, 1)


def test_cohort_seals_whole_or_not_at_all(told):
    group = told.generating(granularity=Granularity.PROMPT_GROUP)
    refused(told, told.result(group, 0), "seals with its cohort only")
    refused(told, e.CohortSealed(group_id=group, attempt=2), "not running attempt 2")
    told.seal(group)
    assert told.phases()[group] is GroupPhase.READY


def test_cohort_seal_of_a_given_up_attempt_is_refused(told):
    group = told.generating(granularity=Granularity.PROMPT_GROUP)
    told.supersede(group, 1)
    refused(told, e.CohortSealed(group_id=group, attempt=1), "generation 0 is not running attempt 1")
    told.dispatch(group)
    refused(told, e.CohortSealed(group_id=group, attempt=1), "not running attempt 1")
    told.seal(group)
    assert {s.attempt for s in told.group(group).siblings.values()} == {2}


def test_finalize_of_a_group_that_is_not_ready_is_refused(told):
    group = told.generating()
    refused(told, e.FinalizeStarted(group_id=group), "expected phase finalizing or ready")


def test_lost_finalize_is_driven_again(told):
    group = told.ready()
    told.start_finalize(group)
    told.start_finalize(group)
    told.finish_finalize(group)
    assert told.phases()[group] is GroupPhase.FINALIZED


def test_finalized_rows_are_paired_by_identity_one_for_each_sealed_attempt(told):
    group = told.ready()
    told.start_finalize(group)
    event = told.finalized_event(group)
    first, second = event.rows
    for rows in (
        (first,),
        (first, first),
        (first, second, second),
        (first, e.CanonicalRowRef(1, 2, 16, second.row_digest)),
    ):
        refused(told, replace(event, rows=rows), "expected one row of each sealed attempt")
    told.commit(replace(event, rows=(second, first)))


def test_failed_finalize_leaves_the_group_ready(told):
    group = told.ready()
    refused(
        told,
        e.FinalizeFailed(charged=True, group_id=group, reason=Reason.TIMEOUT),
        "expected phase finalized or finalizing",
    )
    told.start_finalize(group)
    told.commit(e.FinalizeFailed(charged=True, group_id=group, reason=Reason.TIMEOUT))
    state = told.group(group)
    assert (state.phase, state.rows, state.finalized_seq, state.valid_fraction) == (
        GroupPhase.READY,
        (),
        0,
        0.0,
    )


def test_group_that_is_finalizing_keeps_its_attempts(told):
    group = told.ready()
    told.start_finalize(group)
    refused(
        told,
        e.AttemptSuperseded(group_id=group, generation=0, attempt=1, reason=Reason.STALE),
        "found finalizing",
    )


def test_only_finalized_groups_are_claimed_and_only_for_the_next_step(told):
    ready, group = told.ready(), told.finalized()
    refused(told, e.GroupClaimed(group_id=ready, train_step=1), "expected phase finalized")
    refused(told, e.GroupClaimed(group_id=group, train_step=2), "claim for step 1, found step 2")
    told.claim(group)
    refused(told, e.GroupClaimed(group_id=group, train_step=1), "found claimed")


def test_step_applies_exactly_the_groups_that_were_claimed_for_it(told):
    groups = [told.finalized() for _ in range(3)]
    told.claim(*groups[:2])
    refused(told, e.StepApplied(train_step=1, group_ids=tuple(groups)), "expected phase claimed")
    refused(told, e.StepApplied(train_step=2, group_ids=tuple(groups[:2])), "expected step 1, found step 2")
    refused(told, e.StepApplied(train_step=1, group_ids=(groups[0], groups[0])), "lists a group twice")
    refused(
        told,
        e.StepApplied(train_step=1, group_ids=(groups[0],)),
        rf"leaves out claimed groups \[{groups[1]}\]",
    )
    told.apply(*groups[:2])
    assert told.p.steps == {1: tuple(groups[:2])}
    assert told.p.train_step == 1


def test_group_is_applied_at_most_once(told):
    group = told.finalized()
    told.train(group)
    refused(told, e.GroupClaimed(group_id=group, train_step=2), "found applied")
    refused(told, e.StepApplied(train_step=2, group_ids=(group,)), "found applied")
    refused(told, e.GroupDropped(group_id=group, reason=Reason.STALE), "is applied")
    refused(told, e.GroupParked(group_id=group, reason=Reason.RETRY_BUDGET), "is applied")


@pytest.mark.parametrize("phase", [p for p in GroupPhase if p is not GroupPhase.APPLIED])
def test_group_is_dropped_from_any_phase_before_applied_with_its_reason(told, phase):
    group = group_in(told, phase)
    told.commit(e.GroupDropped(group_id=group, reason=Reason.EVICTED))
    assert group not in told.p.groups
    assert (told.p.dropped, told.p.drawn_total) == ({Reason.EVICTED: 1}, 1)
    refused(told, e.GroupDropped(group_id=group, reason=Reason.EVICTED), "not alive")


@pytest.mark.parametrize("phase", [p for p in GroupPhase if p not in (GroupPhase.APPLIED, GroupPhase.PARKED)])
def test_group_is_parked_from_any_phase_before_applied_and_gives_back_its_permit(told, phase):
    group = group_in(told, phase)
    told.commit(e.GroupParked(group_id=group, reason=Reason.RETRY_BUDGET))
    assert (told.p.alive_total, told.p.parked_total) == (0, 1)
    assert not any(s.running for s in told.group(group).siblings.values())
    refused(told, e.GroupParked(group_id=group, reason=Reason.RETRY_BUDGET), "is parked")
    refused(told, e.GroupAdmitted(group_id=group), "found parked")


def group_in(told: Story, phase: GroupPhase) -> int:
    """A group in this phase, by the shortest way."""
    if phase is GroupPhase.RESERVED:
        return told.reserve()
    if phase is GroupPhase.ADMITTED:
        group = told.reserve()
        told.admit(group)
        return group
    if phase is GroupPhase.GENERATING:
        return told.generating()
    if phase is GroupPhase.READY:
        return told.ready()
    if phase is GroupPhase.FINALIZING:
        group = told.ready()
        told.start_finalize(group)
        return group
    group = told.finalized()
    if phase is GroupPhase.CLAIMED:
        told.claim(group)
    elif phase is GroupPhase.APPLIED:
        told.train(group)
    elif phase is GroupPhase.PARKED:
        told.commit(e.GroupParked(group_id=group, reason=Reason.RETRY_BUDGET))
    assert told.phases()[group] is phase
    return group


def test_restore_takes_back_claims_and_later_steps_and_keeps_draws(told):
    first, second, third, fourth = (told.finalized() for _ in range(4))
    told.train(first)
    kept = told.checkpoint()
    told.train(second)
    told.claim(third)
    cursor = told.p.draw_cursor
    told.restore(kept)
    assert told.phases() == {
        first: GroupPhase.APPLIED,
        second: GroupPhase.FINALIZED,
        third: GroupPhase.FINALIZED,
        fourth: GroupPhase.FINALIZED,
    }
    assert (told.p.train_step, told.p.weight_version, told.p.steps) == (1, 1, {1: (first,)})
    assert (told.p.draw_cursor, told.p.drawn_total, told.p.restarts) == (cursor, 4, 1)
    told.train(second)
    assert told.p.steps == {1: (first,), 2: (second,)}


def test_restore_to_the_start_takes_back_everything_the_trainer_did(told):
    groups = [told.finalized() for _ in range(2)]
    told.train(*groups)
    told.restore()
    assert set(told.phases().values()) == {GroupPhase.FINALIZED}
    assert (told.p.train_step, told.p.applied_total) == (0, 0)


def test_restore_before_the_frontier_or_past_the_last_step_is_refused(told):
    told.train(told.finalized())
    told.checkpoint(frontier_step=1)
    told.train(told.finalized())
    restored = e.RunRestored(checkpoint="c", position=None, train_step=0, weight_version=0)
    refused(told, restored, "step 0 is before the frontier, step 1")
    refused(told, replace(restored, train_step=3), "step 3 was never applied.*its last step is 2")


def test_groups_behind_the_frontier_are_forgotten_and_still_counted(told):
    for _ in range(3):
        told.train(told.finalized())
    told.checkpoint(frontier_step=2)
    assert list(told.phases()) == [2]
    assert (told.p.applied_forgotten, told.p.applied_total, told.p.steps) == (2, 3, {3: (2,)})
    refused(
        told,
        replace(told.events[-1], frontier_step=1),
        "the frontier goes back from step 2 to 1",
    )
    refused(told, replace(told.events[-1], frontier_step=4), "step 4 was never applied: the last step is 3")


def test_size_of_the_projection_follows_what_is_alive_and_not_the_length_of_the_run(told):
    sizes = []
    for _ in range(12):
        told.train(told.finalized())
        for number in range(3):
            told.checkpoint(name=f"rollout_{number}", kind=CheckpointKind.ROLLOUT)
        told.checkpoint(frontier_step=told.p.train_step)
        sizes.append(len(encode_projection(told.p)))
    assert sizes[-1] <= sizes[2] + 16


def test_history_for_people_changes_nothing_but_the_place(told):
    told.finalized()
    before = copy.deepcopy(told.p)
    told.commit(e.TailTruncated(segment="s", offset_bytes=1, quarantined_bytes=2, quarantined_to="q"))
    before.last_seq += 1
    assert told.p == before


def test_clean_close_is_remembered_until_the_next_writer(told):
    told.commit(e.WriterClosed())
    assert told.p.cleanly_closed
    told.commit(e.WriterOpened(host="h", pid=2))
    assert not told.p.cleanly_closed


@pytest.mark.parametrize("seed", range(12))
def test_nothing_drawn_is_ever_lost_at_any_point_of_a_run(seed):
    p = Projection()
    for record in story(seed).records:
        fold(p, record)
        assert p.drawn_total == p.applied_total + p.dropped_total + p.parked_total + p.alive_total
        assert p.draw_cursor == p.drawn_total
        listed = [group_id for groups in p.steps.values() for group_id in groups]
        assert len(set(listed)) == len(listed)
        assert sorted(listed) == sorted(g for g, s in p.groups.items() if s.phase is GroupPhase.APPLIED)
        for group in p.groups.values():
            assert group.phase is not GroupPhase.READY or group.all_sealed
            if group.granularity is Granularity.PROMPT_GROUP and group.phase is GroupPhase.READY:
                assert len({s.attempt for s in group.siblings.values()}) == 1


def test_stories_hold_what_they_are_meant_to_try():
    kinds = {e.kind_of(type(event)) for seed in range(12) for event in story(seed).events}
    assert {
        "cohort_sealed",
        "attempt_superseded",
        "late_result_rejected",
        "finalize_failed",
        "group_parked",
        "group_dropped",
        "checkpoint_committed",
        "run_restored",
        "dataset_exhausted",
    } <= kinds
