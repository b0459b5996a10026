"""Events are counted exactly, each once, and waits are counted by the times of events."""

import pytest
from kinlog_bench import MemoryWriter
from kinlog_builders import FreeCut, ManualClock, Story
from kinlog_metrics import distribution, kept, number

from kinlog.controller import metrics as m
from kinlog.controller.metric_kinds import Metric
from kinlog.controller.metrics_events import EventMetrics
from kinlog.controller.metrics_values import MetricValues
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind, Partition, Reason


class Counted:
    """A story told to a ledger in memory, whose commits are counted; the clock moves when told to."""

    def __init__(self, projection: Projection | None = None) -> None:
        self.values = MetricValues()
        self.clock = ManualClock()
        counted = EventMetrics(self.values)
        projection = projection or Projection()
        counted.restore(projection)
        writer = MemoryWriter(projection.last_seq)
        self.ledger = Ledger(
            projection,
            writer,  # type: ignore[arg-type]
            self.clock,
            observe=lambda records: counted.observe(records, projection),
        )
        self.story = Story(self.ledger)

    def wait(self, seconds: float) -> None:
        self.clock.now_us += round(seconds * 1e6)

    def number(self, metric: Metric, *labels: str) -> float:
        return number(self.values, metric, *labels)

    def waits(self, queue: str) -> tuple[int, float]:
        found = distribution(self.values, m.QUEUE_WAIT, queue)
        return found.total, pytest.approx(found.sum)


def test_waits_of_a_group_are_counted_from_event_to_event():
    run = Counted()
    told = run.story
    group_id = told.reserve()
    told.admit(group_id)
    run.wait(2)
    told.dispatch(group_id)  # both siblings waited 2 s
    run.wait(3)
    told.seal(group_id, 0)  # 3 s of generation
    told.supersede(group_id, 1, Reason.TIMEOUT)
    run.wait(5)
    told.dispatch(group_id, 1)  # waited 5 s since its failure
    run.wait(7)
    told.seal(group_id, 1)
    run.wait(0.5)
    told.start_finalize(group_id)
    told.commit(e.FinalizeFailed(group_id=group_id, reason=Reason.WORKER_LOST, charged=True))
    run.wait(9)
    told.start_finalize(group_id)  # driven again: the pause before it is no wait for the finalizer
    told.finish_finalize(group_id)
    run.wait(11)
    told.train(group_id)
    assert run.waits("dispatch") == (3, 2 + 2 + 5)
    assert run.waits("finalize") == (1, 0.5)
    assert run.waits("train") == (1, 11)
    rollouts = distribution(run.values, m.ROLLOUT_SECONDS)
    assert (rollouts.total, rollouts.sum) == (2, pytest.approx(3 + 7))


def test_clock_that_goes_back_makes_no_negative_wait():
    run = Counted()
    group_id = run.story.reserve()
    run.story.admit(group_id)
    run.wait(-60)
    run.story.dispatch(group_id)
    assert run.waits("dispatch") == (2, 0)


