"""A timeline shows every attempt with its end, and its figures are those of the statistics and of the audit."""

from collections import Counter
from pathlib import Path

import pytest
from kinlog_builders import Story
from kinlog_compaction import events_of
from kinlog_golden import READABLE, log_path
from kinlog_long_run import LongRun
from kinlog_run_fixtures import Chance, DiskRun, small_run
from kinlog_two_lives import compact_two_lives, two_lives

from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.state import Projection
from kinlog.replay.audit.audit import audit_log
from kinlog.replay.audit.statistics import collect_statistics
from kinlog.replay.lives import LifeEnd
from kinlog.replay.timeline.attempts import Outcome, pack_slots
from kinlog.replay.timeline.building import build_timeline, timeline_of
from kinlog.replay.timeline.html_page import render_page
from kinlog.replay.timeline.moments import MarkKind
from kinlog.replay.timeline.steady_clock import SteadyClock
from kinlog.replay.timeline.summary import render_summary
from kinlog.replay.timeline.timeline import Timeline
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.reasons import Reason


def told(story: Story) -> Timeline:
    return timeline_of(story.records, run_id="run-1", beginning=Projection())


def outcomes(timeline: Timeline) -> dict[tuple[int, int, int], Outcome]:
    a = timeline.attempts
    return {(a.group_id[i], a.generation[i], a.attempt[i]): a.outcome_of(i) for i in range(len(a))}


def assert_agrees_with_statistics_and_audit(scan: LogScan) -> None:
    timeline, statistics, audit = build_timeline(scan), collect_statistics(scan), audit_log(scan)
    s, a = timeline.summary, timeline.summary.attempts
    siblings, tokens, groups = statistics.siblings, statistics.tokens, statistics.groups
    assert (a.dispatched, a.sealed, a.superseded) == (
        siblings.dispatched,
        siblings.sealed,
        siblings.superseded,
    )
    assert a.superseded_sealed == siblings.superseded_sealed == audit.sealed_redone
    assert a.outcomes.get("running", 0) == siblings.running
    assert s.late_rejected == sum(siblings.late_rejected.values())
    assert (a.tokens_sealed, s.tokens_resumed, a.tokens_redone, s.tokens_late) == (
        tokens.sealed,
        tokens.resumed,
        tokens.superseded,
        tokens.late,
    )
    assert s.groups == {
        "drawn": groups.drawn,
        "applied": groups.applied,
        "dropped": sum(groups.dropped.values()),
        "parked": sum(groups.parked.values()),
        "alive": sum(groups.alive.values()),
    }
    assert (s.groups["drawn"], s.groups["applied"], s.groups["alive"]) == (
        audit.drawn,
        audit.applied,
        audit.alive,
    )
    assert (s.steps, s.steps_undone) == (statistics.steps.applied, statistics.steps.rolled_back)
    assert (s.steps, s.steps_undone) == (audit.steps, audit.steps_rolled_back)
    assert s.tokens_saved == sum(restart.tokens_reused for restart in audit.restarts)
    assert (s.checkpoints, s.checkpoints_failed) == (
        len(statistics.checkpoints),
        sum(statistics.checkpoints_failed.values()),
    )
    assert [life.end for life in timeline.lives] == [life.end for life in statistics.lives]
    assert sum(a.outcomes.values()) == len(timeline.attempts)
    assert timeline.live_groups[-1][1] == s.groups["alive"]


@pytest.mark.parametrize("name", READABLE)
def test_figures_of_a_golden_log_are_those_of_statistics_and_audit(name: str):
    assert_agrees_with_statistics_and_audit(scan_log(log_path(name)))


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_any_run_are_those_of_statistics_and_audit(tmp_path: Path, seed: int):
    run = DiskRun(tmp_path)
    chance = Chance(run, seed, permits=8)
    chance.live(through_step=6, groups_per_step=2)
    chance.turn(2)
    run.kill()
    run.restart()
    chance.live(through_step=7, groups_per_step=2)
    run.kill()
    assert_agrees_with_statistics_and_audit(scan_log(run.directory.log))


