"""Permits: groups alive never exceed the buffer, and recovery and fresh work share it and the workers."""

import pytest
from kinlog_conformance import (
    COHORT,
    Given,
    Like,
    finalized,
    generating,
    living,
    parked,
    ready,
    reserved,
    restarted,
    trained,
    worker_hangs,
)

from kinlog.lineage.state import GroupPhase, Projection
from kinlog.schemas import events as e

PERMITS = "rollout__max_live_groups"
WORKERS = "rollout__max_inflight_siblings"
FAR_AHEAD = {"sampler__max_staleness_versions": 9, "sampler__max_lookahead_versions": 9}


@pytest.mark.parametrize("permits", [2, 3, 5])
@pytest.mark.parametrize("sampler", ["in_order", "windowed", "weight_fifo", "ready_first"])
def test_live_groups_never_exceed_the_permits_at_any_point_of_the_log(sampler: str, permits: int):
    done = Given(**{PERMITS: permits}, sampler__name=sampler, **FAR_AHEAD).when(living())
    most = max(p.alive_total for p in done.then(state={"train_step": 4}).prefixes)
    assert most == permits


def test_restored_groups_hold_their_permits_before_anything_fresh_is_drawn():
    restored = [generating(siblings=3), ready(siblings=3), finalized()]
    done = Given(*restored, **{PERMITS: 3}, **FAR_AHEAD).when(restarted(tail_rows=True))
    done = done.when(living(until=lambda p: p.drawn_total >= 4))
    reservation = done.then().events.index(done.of(e.GroupReserved)[0])
    assert any(isinstance(event, e.StepApplied) for event in done.events[:reservation])


def test_buffer_that_is_exactly_full_goes_on():
    done = Given(*[generating(siblings=3)] * 3, **{PERMITS: 3}, **FAR_AHEAD).when(restarted(), living())
    done.then(state={"train_step": 4})
    assert max(p.alive_total for p in done.prefixes) == 3


@pytest.mark.parametrize("sampler", ["in_order", "windowed", "weight_fifo", "ready_first"])
def test_buffer_that_is_smaller_than_before_draws_nothing_until_there_is_room(sampler: str):
    restored = [reserved(siblings=3, train_step=1 + number // 2) for number in range(5)]
    done = Given(*restored, sampler__name=sampler, **FAR_AHEAD)
    done = done.when(restarted(**{PERMITS: 2})).when(living()).then(state={"train_step": 4})
    alive = {p.last_seq: p.alive_total for p in done.prefixes}
    fresh = [
        seq for seq, event in enumerate(done.bench.writer.events, 1) if isinstance(event, e.GroupReserved)
    ]
    offset = max(alive) - len(done.bench.writer.events)
    assert fresh
    assert all(alive[offset + seq] <= 2 for seq in fresh)


def test_group_that_is_parked_gives_its_permit_back():
    Given(*[generating(siblings=3)] * 2, parked(0), **{PERMITS: 2}, trainer__max_steps=1).when(
        restarted(), living()
    ).then(state={"train_step": 1, "drawn_total": 3, "parked_total": 1})


def test_roll_back_brings_trained_groups_back_and_draws_nothing_until_there_is_room():
    done = Given(
        *[finalized(siblings=3)] * 4,
        trained(0, 1),
        trained(2, 3),
        *[reserved(siblings=3)] * 2,
        **{PERMITS: 2},
    ).when(restarted(from_start=True, tail_rows=True))
    done = done.then(state={"alive_total": 6}).when(living())
    done.then(state={"train_step": 4})
    before_room = done.events[: [type(event) for event in done.events].index(e.GroupReserved)]
    assert sum(isinstance(event, e.StepApplied) for event in before_room) >= 2


@pytest.mark.parametrize("workers", [3, 4, 7])
def test_recovery_and_fresh_work_share_the_worker_budget(workers: int):
    restored = [generating(siblings=3), generating(siblings=3, granularity=COHORT), reserved(siblings=3)]
    done = Given(*restored, **{WORKERS: workers}).when(restarted(), living()).then(state={"train_step": 4})
    assert done.bench.pool.max_running <= workers
    assert done.bench.runtime.budget.in_use == 0


def finished(p: Projection) -> int:
    return sum(group.phase is GroupPhase.FINALIZED for group in p.live_groups())


def test_restored_sibling_that_hangs_does_not_starve_fresh_work():
    Given(reserved(siblings=3), worker_hangs(0, 0, 1), **{WORKERS: 3, PERMITS: 3}, **FAR_AHEAD).when(
        restarted(), living(until=lambda p: p.train_step >= 1 or finished(p) >= 2)
    ).then(state={0: {"running": {0}, "sealed": {1, 2}}})


def test_fresh_work_does_not_starve_restored_groups():
    """Fresh groups come as fast as permits allow, and one sibling runs at a time."""
    restored = [reserved(siblings=3) for _ in range(3)]
    Given(*restored, **{WORKERS: 1, PERMITS: 5}, **FAR_AHEAD).when(
        restarted(),
        living(until=lambda p: all(g not in p.groups or p.groups[g].all_sealed for g in range(3))),
    ).then(events=[], only=(e.GroupDropped, e.GroupParked))


def test_reservation_takes_its_permit_before_anything_is_sent():
    done = Given().when(living(until=lambda p: p.sealed_total >= 1)).then()
    kinds = [type(event) for event in done.events]
    assert kinds[:2] == [e.GroupReserved, e.GroupAdmitted]
    assert done.events[0] == Like(e.GroupReserved, group_id=0, draw_cursor=1)
