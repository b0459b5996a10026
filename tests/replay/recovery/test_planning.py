"""The recovery plan: what is kept is really there, and everything redone, dropped or cleared has its reason."""

import random

import pytest
from kinlog_builders import Story, story
from msgspec.structs import replace

from kinlog.lineage.fold import fold
from kinlog.lineage.state import GroupPhase, Projection, decode_projection, encode_projection
from kinlog.replay.projection import replay
from kinlog.replay.recovery.inventory import (
    Inventory,
    canonical_rows,
    compare_rows,
    expected_inventory,
    staged_rows,
)
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy, SiblingRef
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.schemas import events as e
from kinlog.schemas.errors import RowsMissingError
from kinlog.schemas.reasons import Granularity, Partition, Reason
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import RowTag

REFUSE = RecoveryPolicy()
REDISPATCH = RecoveryPolicy(missing_rows="redispatch")
DISCARD = RecoveryPolicy(future_weights="discard")
FRESH = RecoveryPolicy(discard_rollouts=True)
NOTHING = Inventory({}, {})


@pytest.fixture
def told() -> Story:
    return Story()


def here(told: Story) -> e.Position:
    return e.Position(1, told.p.last_seq, 0)


def planned(
    told: Story,
    inventory: Inventory,
    *,
    promised: e.Position | None = None,
    policy: RecoveryPolicy = REFUSE,
    stale: tuple[int, ...] = (),
) -> RecoveryPlan:
    """The plan of a restart that rolls nothing of the trainer back, checked: its events fold and keep only what is there."""
    step = told.p.train_step
    told.commit(
        e.RunRestored(
            checkpoint=None, position=promised, train_step=step, weight_version=told.p.weight_version
        )
    )
    return checked(told.p, inventory, promised, policy, stale)


def checked(
    p: Projection,
    inventory: Inventory,
    promised: e.Position | None,
    policy: RecoveryPolicy,
    stale: tuple[int, ...],
) -> RecoveryPlan:
    before = encode_projection(p)
    plan = plan_recovery(
        p,
        inventory,
        checkpoint="step_000001",
        promised=promised,
        policy=policy,
        is_stale=lambda group: group.group_id in stale,
    )
    assert encode_projection(p) == before, "planning changed something"
    after = decode_projection(before)
    for event in plan.events():
        fold(after, e.RecordedEvent(after.last_seq + 1, 1, 0, event))
    referenced = set()
    for group in after.live_groups():
        assert not any(s.running for s in group.siblings.values())
        if group.phase is GroupPhase.FINALIZED:
            rows = canonical_rows(group)
            assert not compare_rows(rows, inventory.training)
            referenced |= set(rows)
            continue
        for sibling in group.siblings.values():
            rows = staged_rows(group, sibling)
            assert not compare_rows(rows, inventory.staging), "a sealed sibling lacks rows"
            referenced |= set(rows)
        assert (group.group_id in plan.waiting) == (not group.all_sealed)
    cleared = {key for keys in plan.unreferenced.values() for key in keys}
    assert not referenced & cleared, "a row that is relied on would be cleared"
    assert after.drawn_total == p.drawn_total
    assert after.dropped_total == p.dropped_total + len(plan.dropped)
    return plan


def reasons(plan: RecoveryPlan) -> dict[tuple[int, int], Reason]:
    return {(event.group_id, event.generation): event.reason for event in plan.superseded}


def without(rows: dict[str, RowTag], *keys: str) -> dict[str, RowTag]:
    assert set(keys) <= set(rows)
    return {key: tag for key, tag in rows.items() if key not in keys}


def test_sealed_siblings_whose_rows_are_there_are_kept_and_running_ones_sent_again(told):
    group = told.generating(siblings=3)
    told.seal(group, 0, 2)
    plan = planned(told, expected_inventory(told.p))
    assert plan.reused == (SiblingRef(group, 0, 1, 10), SiblingRef(group, 2, 1, 10))
    assert reasons(plan) == {(group, 1): Reason.CONTROLLER_RESTART}
    assert (plan.waiting, plan.tokens_saved, plan.lost_tokens) == ((group,), 20, 0)


def test_groups_that_were_only_reserved_or_admitted_wait(told):
    reserved, admitted = told.reserve(), told.reserve()
    told.admit(admitted)
    plan = planned(told, NOTHING)
    assert plan.waiting == (reserved, admitted)
    assert plan.superseded == ()


def test_ready_group_with_all_its_rows_needs_nothing(told):
    group = told.ready()
    plan = planned(told, expected_inventory(told.p))
    assert [(ref.group_id, ref.generation) for ref in plan.reused] == [(group, 0), (group, 1)]
    assert plan.waiting == plan.superseded == plan.refinalized == ()


