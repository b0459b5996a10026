"""A real run that takes rollout checkpoints, and is killed with steps applied since the trainer's last one."""

from pathlib import Path

import pytest
from kinlog_e2e import KinlogProcess, events_so_far, of_kind, recorded, run_kinlog, write_config

from kinlog.controller.adopt import adopt_checkpoint
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.checkpoints import read_manifest
from kinlog.replay.projection import replay
from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind, Reason

pytestmark = pytest.mark.e2e


def rollouts(records: list[e.RecordedEvent]) -> list[e.CheckpointCommitted]:
    committed = of_kind(records, e.CheckpointCommitted)
    return [c for c in committed if c.checkpoint_kind is CheckpointKind.ROLLOUT]


def newest_is_in_the_middle(run: Path) -> bool | None:
    """Whether the newest checkpoint is of rollouts, and a step was applied between its anchor and it."""
    records = events_so_far(run)
    committed = of_kind(records, e.CheckpointCommitted)
    if not committed or committed[-1].checkpoint_kind is not CheckpointKind.ROLLOUT:
        return None
    newest = committed[-1]
    at_it = replay(record for record in records if record.seq <= newest.position.seq)
    sealed_since = any(
        isinstance(record.event, e.SiblingSealed) and record.seq > newest.position.seq for record in records
    )
    return (at_it.train_step > newest.train_step > 0 and sealed_since) or None


def killed_in_the_middle(life: KinlogProcess, run: Path) -> bool | None:
    """Kill it, if this is the moment."""
    if newest_is_in_the_middle(run):
        with life.frozen():
            if newest_is_in_the_middle(run):
                life.kill()
                return True
    return None


def test_run_goes_back_to_a_rollout_checkpoint_and_generates_nothing_again_that_was_sealed(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    config = write_config(tmp_path / "run.yaml", max_steps=10_000, whole_task="bits")
    often = config.read_text().replace("{every_steps: 2}", "{every_steps: 4, rollout_every_s: 0.2}")
    config.write_text(often)
    life = KinlogProcess(tmp_path / "1.out", "train", str(config), "--run-dir", str(run.path))
    try:
        life.until(
            lambda: killed_in_the_middle(life, run.path), "a rollout checkpoint was in the middle of steps"
        )
    finally:
        life.end()
    killed = recorded(run.path)
    newest = rollouts(killed)[-1]
    manifest = read_manifest(run.checkpoints / newest.name)
    assert (manifest.kind, manifest.rows_from) == (CheckpointKind.ROLLOUT, "journal")
    assert manifest.anchor == f"step_{newest.train_step:06d}"
    # As of its own place, it makes a run elsewhere, where there is no other journal.
    copy = RunDirectory(tmp_path / "copy")
    adopt_checkpoint(run.checkpoints / newest.name, copy, anchor=run.checkpoints / manifest.anchor)

    steps = replay(killed).train_step + 2
    config.write_text(often.replace("max_steps: 10000", f"max_steps: {steps}"))
    for directory, before in ((run, replay(killed)), (copy, replay(recorded(copy.path)))):
        lived = run_kinlog("train", str(config), "--run-dir", str(directory.path), "--resume")
        assert lived.returncode == 0, lived.stdout + lived.stderr
        records = recorded(directory.path)
        restored = of_kind(records, e.RunRestored)[-1]
        assert restored.train_step == newest.train_step < before.train_step
        assert restored.checkpoint is not None
        assert restored.checkpoint.startswith("rollout_")
        planned = of_kind(records, e.RecoveryPlanned)[-1]
        assert planned.siblings_reused > 0
        assert planned.tokens_redone == 0
        given_up = {event.reason for event in of_kind(records, e.AttemptSuperseded, epoch=records[-1].epoch)}
        assert given_up <= {Reason.CONTROLLER_RESTART, Reason.COHORT_RESTART}
        assert replay(records).train_step == steps
        audit = run_kinlog("audit", str(directory.path))
        assert audit.returncode == 0, audit.stdout + audit.stderr