def test_every_attempt_of_a_small_run_has_the_end_that_is_known_of_it(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    scan = scan_log(run.directory.log)
    assert_agrees_with_statistics_and_audit(scan)
    timeline = build_timeline(scan)
    found = outcomes(timeline)
    assert Counter(found.values()) == {
        Outcome.TRAINED: 4,  # both siblings of groups 0 and 1
        Outcome.WAITING: 3,  # 2/0, and the cohort of group 3
        Outcome.SUPERSEDED: 2,  # 2/1 and 4/1 were running at the kill
        Outcome.REDONE: 1,  # 4/0: its rows were missing
        Outcome.DROPPED: 2,  # group 5
    }
    assert (found[4, 0, 1], found[2, 1, 1]) == (Outcome.REDONE, Outcome.SUPERSEDED)
    assert [step.train_step for step in timeline.steps] == [1]
    assert [checkpoint.name for checkpoint in timeline.checkpoints] == ["step_000001"]
    assert [life.end for life in timeline.lives] == [LifeEnd.KILLED, LifeEnd.OPEN]
    assert MarkKind.RUN_RESTORED in {mark.kind for mark in timeline.marks}
    text = render_summary(timeline.summary)
    assert "sealed, then superseded" in text
    assert "rows_missing 1" in text


def test_attempt_that_was_running_at_a_kill_ends_with_its_life_and_not_at_the_restart(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    timeline = build_timeline(scan_log(run.directory.log))
    a, first_life = timeline.attempts, timeline.lives[0]
    running = [i for i in range(len(a)) if a.outcome_of(i) is Outcome.SUPERSEDED]
    assert {a.end_us[i] for i in running} == {first_life.ended_us}
    assert all(a.verdict_us[i] >= timeline.lives[1].began_us for i in running)


def test_late_result_is_shown_on_the_attempt_that_it_is_of():
    story = Story()
    group = story.generating()
    story.supersede(group, 0, Reason.TIMEOUT)
    late = e.LateResultRejected(
        group_id=group, generation=0, attempt=1, reason=Reason.SUPERSEDED_ATTEMPT, completion_tokens=17
    )
    story.commit(late)
    story.commit(late)
    timeline = told(story)
    a = timeline.attempts
    assert outcomes(timeline) == {(group, 0, 1): Outcome.LATE, (group, 1, 1): Outcome.RUNNING}
    assert (a.reason_of(0), a.late_reason_of(0)) == (Reason.TIMEOUT, Reason.SUPERSEDED_ATTEMPT)
    assert (timeline.summary.late_rejected, timeline.summary.tokens_late) == (2, 34)


def test_parked_group_takes_its_attempts_with_it_and_a_later_drop_says_so():
    story = Story()
    parked, dropped = story.generating(), story.generating()
    for group in (parked, dropped):
        story.commit(e.GroupParked(group_id=group, reason=Reason.RETRY_BUDGET, detail="spent"))
    story.commit(e.GroupDropped(group_id=dropped, reason=Reason.EVICTED))
    timeline = told(story)
    assert {key[0]: outcome for key, outcome in outcomes(timeline).items()} == {
        parked: Outcome.PARKED,
        dropped: Outcome.DROPPED,
    }
    assert timeline.details[timeline.attempts.detail[0]] == "spent"
    assert (timeline.summary.groups["parked"], timeline.summary.groups["dropped"]) == (1, 1)
    assert [mark.kind for mark in timeline.marks][-1] is MarkKind.GROUP_DROPPED


def test_step_that_a_restart_undid_is_marked_and_its_groups_are_no_longer_trained_on():
    story = Story()
    kept, undone = story.finalized(), story.finalized()
    story.train(kept)
    checkpoint = story.checkpoint(frontier_step=0)
    story.train(undone)
    story.restore(checkpoint)
    timeline = told(story)
    assert [(step.train_step, step.undone) for step in timeline.steps] == [(1, False), (2, True)]
    assert {key[0]: outcome for key, outcome in outcomes(timeline).items()} == {
        kept: Outcome.TRAINED,
        undone: Outcome.WAITING,
    }
    assert (timeline.summary.steps, timeline.summary.steps_undone) == (1, 1)


def test_checkpoint_lasts_from_the_last_event_that_it_holds_to_its_commit():
    position = e.Position(1, 2, 0)
    events = [
        *Story().events,
        e.CheckpointCommitted(
            name="step_000000", checkpoint_kind="trainer", train_step=0, position=position, frontier_step=0
        ),
        e.CheckpointFailed(name="step_000001", reason=Reason.TIMEOUT, detail="no answer"),
    ]
    records = [e.RecordedEvent(seq, 1, seq * 1000, event) for seq, event in enumerate(events, 1)]
    committed, failed = timeline_of(records, run_id="r", beginning=Projection()).checkpoints
    assert (committed.begin_us, committed.end_us) == (2000, 3000)
    assert (failed.failed, failed.detail) == (Reason.TIMEOUT, "no answer")


def test_clock_that_went_back_never_makes_a_time_go_back():
    clock = SteadyClock()
    assert [clock(time) for time in (100, 200, 50, 60, 10, 500)] == [100, 200, 200, 210, 210, 700]
    assert clock.went_back == 2


def test_run_whose_clock_went_back_is_shown_in_order_and_says_so():
    story = Story()
    story.finalized()
    records = [e.RecordedEvent(r.seq, r.epoch, 9_000 - 100 * r.seq, r.event) for r in story.records]
    timeline = timeline_of(records, run_id="r", beginning=Projection())
    a = timeline.attempts
    assert all(timeline.begin_us <= begin <= end for begin, end in zip(a.begin_us, a.end_us, strict=True))
    assert timeline.summary.clock_went_back == len(records) - 1
    assert "went back" in render_summary(timeline.summary)


def test_attempts_that_overlap_never_share_a_row():
    timeline = timeline_of(LongRun(groups=60, kill_every=2).events(), run_id="r", beginning=Projection())
    a, busy_until = timeline.attempts, dict[tuple[int, int], int]()
    for i in range(len(a)):
        row = (a.worker[i], a.slot[i])
        assert a.begin_us[i] >= busy_until.get(row, 0)
        assert a.slot[i] < timeline.slots[a.worker[i]]
        busy_until[row] = a.end_us[i]


def test_spans_that_do_not_overlap_share_the_lowest_row():
    assert pack_slots([(0, 0, 5), (0, 1, 2), (1, 1, 9), (0, 2, 3), (0, 5, 6)]) == (
        [0, 1, 0, 1, 0],
        {0: 2, 1: 1},
    )


def test_workers_are_in_the_order_that_people_count_in():
    timeline = timeline_of(LongRun(groups=8, workers=12).events(), run_id="r", beginning=Projection())
    assert timeline.workers == tuple(f"generation-{number}" for number in range(12))


def test_impossible_story_is_refused():
    story = Story()
    with pytest.raises(TransitionError, match="group 3 is not alive"):
        timeline_of(
            [*story.records, e.RecordedEvent(3, 1, 9, e.GroupAdmitted(group_id=3))],
            run_id="r",
            beginning=Projection(),
        )


# ---- logs that are being written, compacted, or have lost their beginning ---------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    """Two lives with checkpoints. The second goes on."""
    return two_lives(tmp_path / "run")


def test_live_log_is_shown_as_far_as_it_is_written(run: DiskRun):
    scan = scan_log(run.directory.log)
    assert_agrees_with_statistics_and_audit(scan)
    assert build_timeline(scan).lives[-1].end is LifeEnd.OPEN


def test_compacted_log_has_the_same_timeline(run: DiskRun):
    before = build_timeline(scan_log(run.directory.log))
    compact_two_lives(run, drop=False)
    scan = scan_log(run.directory.log)
    assert any(segment.compacted for segment in scan.segments)
    after = build_timeline(scan)
    assert after.summary == before.summary
    assert outcomes(after) == outcomes(before)


def test_dropped_history_is_said_to_be_missing_and_its_workers_are_not_known(run: DiskRun):
    whole = build_timeline(scan_log(run.directory.log))
    compact_two_lives(run, drop=True)
    scan = scan_log(run.directory.log)
    assert_agrees_with_statistics_and_audit(scan)
    timeline = build_timeline(scan)
    first_seq = scan.first_seq
    assert (timeline.first_seq, timeline.summary.dropped_events) == (first_seq, first_seq - 1)
    assert f"from seq {first_seq:,} on" in render_summary(timeline.summary)
    assert f"shown from seq {first_seq:,} on" in render_page(timeline)
    assert timeline.workers[-1] == ""
    a, unknown = timeline.attempts, len(timeline.workers) - 1
    carried = [i for i in range(len(a)) if a.worker[i] == unknown]
    assert carried
    assert all(a.begin_seq[i] == 0 and a.begin_us[i] == timeline.begin_us for i in carried)
    assert timeline.summary.groups == whole.summary.groups
    shown, all_of_it = outcomes(timeline), outcomes(whole)
    assert {key: shown[key] for key in shown.keys() & all_of_it.keys()} == {
        key: all_of_it[key] for key in shown.keys() & all_of_it.keys()
    }
    assert events_of(scan)[0].seq == first_seq