def test_rows_that_the_tail_sealed_and_the_data_plane_lost_are_redone_with_the_reason(told):
    group = told.generating()
    promised = here(told)
    told.seal(group)
    inventory = expected_inventory(told.p)
    lost, changed = staging_key(group, 0, 1, 1), staging_key(group, 1, 1, 0)
    staging = without(inventory.staging, lost)
    staging[changed] = replace(staging[changed], digest=b"x" * 16)
    plan = planned(told, Inventory(staging, {}), promised=promised)
    assert reasons(plan) == {(group, 0): Reason.ROWS_MISSING, (group, 1): Reason.DIGEST_MISMATCH}
    assert {event.detail for event in plan.superseded} == {lost, changed}
    assert plan.lost_tokens == 20
    # What is left of them belongs to no attempt any more.
    assert set(plan.unreferenced[Partition.STAGING]) == set(staging)


def test_placeholder_needs_no_rows(told):
    told.ready(placeholder=True)
    assert len(planned(told, NOTHING, promised=here(told)).reused) == 2


def test_promised_staged_rows_that_are_missing_are_refused_by_name(told):
    group = told.generating()
    told.seal(group, 0)
    lost = staging_key(group, 0, 1, 0)
    inventory = Inventory(without(expected_inventory(told.p).staging, lost), {})
    with pytest.raises(
        RowsMissingError, match=rf"step_000001 promised 1 rows .*{lost} \(rows_missing\).*redispatch"
    ):
        planned(told, inventory, promised=here(told))


def test_promised_canonical_rows_that_differ_are_refused_by_name(told):
    group = told.finalized()
    key = canonical_key(group, 1, 1)
    training = expected_inventory(told.p).training
    training[key] = replace(training[key], digest=b"x" * 16)
    with pytest.raises(RowsMissingError, match=rf"{key} \(digest_mismatch\)"):
        planned(told, Inventory({}, training), promised=here(told))


def test_refusal_names_the_first_and_counts_the_rest(told):
    told.ready(siblings=6)
    with pytest.raises(RowsMissingError, match="promised 12 rows.*and 4 more"):
        planned(told, NOTHING, promised=here(told))


def test_promised_rows_are_redone_by_explicit_choice_and_listed(told):
    group = told.ready()
    plan = planned(told, NOTHING, promised=here(told), policy=REDISPATCH)
    assert set(reasons(plan).values()) == {Reason.ROWS_MISSING}
    assert {problem.key for problem in plan.missing_promised} == {
        staging_key(group, g, 1, call) for g in (0, 1) for call in (0, 1)
    }


def test_group_finalized_at_the_checkpoint_is_promised_by_its_canonical_rows_only(told):
    told.finalized()
    inventory = expected_inventory(told.p)
    assert not inventory.staging, "its staged rows were cleared long ago"
    plan = planned(told, inventory, promised=here(told))
    assert (plan.finalized, plan.superseded) == ((0,), ())


def test_lost_canonical_rows_are_named_without_the_staged_ones_that_were_cleared_in_order(told):
    group = told.finalized()
    plan = planned(told, NOTHING, promised=here(told), policy=REDISPATCH)
    assert {problem.key for problem in plan.missing_promised} == {canonical_key(group, g, 1) for g in (0, 1)}


def test_discarding_newer_rollouts_of_a_finalized_group_breaks_no_promise(told):
    group = told.finalized(max_weight_version=4)
    plan = planned(told, expected_inventory(told.p), promised=here(told), policy=DISCARD)
    assert plan.missing_promised == ()
    assert [f.group_id for f in plan.finalize_failed] == [group]
    assert plan.waiting == (group,)


def test_group_finalized_after_the_checkpoint_falls_back_on_its_promised_staged_rows(told):
    group = told.ready()
    promised = here(told)
    staging = expected_inventory(told.p).staging
    told.start_finalize(group)
    told.finish_finalize(group)
    plan = planned(told, Inventory(staging, {}), promised=promised)
    assert [(f.group_id, f.reason) for f in plan.finalize_failed] == [(group, Reason.ROWS_MISSING)]
    assert len(plan.reused) == 2
    with pytest.raises(RowsMissingError):
        planned(told, NOTHING, promised=promised)


def test_canonical_and_staged_rows_both_lost_in_the_tail_are_generated_again(told):
    promised = here(told)
    group = told.finalized()
    plan = planned(told, NOTHING, promised=promised)
    assert [f.group_id for f in plan.finalize_failed] == [group]
    assert reasons(plan) == {(group, 0): Reason.ROWS_MISSING, (group, 1): Reason.ROWS_MISSING}
    assert plan.lost_tokens == 20


