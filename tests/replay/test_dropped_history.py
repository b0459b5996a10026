"""Whoever reads a log whose first events were dropped begins at what they amounted to, says so, and finds the same."""

from pathlib import Path

import msgspec
import pytest
from kinlog_compaction import folded
from kinlog_run_fixtures import Chance, DiskRun
from kinlog_two_lives import LAST, OLDEST_KEPT, compact_two_lives, two_lives

from kinlog.controller.inspection_text import render_segments, render_statistics, render_verification
from kinlog.lineage.fold import FOLD_VERSION
from kinlog.lineage.log_copy import copy_log
from kinlog.lineage.scan import scan_log
from kinlog.lineage.store import LocalStore
from kinlog.replay.audit.audit import audit_log
from kinlog.replay.audit.statistics import collect_statistics
from kinlog.replay.audit.text import render_audit
from kinlog.replay.checkpoints import LOG_NAME, MANIFEST_NAME, read_manifest
from kinlog.replay.inspection import SegmentState, list_segments
from kinlog.replay.integrity.verify import verify_everything
from kinlog.replay.projection import project
from kinlog.replay.recovery.restore import START, restore_points, verify_run
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.manifest import Manifest

FORGOTTEN = "step_000003"


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    """Two lives, checkpoints at steps 3, 6, 9 and 12, and a little more. The second life goes on."""
    return two_lives(tmp_path / "run")


def manifest_of(run: DiskRun, name: str) -> Manifest:
    return read_manifest(run.directory.checkpoints / name)


def drop(run: DiskRun) -> int:
    """Drop what is behind the oldest checkpoint that is kept; returns the last seq that is gone."""
    result = compact_two_lives(run, drop=True)
    assert result.dropped_through_seq > 100
    return result.dropped_through_seq


def test_projection_is_the_same(run):
    before = folded(scan_log(run.directory.log))
    drop(run)
    scan = scan_log(run.directory.log)
    assert folded(scan) == project(scan) == before == run.p


def test_audit_gives_the_same_numbers_and_says_what_it_cannot_know(run):
    before = audit_log(scan_log(run.directory.log))
    gone = drop(run)
    audit = audit_log(scan_log(run.directory.log))
    assert audit.holds
    assert audit.dropped_events == gone
    for name in (
        "drawn", "applied", "dropped", "parked", "alive", "draw_cursor", "steps", "sealed", "late_rejected", "events",
        "draws_missing", "draws_repeated", "applied_twice", "last_rewards",
    ):  # fmt: skip
        assert getattr(audit, name) == getattr(before, name), name
    assert f"The first {gone} events were dropped" in " ".join(render_audit(audit).split())


def test_statistics_know_the_sums_and_say_what_is_counted_since(run):
    before = collect_statistics(scan_log(run.directory.log))
    gone = drop(run)
    after = collect_statistics(scan_log(run.directory.log))
    assert (after.groups, after.draw_cursor, after.steps.applied) == (
        before.groups,
        before.draw_cursor,
        before.steps.applied,
    )
    assert after.dropped_events == gone
    assert sum(after.events_by_kind.values()) == after.events - gone
    assert "dropped" in render_statistics(after)


def test_verification_is_sound_and_compares_what_is_left(run):
    gone = drop(run)
    verification = verify_everything(run.directory)
    assert verification.sound
    assert not verification.broken_checkpoints
    checks = {check.name: (check.in_log, check.projection_equal) for check in verification.checkpoints}
    assert checks[LAST] == checks[OLDEST_KEPT] == (True, True)
    assert checks[FORGOTTEN] == (None, None)
    assert f"the first {gone:,} events were dropped" in render_verification(verification)


def test_listing_shows_what_stands_for_what(run):
    gone = drop(run)
    listed = list_segments(scan_log(run.directory.log))
    assert (listed[0].state, listed[0].last_seq) == (SegmentState.DROPPED, gone)
    assert listed[-1].state is SegmentState.LIVE
    assert "dropped" in render_segments(listed)


def test_restart_finds_the_same_checkpoints_and_the_start_is_out_of_reach(run):
    before = next(restore_points(run.directory, verify_run(run.directory)))
    drop(run)
    scan = verify_run(run.directory)
    after = next(restore_points(run.directory, scan))
    assert (after.name, after.at_checkpoint, after.at_end) == (LAST, before.at_checkpoint, before.at_end)
    assert next(restore_points(run.directory, scan, wanted=OLDEST_KEPT)).name == OLDEST_KEPT
    with pytest.raises(CheckpointError, match="cannot begin again from its start.*were dropped"):
        next(restore_points(run.directory, scan, wanted=START))
    with pytest.raises(CheckpointError, match="were dropped"):
        next(restore_points(run.directory, scan, wanted=FORGOTTEN))


def test_run_goes_on_after_its_history_was_dropped(run):
    drop(run)
    run.kill()
    run.restart()
    Chance(run, 8, permits=8).live(through_step=15, groups_per_step=2, checkpoint_every=3)
    run.position()
    assert folded(scan_log(run.directory.log)) == run.p
    assert audit_log(scan_log(run.directory.log)).holds


# ---- snapshots that another version of the fold made --------------------------------------------------------------


def made_by_another_fold(run: DiskRun, name: str) -> Path:
    """Let a checkpoint look as if another kinlog had made it, whose projection says something else."""
    path = run.directory.checkpoints / name
    document = msgspec.json.decode((path / MANIFEST_NAME).read_bytes())
    document |= {"fold_version": FOLD_VERSION - 1, "projection_digest": "0" * 32}
    (path / MANIFEST_NAME).write_bytes(msgspec.json.encode(document))
    return path


def test_snapshot_of_another_fold_is_not_used_its_log_is_replayed(run):
    before = next(restore_points(run.directory, verify_run(run.directory)))
    path = made_by_another_fold(run, LAST)
    copy_log(LocalStore(), run.directory.log, path / LOG_NAME, manifest_of(run, LAST).position)
    after = next(restore_points(run.directory, verify_run(run.directory)))
    assert (after.name, after.at_checkpoint, after.at_end) == (LAST, before.at_checkpoint, before.at_end)


def test_snapshot_of_another_fold_without_its_log_is_skipped_with_the_reason(run):
    made_by_another_fold(run, LAST)
    point = next(restore_points(run.directory, verify_run(run.directory)))
    assert point.name == OLDEST_KEPT
    assert "another version" in point.skipped[0].reason


def test_snapshot_of_another_fold_is_no_broken_checkpoint(run):
    made_by_another_fold(run, LAST)
    verification = verify_everything(run.directory)
    assert not verification.broken_checkpoints
    assert [c.projection_equal for c in verification.checkpoints if c.name == LAST] == [None]
