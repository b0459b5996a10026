"""What one step was trained on, read backwards by columns, is what reading everything gives."""

from pathlib import Path

import pytest
from kinlog_run_fixtures import Chance, DiskRun

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.store import LocalStore
from kinlog.replay.checkpoints import read_manifest
from kinlog.replay.examples.steps import StepExamples, step_examples, trained_examples


def _lived(path: Path) -> DiskRun:
    """Killed after step 7, and gone on from step 6 to step 12."""
    run = DiskRun(path, segment_bytes=65_536)
    chance = Chance(run, 5, permits=8)
    chance.live(through_step=7, groups_per_step=2, checkpoint_every=3)
    run.kill()
    run.restart()
    chance.live(through_step=12, groups_per_step=2, checkpoint_every=3)
    run.position()
    return run


def _every_step(scan: LogScan) -> dict[int, StepExamples]:
    return trained_examples(scan.events(), scan.beginning())


def test_each_step_is_told_alone_as_among_all_in_live_compacted_and_dropped_history(tmp_path: Path):
    run = _lived(tmp_path / "run")
    log = run.directory.log
    scan = scan_log(log)
    every = _every_step(scan)
    assert list(every) == list(range(1, 13))
    assert {step: step_examples(scan, step) for step in every} == every

    marks = [read_manifest(run.directory.checkpoints / f"step_{step:06d}").position for step in (9, 12)]
    compact_log(LocalStore(), log, epoch=2, checkpoints=marks)
    scan = scan_log(log)
    assert {step: step_examples(scan, step) for step in every} == every

    compact_log(LocalStore(), log, epoch=2, checkpoints=marks, drop_through_seq=marks[0].seq)
    scan = scan_log(log)
    left = _every_step(scan)
    assert 0 < len(left) < len(every)
    assert {step: step_examples(scan, step) for step in left} == left
    with pytest.raises(LookupError, match=r"no step 1 on its surviving history: .* were dropped"):
        step_examples(scan, 1)
    run.close()


def test_lengths_and_the_weights_that_trained_are_told(tmp_path: Path):
    run = _lived(tmp_path / "run")
    step = step_examples(scan_log(run.directory.log), 4)
    assert step.weight_version == 3
    for group in step.groups:
        assert group.staleness == 3 - min(sibling.min_weight_version for sibling in group.siblings)
        for sibling in group.siblings:
            assert sibling.model_calls in (1, 2)
            assert sibling.row_tokens == 16
    run.close()