def test_finalize_without_a_known_outcome_is_driven_again_and_keeps_half_put_rows(told):
    group = told.ready()
    told.start_finalize(group)
    staging = expected_inventory(told.p).staging
    key = canonical_key(group, 0, 1)
    half = {key: RowTag(group_id=group, generation=0, attempt=1, call=-1, digest=b"y" * 16)}
    plan = planned(told, Inventory(staging, half))
    assert (plan.refinalized, plan.superseded) == ((group,), ())
    assert plan.unreferenced[Partition.TRAINING] == {}


def test_finalize_without_outcome_whose_staged_rows_are_gone_is_given_up_first(told):
    group = told.ready()
    told.start_finalize(group)
    plan = planned(told, NOTHING)
    assert [f.group_id for f in plan.finalize_failed] == [group]
    assert (plan.refinalized, plan.waiting) == ((), (group,))


def test_cohort_is_redone_whole_when_one_siblings_rows_are_missing(told):
    group = told.ready(siblings=3, granularity=Granularity.PROMPT_GROUP)
    staging = without(expected_inventory(told.p).staging, staging_key(group, 1, 1, 0))
    plan = planned(told, Inventory(staging, {}))
    assert reasons(plan) == {
        (group, 1): Reason.ROWS_MISSING,
        (group, 0): Reason.COHORT_RESTART,
        (group, 2): Reason.COHORT_RESTART,
    }
    assert plan.superseded[0].generation == 1
    assert plan.reused == ()
    assert set(plan.unreferenced[Partition.STAGING]) == set(staging)


def test_cohort_that_was_running_is_redone_whole(told):
    group = told.generating(granularity=Granularity.PROMPT_GROUP)
    plan = planned(told, NOTHING)
    assert reasons(plan) == {(group, 0): Reason.CONTROLLER_RESTART, (group, 1): Reason.COHORT_RESTART}


def test_every_missing_promised_row_of_a_cohort_is_named_and_not_only_the_first_siblings(told):
    told.ready(siblings=3, granularity=Granularity.PROMPT_GROUP)
    plan = planned(told, NOTHING, promised=here(told), policy=REDISPATCH)
    assert len(plan.missing_promised) == 6


def test_discarding_all_rollouts_keeps_every_prompt_and_generates_all_of_it_again(told):
    sealed, finalized, untouched = told.generating(), told.finalized(), told.reserve()
    told.seal(sealed, 0)
    plan = planned(told, expected_inventory(told.p), promised=here(told), policy=FRESH)
    by_request = Reason.DISCARDED_BY_REQUEST
    assert reasons(plan) == {
        (sealed, 0): by_request,
        (sealed, 1): Reason.CONTROLLER_RESTART,
        (finalized, 0): by_request,
        (finalized, 1): by_request,
    }
    assert [(f.group_id, f.reason) for f in plan.finalize_failed] == [(finalized, by_request)]
    assert (plan.reused, plan.dropped) == ((), ())
    assert set(plan.waiting) == {sealed, finalized, untouched}
    assert plan.lost_tokens > 0


def test_discarded_rollouts_are_neither_missed_nor_stale(told):
    group = told.finalized()
    plan = planned(told, NOTHING, promised=here(told), policy=FRESH, stale=(group,))
    assert (plan.missing_promised, plan.dropped, plan.waiting) == ((), (), (group,))


@pytest.mark.parametrize("policy", [REFUSE, DISCARD])
def test_rollouts_newer_than_the_restored_weights_are_kept_or_discarded_by_choice(told, policy):
    group = told.generating()
    told.seal(group, 0)
    told.seal(group, 1, max_weight_version=4)
    plan = planned(told, expected_inventory(told.p), policy=policy)
    expected = {(group, 1): Reason.FUTURE_WEIGHTS} if policy is DISCARD else {}
    assert reasons(plan) == expected
    if policy is DISCARD:
        assert plan.superseded[0].detail == "generated by version 4"


def test_finalized_group_with_newer_rollouts_is_taken_apart_when_they_are_discarded(told):
    group = told.ready()
    staging = expected_inventory(told.p).staging
    told.supersede(group, 1)
    told.dispatch(group, 1)
    told.seal(group, 1, max_weight_version=4)
    staging |= expected_inventory(told.p).staging
    told.start_finalize(group)
    told.finish_finalize(group)
    training = expected_inventory(told.p).training
    plan = planned(told, Inventory(staging, training), policy=DISCARD)
    assert [f.reason for f in plan.finalize_failed] == [Reason.FUTURE_WEIGHTS]
    assert reasons(plan) == {(group, 1): Reason.FUTURE_WEIGHTS}
    assert [(ref.generation, ref.attempt) for ref in plan.reused] == [(0, 1)]
    assert set(plan.unreferenced[Partition.TRAINING]) == set(training)