def test_outcomes_are_counted_with_their_reasons():
    run = Counted()
    told = run.story
    first, second, third = told.finalized(), told.finalized(), told.generating()
    late = told.result(third, 0)
    told.supersede(third, 0, Reason.WORKER_LOST)
    told.commit(
        e.LateResultRejected(
            group_id=third, generation=0, attempt=1, reason=Reason.SUPERSEDED_ATTEMPT, completion_tokens=9
        )
    )
    told.seal(third, 1)
    told.commit(e.GroupParked(group_id=third, reason=Reason.RETRY_BUDGET))
    told.train(first)
    told.commit(e.GroupDropped(group_id=second, reason=Reason.STALE))
    told.commit(
        e.RowsCleared(partition=Partition.TRAINING, reason=Reason.STALE, num_rows=2, group_ids=(second,))
    )
    told.commit(e.CheckpointFailed(name="step_000001", reason=Reason.TIMEOUT, detail="slow"))
    told.commit(
        e.CheckpointCommitted(
            name="step_000001",
            checkpoint_kind=CheckpointKind.TRAINER,
            train_step=1,
            position=e.Position(1, told.p.last_seq, 0),
            frontier_step=0,
            duration_us=1_500_000,
            held_us=20_000,
        )
    )
    tokens = told.result(third, 1).completion_tokens
    assert late.attempt == 1
    assert {
        (name, labels): value
        for (name, labels), value in kept(run.values).items()
        if isinstance(value, float) and value and name != "kinlog_events_total"
    } == {
        ("kinlog_steps_applied_total", ()): 1,
        ("kinlog_groups_drawn_total", ()): 3,
        ("kinlog_groups_finalized_total", ()): 2,
        ("kinlog_groups_applied_total", ()): 1,
        ("kinlog_groups_dropped_total", ("stale",)): 1,
        ("kinlog_groups_parked_total", ("retry_budget",)): 1,
        ("kinlog_siblings_dispatched_total", ()): 6,
        ("kinlog_siblings_sealed_total", ()): 5,
        ("kinlog_sealed_tokens_total", ()): 5 * tokens,
        ("kinlog_sibling_outcomes_total", ("valid", "stop")): 5,
        ("kinlog_attempts_superseded_total", ("worker_lost",)): 1,
        ("kinlog_late_results_total", ("superseded_attempt",)): 1,
        ("kinlog_checkpoints_committed_total", ("trainer",)): 1,
        ("kinlog_checkpoint_failures_total", ("timeout",)): 1,
        ("kinlog_rows_cleared_total", ("training", "stale")): 2,
    }
    assert run.number(m.EVENTS, "sibling_sealed") == 5
    assert distribution(run.values, m.CHECKPOINT_SECONDS, "trainer").sum == 1.5
    assert distribution(run.values, m.CHECKPOINT_HOLD_SECONDS, "trainer").sum == 0.02
    lengths = distribution(run.values, m.COMPLETION_TOKENS)
    assert (lengths.total, lengths.sum) == (5, 5 * tokens)


def test_staleness_is_counted_as_a_step_claims_its_groups():
    run = Counted()
    told = run.story
    old, first, second = told.finalized(), told.finalized(), told.finalized()
    told.train(first)
    told.train(second)  # its tokens are of weights 0, and it is trained on by weights 1
    told.train(old)
    found = distribution(run.values, m.TRAINED_STALENESS)
    assert (found.counts[:4], found.total) == ((1, 1, 1, 0), 3)


def test_counters_of_the_run_go_on_over_a_restart_and_those_of_the_life_begin_again():
    before = Counted()
    told = before.story
    group_id = told.generating()
    told.supersede(group_id, 0, Reason.TIMEOUT)
    told.seal(group_id, 1)
    dropped = told.reserve()
    told.commit(e.GroupDropped(group_id=dropped, reason=Reason.EVICTED))
    after = Counted(decode_projection(encode_projection(told.p)))
    after.story.commit(e.RunRestored(checkpoint=None, position=None, train_step=0, weight_version=0))
    after.story.supersede(group_id, 1, Reason.ROWS_MISSING)
    for metric, labels, value in (
        (m.GROUPS_DRAWN, (), 2),
        (m.GROUPS_DROPPED, ("evicted",), 1),
        (m.SIBLINGS_SEALED, (), 1),
        (m.SUPERSEDED, ("timeout",), 1),
        (m.SUPERSEDED, ("rows_missing",), 1),
        (m.RESTARTS, (), 1),
        (m.SIBLINGS_DISPATCHED, (), 0),
        (m.OUTCOMES, ("valid", "stop"), 0),
    ):
        assert after.number(metric, *labels) == value, metric.name
    assert after.number(m.SEALED_TOKENS) == told.p.sealed_tokens_total > 0


def test_counters_over_closed_labels_are_there_before_anything_happens():
    found = kept(MetricValues())
    assert {labels for name, labels in found if name == "kinlog_attempts_superseded_total"} == {
        (reason.value,) for reason in Reason
    }
    assert set(found.values()) == {0.0}


def test_nothing_is_remembered_of_groups_that_have_left():
    values = MetricValues()
    counted = EventMetrics(values)
    projection = Projection()
    ledger = Ledger(
        projection,
        MemoryWriter(),  # type: ignore[arg-type]
        ManualClock(),
        observe=lambda records: counted.observe(records, projection),
    )
    told = Story(ledger)
    applied, parked, dropped = told.finalized(), told.generating(), told.generating()
    told.train(applied)
    told.commit(e.GroupParked(group_id=parked, reason=Reason.RETRY_BUDGET))
    ledger.commit(FreeCut(), e.GroupDropped(group_id=dropped, reason=Reason.EVICTED))
    assert counted._groups == {}
