"""Statistics add up, and agree with the projection."""

from pathlib import Path

from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.lineage.scan import scan_log
from kinlog.replay.lives import LifeEnd
from kinlog.replay.projection import project
from kinlog.replay.statistics import collect_statistics


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