def test_stale_groups_are_dropped_with_the_reason_and_their_rows_cleared(told):
    stale, fresh = told.finalized(), told.finalized()
    plan = planned(told, expected_inventory(told.p), stale=(stale,))
    assert [(d.group_id, d.reason) for d in plan.dropped] == [(stale, Reason.STALE)]
    assert plan.finalized == (fresh,)
    assert set(plan.unreferenced[Partition.TRAINING].values()) == {stale}


def test_missing_rows_of_a_stale_group_are_no_reason_to_refuse(told):
    stale = told.finalized()
    plan = planned(told, NOTHING, promised=here(told), stale=(stale,))
    assert (plan.missing_promised, plan.dropped, plan.waiting) == ((), (), (stale,))


def test_rows_that_nobody_refers_to_are_listed_with_their_group(told):
    group = told.generating()
    told.seal(group, 0)
    left_over = told.result(group, 0)
    told.supersede(group, 0)
    orphans = {
        staging_key(group, 0, 1, call.call): RowTag(
            group_id=group, generation=0, attempt=1, call=call.call, digest=call.row_digest
        )
        for call in left_over.receipt.calls
    }
    orphans["g99.s0.a1.c0"] = RowTag(group_id=99, generation=0, attempt=1, call=0, digest=b"z" * 16)
    orphans["torn"] = RowTag(done=False, group_id=-1, generation=-1, attempt=-1, call=-1, digest=b"")
    plan = planned(told, Inventory(orphans, {}))
    assert plan.unreferenced[Partition.STAGING] == {key: tag.group_id for key, tag in orphans.items()}


def test_summary_counts_what_the_plan_holds(told):
    kept, running, lost, stale = told.finalized(), told.generating(), told.ready(), told.finalized()
    inventory = expected_inventory(told.p)
    staging = without(inventory.staging, staging_key(lost, 0, 1, 0))
    plan = planned(told, Inventory(staging, inventory.training), stale=(stale,))
    summary = plan.events()[0]
    assert summary == e.RecoveryPlanned(
        checkpoint="step_000001",
        siblings_reused=3,
        siblings_redispatched=3,
        groups_reused=1,
        groups_rolled_back=0,
        groups_dropped=1,
        rows_unreferenced=3,
        tokens_saved=30,
        tokens_redone=10,
    )
    assert (plan.finalized, plan.waiting) == ((kept,), (running, lost))


def test_redone_siblings_are_not_charged_for_the_restart(told):
    group = told.generating()
    plan = planned(told, NOTHING)
    told.commit(*plan.events())
    assert [s.infrastructure_failures for s in told.group(group).siblings.values()] == [0, 0]


def test_later_steps_are_planned_as_rolled_back(told):
    first, second = told.finalized(), told.finalized()
    told.train(first)
    kept = told.checkpoint()
    inventory = expected_inventory(told.p)
    told.train(second)
    told.restore(kept)
    plan = checked(told.p, inventory, kept.position, REFUSE, ())
    assert (plan.train_step, plan.finalized) == (1, (second,))


@pytest.mark.parametrize("seed", range(40))
def test_plan_of_any_run_after_any_loss_folds_and_keeps_only_what_is_there(seed):
    chance = random.Random(seed)
    told = story(seed % 8, groups=10)
    records = told.records[: chance.randrange(len(told.records) // 3, len(told.records))]
    p = replay(records)
    kept = [r for r in records if isinstance(r.event, e.CheckpointCommitted)]
    promised = None
    restored = e.RunRestored(
        checkpoint=None, position=None, train_step=p.frontier_step, weight_version=p.frontier_step
    )
    if kept and p.frontier_step <= kept[-1].event.train_step <= p.train_step:
        event = kept[-1].event
        promised = event.position
        restored = replace(restored, train_step=event.train_step, weight_version=event.train_step)
    fold(p, e.RecordedEvent(p.last_seq + 1, 1, 0, restored))
    whole = expected_inventory(p)
    loss = chance.choice([0.0, 0.2, 1.0])

    def survivors(rows: dict[str, RowTag]) -> dict[str, RowTag]:
        return {key: tag for key, tag in rows.items() if chance.random() >= loss}

    inventory = Inventory(survivors(whole.staging), survivors(whole.training))
    policy = RecoveryPolicy(missing_rows="redispatch", future_weights=chance.choice(["reuse", "discard"]))
    stale = tuple(g.group_id for g in p.live_groups() if chance.random() < 0.1)
    plan = checked(p, inventory, promised, policy, stale)
    assert not plan.missing_promised or loss > 0
    # A second crash, before anything was redone, plans the same losses no second time.
    after = decode_projection(encode_projection(p))
    for event in plan.events():
        fold(after, e.RecordedEvent(after.last_seq + 1, 1, 0, event))
    again = checked(after, inventory, promised, policy, ())
    assert again.superseded == again.finalize_failed == again.dropped == ()
    assert again.missing_promised == ()
