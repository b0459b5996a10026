"""Statistics add up, and agree with the projection."""

from collections import Counter
from pathlib import Path

import pytest
from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.store import LocalStore
from kinlog.replay.audit.statistics import collect_statistics
from kinlog.replay.checkpoints import read_manifest
from kinlog.replay.lives import LifeEnd, LivesTally
from kinlog.replay.projection import project
from kinlog.schemas import events as e


def test_a_small_run_is_counted_by_hand(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    statistics = collect_statistics(scan_log(run.directory.log))
    groups, siblings = statistics.groups, statistics.siblings
    assert (groups.drawn, groups.applied, groups.dropped) == (6, 2, {"evicted": 1})
    assert groups.alive == {"generating": 2, "finalized": 1}
    assert siblings.superseded == {"rows_missing": 1, "controller_restart": 2}
    assert siblings.superseded_sealed == {"rows_missing": 1}
    assert (siblings.dispatched, siblings.sealed, siblings.running) == (12, 8, 0)
    assert (statistics.tokens.sealed, statistics.tokens.superseded) == (80, 10)
    assert [checkpoint.name for checkpoint in statistics.checkpoints] == ["step_000001"]


def test_lives_say_how_each_ended_and_what_it_restored(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.close()
    run.restart()
    run.kill()
    first, second, third = collect_statistics(scan_log(run.directory.log)).lives
    assert [life.end for life in (first, second, third)] == [LifeEnd.KILLED, LifeEnd.CLOSED, LifeEnd.OPEN]
    assert (first.restored, first.first_seq) == (False, 1)
    assert (second.restored_checkpoint, second.restored_step) == ("step_000001", 1)
    assert second.first_seq == first.last_seq + 1
    assert second.began_us > first.ended_us


def test_statistics_of_any_run_agree_with_its_projection(tmp_path: Path):
    for seed in range(3):
        run = DiskRun(tmp_path / str(seed))
        chance = Chance(run, seed, permits=8)
        chance.live(through_step=7, groups_per_step=2)
        chance.turn(2)
        run.kill()
        run.restart()
        chance.live(through_step=8, groups_per_step=2)
        run.kill()
        scan = scan_log(run.directory.log)
        statistics, p = collect_statistics(scan), project(scan)
        assert sum(statistics.events_by_kind.values()) == statistics.events == p.last_seq
        assert statistics.groups.drawn == p.drawn_total
        assert statistics.groups.applied == p.applied_total
        assert sum(statistics.groups.alive.values()) == p.alive_total
        assert sum(statistics.groups.parked.values()) == p.parked_total
        assert statistics.siblings.superseded == {str(k): n for k, n in p.superseded.items()}
        assert statistics.tokens.sealed == p.sealed_tokens_total
        assert (
            statistics.steps.applied + statistics.steps.rolled_back
            == statistics.events_by_kind["step_applied"]
        )


def _counted_one_by_one(scan: LogScan) -> dict[str, object]:
    """Count by looking at every event and the state that it meets."""
    p, superseded_sealed, tokens = scan.beginning(), Counter(), Counter()
    undone = 0
    kinds, validity, finish = Counter(), Counter(), Counter()
    for record in scan.events():
        event = record.event
        kinds[e.kind_of(type(event))] += 1
        match event:
            case e.SiblingSealed():
                validity[event.validity.value] += 1
                finish[event.finish_reason.value] += 1
                tokens["sealed"] += event.completion_tokens
            case e.AttemptSuperseded():
                sealed = p.groups[event.group_id].siblings[event.generation].sealed
                if sealed is not None:
                    superseded_sealed[event.reason.value] += 1
                    tokens["superseded"] += sealed.completion_tokens
            case e.LateResultRejected():
                tokens["late"] += event.completion_tokens
            case e.RunRestored():
                undone += p.train_step - event.train_step
        fold(p, record)
    return {
        "kinds": kinds,
        "superseded_sealed": superseded_sealed,
        "tokens": tokens,
        "undone": undone,
        "validity": validity,
        "finish": finish,
    }


@pytest.mark.parametrize("history", ["live", "compacted", "dropped"])
def test_counting_by_columns_is_counting_event_by_event(tmp_path: Path, history: str):
    run = DiskRun(tmp_path / "run", segment_bytes=65_536)
    chance = Chance(run, 5, permits=8)
    for through_step in (7, 12):
        chance.live(through_step=through_step, groups_per_step=2, checkpoint_every=3)
        chance.turn(2)
        run.kill()
        run.restart()
    run.position()
    if history != "live":
        marks = [read_manifest(run.directory.checkpoints / f"step_{step:06d}").position for step in (9, 12)]
        drop_through_seq = marks[0].seq if history == "dropped" else 0
        compact_log(
            LocalStore(), run.directory.log, epoch=3, checkpoints=marks, drop_through_seq=drop_through_seq
        )
    scan = scan_log(run.directory.log)
    assert (scan.base is not None) == (history == "dropped")
    s = collect_statistics(scan)
    assert {
        "kinds": s.events_by_kind,
        "superseded_sealed": s.siblings.superseded_sealed,
        "tokens": {name: n for name in ("sealed", "superseded", "late") if (n := getattr(s.tokens, name))},
        "undone": s.steps.rolled_back,
        "validity": s.siblings.sealed_by_validity,
        "finish": s.siblings.sealed_by_finish,
    } == _counted_one_by_one(scan)
    assert s.siblings.superseded_sealed
    assert s.events == scan.end.seq
    lives = LivesTally()
    for record in scan.events():
        lives.add(record)
    assert s.lives == lives.lives()
    run.close()
