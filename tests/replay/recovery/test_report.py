"""The recovery report says everything that a restart does, in numbers that add up."""

from pathlib import Path

import msgspec
import pytest
from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.lineage.scan import scan_log
from kinlog.replay.projection import project
from kinlog.replay.recovery.offline_plan import OfflinePlan, plan_offline
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.replay.recovery.report import (
    RecoveryReport,
    SkippedCheckpoint,
    build_report,
    render_redone,
    render_report,
)
from kinlog.schemas.events import Position


def _planned(path: Path, seed: int = 2) -> tuple[DiskRun, OfflinePlan]:
    run = DiskRun(path)
    chance = Chance(run, seed, permits=8)
    chance.live(through_step=7, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    run.kill()
    return run, plan_offline(run.directory, policy=RecoveryPolicy())


@pytest.mark.parametrize("seed", range(4))
def test_the_numbers_of_a_report_add_up(tmp_path: Path, seed: int):
    _, (plan, report, _) = _planned(tmp_path / "run", seed)
    assert report.groups_alive == report.groups_reused + report.groups_to_finalize + report.groups_waiting
    assert report.groups_refinalized <= report.groups_to_finalize
    assert report.siblings_to_dispatch >= sum(report.siblings_redispatched.values())
    assert report.siblings_reused + report.siblings_to_dispatch == report.groups_alive * 4
    assert report.tokens_to_redo == plan.lost_tokens
    for reason, count in report.siblings_sealed_redone.items():
        assert count <= report.siblings_redispatched[reason]


def test_the_small_run_is_reported_as_by_hand(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    told = run.story
    group = told.generating()
    told.seal(group, 0)
    run.checkpoint()
    other = told.generating()
    told.seal(other, 1)
    run.kill()
    report = plan_offline(run.directory, policy=RecoveryPolicy()).report
    assert (report.siblings_reused, report.siblings_to_dispatch) == (1, 3)
    assert report.siblings_redispatched == {"controller_restart": 2, "rows_missing": 1}
    assert report.siblings_sealed_redone == {"rows_missing": 1}
    assert (report.tokens_saved, report.tokens_to_redo) == (10, 10)


def test_json_has_every_field_and_reads_back(tmp_path: Path):
    _, (_, report, _) = _planned(tmp_path / "run")
    assert msgspec.json.decode(msgspec.json.encode(report), type=RecoveryReport) == report


def test_text_shows_the_checkpoint_the_skipped_and_every_reason(tmp_path: Path):
    _, (_, report, _) = _planned(tmp_path / "run")
    skipped = (
        SkippedCheckpoint("step_000009", "/somewhere/step_000009 is incomplete: it has no manifest.json"),
    )
    text = render_report(
        msgspec.structs.replace(report, skipped=skipped, quarantined_bytes=2048, executed=True)
    )
    assert f"run {report.run_id}: recovery" in text
    assert report.checkpoint is not None
    assert report.checkpoint in text
    assert "step_000009: is incomplete: it has no manifest.json" in text
    assert "/somewhere" not in text
    assert "2.0 KiB" in text
    for reason, count in report.siblings_redispatched.items():
        assert f"{reason} {count}" in text
    assert max(len(line) for line in text.split("\n")) <= 100


def test_a_report_of_what_would_be_done_says_that_nothing_was_changed(tmp_path: Path):
    _, (_, report, _) = _planned(tmp_path / "run")
    assert "nothing was changed" in render_report(report)
    assert "nothing was changed" not in render_report(msgspec.structs.replace(report, executed=True))


def test_everything_redone_is_listed_with_its_reason(tmp_path: Path):
    _, (plan, _, _) = _planned(tmp_path / "run")
    lines = render_redone(plan).split("\n")[1:]
    assert len(lines) == (
        len(plan.superseded) + len(plan.finalize_failed) + len(plan.refinalized) + len(plan.dropped)
    )
    assert len(lines) > 3
    assert [int(line.split()[0]) for line in lines] == sorted(int(line.split()[0]) for line in lines)


def test_a_projection_that_the_plan_was_not_made_from_is_refused(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    run_plan = run.restart()
    run.kill()
    assert run_plan.superseded == ()
    other, (plan, _, _) = _planned(tmp_path / "other")
    other.restart()
    other.kill()
    after = project(scan_log(other.directory.log))
    with pytest.raises(ValueError, match="before the plan was carried out"):
        build_report(
            plan,
            after,
            executed=True,
            checkpoint_position=None,
            skipped=(),
            log_end=Position(1, after.last_seq, 0),
            step_before=7,
        )
