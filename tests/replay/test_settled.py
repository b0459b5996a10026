"""Replay by columns gives the projection that folding event by event gives, to the last byte."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_batches import batch_of, newest_first
from kinlog_builders import Story, sealed_result, story

from kinlog.lineage.state import Projection, encode_projection
from kinlog.replay import settled
from kinlog.replay.projection import replay
from kinlog.replay.settled import replay_newest_first
from kinlog.schemas import events as e
from kinlog.schemas.codec import payload_fields
from kinlog.schemas.errors import LogUnsupportedError, TransitionError
from kinlog.schemas.reasons import Reason
from kinlog.schemas.upcasters import PAST_VERSIONS, PastVersion


def by_columns(
    records: list[e.RecordedEvent], start: Projection | None = None, *, rows: int = 16
) -> Projection:
    start = Projection() if start is None else start
    return replay_newest_first(newest_first(records, after_seq=start.last_seq, rows=rows), start)


def assert_same(records: list[e.RecordedEvent], *, rows: int = 16, snapshot_at: int = 0) -> Projection:
    found = by_columns(records, replay(records[:snapshot_at]), rows=rows)
    assert encode_projection(found) == encode_projection(replay(records))
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1), st.integers(1, 90))
def test_whole_runs_from_any_snapshot_to_any_place(seed, snapshot_at, through, rows):
    records = story(seed).records
    end = int(through * len(records))
    assert_same(records[:end], rows=rows, snapshot_at=int(snapshot_at * end))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("rrrdtcb"), max_size=40), st.integers(1, 9), st.floats(0, 1))
def test_places_of_steps_are_counted_whatever_became_of_the_groups_drawn_for_them(acts, rows, snapshot_at):
    told = Story()
    checkpoints: list[e.CheckpointCommitted] = []
    for number, act in enumerate(acts):
        ready = [i for i, g in told.p.groups.items() if g.live]
        if act == "r":
            # Also for steps that a checkpoint has let go of already.
            told.reserve(train_step=number % 5 if number % 3 else None)
        elif act == "d" and ready:
            told.commit(e.GroupDropped(group_id=ready[number % len(ready)], reason=Reason.EVICTED))
        elif act == "t":
            told.train(told.finalized())
        elif act == "c":
            frontier = max(told.p.frontier_step, told.p.train_step - number % 2)
            checkpoints = [*checkpoints[-1:], told.checkpoint(frontier_step=frontier)]
        elif act == "b" and checkpoints and checkpoints[-1].train_step >= told.p.frontier_step:
            told.restore(checkpoints[-1])
    assert_same(told.records, rows=rows, snapshot_at=int(snapshot_at * len(told.records)))


def test_place_is_forgotten_by_the_first_checkpoint_after_it_that_covers_its_step():
    told = Story()

    def drawn_and_dropped() -> None:
        group_id = told.reserve(train_step=1)
        told.commit(e.GroupDropped(group_id=group_id, reason=Reason.EVICTED))

    drawn_and_dropped()
    told.checkpoint(frontier_step=0)
    drawn_and_dropped()
    told.train(told.finalized())
    assert assert_same(told.records, rows=3).places == {1: 2}
    told.checkpoint(frontier_step=1)
    assert assert_same(told.records, rows=3).places == {}
    drawn_and_dropped()
    assert assert_same(told.records, rows=3).places == {1: 1}


def test_group_that_was_undone_and_dropped_leaves_no_trace_in_its_steps():
    told = Story()
    first, second = told.finalized(), told.finalized()
    checkpoint = told.checkpoint()
    told.train(first, second)
    told.restore(checkpoint)
    told.commit(e.GroupDropped(group_id=second, reason=Reason.STALE))
    told.train(first)
    p = assert_same(told.records)
    assert p.steps == {1: (first,)}


def test_step_that_was_applied_twice_is_let_go_of_once():
    told = Story()
    first, second = told.finalized(), told.finalized()
    checkpoint = told.checkpoint()
    told.train(first)
    told.restore(checkpoint)
    told.train(second)
    told.checkpoint(frontier_step=1)
    p = assert_same(told.records)
    assert (p.applied_forgotten, set(p.groups)) == (1, {first})


def test_late_result_after_the_drop_is_counted_once():
    told = Story()
    group_id = told.generating()
    told.commit(e.GroupDropped(group_id=group_id, reason=Reason.EVICTED))
    told.commit(
        e.LateResultRejected(
            group_id=group_id,
            generation=0,
            attempt=1,
            reason=Reason.SUPERSEDED_ATTEMPT,
            completion_tokens=sealed_result(group_id, 0, 1).completion_tokens,
        )
    )
    for rows in (1, 100):
        assert assert_same(told.records, rows=rows).late_rejected == 1


def test_only_events_of_groups_that_are_left_are_decoded(monkeypatch):
    told = Story()
    for _ in range(5):
        told.train(told.finalized())
    told.checkpoint(frontier_step=5)
    left = told.ready()
    decoded: list[e.Event] = []
    reading = settled.read_events

    def watched(*arguments):
        for record in reading(*arguments):
            decoded.append(record.event)
            yield record

    monkeypatch.setattr(settled, "read_events", watched)
    by_columns(told.records, rows=1000)
    of_settled = [type(event) for event in decoded if getattr(event, "group_id", left) != left]
    assert len(of_settled) == len(set(of_settled)), "more than one of a kind, to see whether it can be read"


def test_impossible_story_of_a_group_that_is_left_is_refused():
    told = Story()
    group_id = told.ready()
    twice = e.RecordedEvent(told.p.last_seq + 1, 1, 0, told.group(group_id).siblings[0].sealed)
    with pytest.raises(TransitionError, match=f"seq {twice.seq}, sibling_sealed: group {group_id}"):
        by_columns([*told.records, twice])


def test_events_that_do_not_follow_are_refused():
    records = story(3).records
    with pytest.raises(TransitionError, match="event seq 9 does not follow seq 7"):
        replay_newest_first(newest_first(records[8:]), replay(records[:7]))
    batches = newest_first(records, rows=10)
    del batches[2]
    with pytest.raises(TransitionError, match="does not follow"):
        replay_newest_first(batches, Projection())


def strange(record: e.RecordedEvent, **columns: object) -> pa.RecordBatch:
    """A batch of one event with some of its columns replaced."""
    batch = batch_of([record])
    for name, value in columns.items():
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(
            place, batch.schema.field(place), pa.array([value], batch.schema.field(place).type)
        )
    return batch


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"kind": "weather_report"}, "weather_report"),
        ({"version": 99}, "version 99"),
        ({"reason": "boredom"}, "boredom"),
    ],
)
def test_what_a_newer_writer_wrote_of_a_settled_group_is_refused_too(columns, named):
    told = Story()
    group_id = told.generating(siblings=1)
    told.supersede(group_id, 0)
    told.commit(e.GroupDropped(group_id=group_id, reason=Reason.EVICTED))
    *before, superseded, dropped = told.records
    batches = [batch_of([dropped]), strange(superseded, **columns), *newest_first(before)]
    with pytest.raises(LogUnsupportedError, match=named):
        replay_newest_first(batches, Projection())


def test_ignorable_event_of_a_newer_writer_is_passed_over():
    told = Story()
    place = e.RecordedEvent(told.p.last_seq + 1, 1, 0, e.GroupAdmitted(group_id=0))
    p = replay_newest_first(
        [strange(place, kind="weather_observed"), *newest_first(told.records)], Projection()
    )
    assert p.last_seq == place.seq


def test_no_events_change_nothing():
    p = replay(story(5).records)
    before = encode_projection(p)
    assert encode_projection(replay_newest_first([], p)) == before


def test_settled_results_of_a_past_version_are_counted(monkeypatch):
    told = Story()
    for _ in range(3):
        told.train(told.finalized())
    told.checkpoint(frontier_step=2)
    batches = newest_first(told.records)
    before = PastVersion(tuple(payload_fields()["sibling_sealed"]), lambda fields: fields)
    monkeypatch.setattr(e.SiblingSealed, "VERSION", 2)
    monkeypatch.setitem(PAST_VERSIONS, ("sibling_sealed", 1), before)
    p = replay_newest_first(batches, Projection())
    assert (p.sealed_total, p.sealed_tokens_total) == (told.p.sealed_total, told.p.sealed_tokens_total)
