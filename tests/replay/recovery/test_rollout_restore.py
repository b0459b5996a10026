"""Rollout checkpoints on the read side: chosen with their anchor only, and what they promise without canonical rows."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from kinlog_builders import Story, open_ledger
from kinlog_journal_parts import journal_in, journal_rows
from kinlog_run_fixtures import write_checkpoint

from kinlog.lineage.ledger import Ledger
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import GroupPhase
from kinlog.replay.checkpoints import MANIFEST_NAME, read_manifest
from kinlog.replay.recovery.anchors import verified_anchor
from kinlog.replay.recovery.inventory import Inventory, canonical_rows, expected_inventory, staged_rows
from kinlog.replay.recovery.journal import journalled_attempts
from kinlog.replay.recovery.offline_plan import plan_offline
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.replay.recovery.restore import RestorePoint, restore_points, restored_projection, verify_run
from kinlog.schemas import events as e
from kinlog.schemas.errors import CheckpointError, RowsMissingError
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import CheckpointKind, Granularity, Reason
from kinlog.schemas.rows import RowTag, inventory_digest


class Life:
    """One life of a run on disk, which takes real checkpoints of its projection."""

    def __init__(self, run: RunDirectory, ledger: Ledger) -> None:
        self.run = run
        self.ledger = ledger
        self.told = Story(ledger)
        self.anchor: Manifest | None = None
        self.anchored: e.CheckpointCommitted | None = None

    def checkpoint(self) -> e.CheckpointCommitted:
        p = self.told.p
        name = f"step_{p.train_step:06d}"
        path = self.run.checkpoints / name
        write_checkpoint(path, p, asyncio.run(self.ledger.position()))
        self.anchor = read_manifest(path)
        self.anchored = self.told.checkpoint(name=name)
        return self.anchored

    def rollout(self, name: str, *, by_journal: bool = True) -> Path:
        """Take a rollout checkpoint that goes with the newest trainer checkpoint."""
        p, anchor = self.told.p, self.anchor
        path = self.run.checkpoints / name
        write_checkpoint(path, p, asyncio.run(self.ledger.position()))
        anchor_seq = anchor.position.seq if anchor is not None else 0
        rows = expected_inventory(p, finalized_through_seq=anchor_seq if by_journal else None)
        change_manifest(
            path,
            kind=CheckpointKind.ROLLOUT,
            train_step=anchor.train_step if anchor is not None else 0,
            weight_version=anchor.weight_version if anchor is not None else 0,
            anchor=f"step_{anchor.train_step:06d}" if anchor is not None else None,
            anchor_position=anchor.position if anchor is not None else None,
            rows_from="journal" if by_journal else "data_plane",
            staging_digest=inventory_digest(rows.staging).hex(),
            training_digest=inventory_digest(rows.training).hex(),
        )
        self.told.commit(
            e.CheckpointCommitted(
                name=name,
                checkpoint_kind=CheckpointKind.ROLLOUT,
                train_step=anchor.train_step if anchor is not None else 0,
                position=read_manifest(path).position,
                frontier_step=p.frontier_step,
            )
        )
        return path


def change_manifest(checkpoint: Path, **changed: object) -> None:
    manifest = msgspec.structs.replace(read_manifest(checkpoint), **changed)
    (checkpoint / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def best(run: RunDirectory) -> RestorePoint:
    return next(restore_points(run, verify_run(run)))


@pytest.mark.parametrize("by_journal", [True, False])
def test_newest_position_comes_first_and_steps_since_its_anchor_are_rolled_back(run, by_journal):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        life.checkpoint()
        applied, claimed = life.told.finalized(), life.told.finalized()
        life.told.train(applied)
        life.told.claim(claimed)
        path = life.rollout("rollout", by_journal=by_journal)
    point = best(run)
    step = run.checkpoints / "step_000001"
    assert (point.name, point.trainer) == ("rollout", step / "trainer")
    assert point.data_plane == (step if by_journal else path) / "data_plane"
    assert point.journal == (path / "journal" if by_journal else None)
    restored = restored_projection(point)
    assert (restored.train_step, restored.weight_version) == (1, 1)
    assert {restored.groups[g].phase for g in (applied, claimed)} == {GroupPhase.FINALIZED}
    # What the data plane holds is what the checkpoint that it is loaded from says.
    assert (applied in {tag.group_id for tag in point.loaded.training.values()}) is not by_journal


def test_one_that_goes_with_the_start_of_the_run_loads_no_trainer(run):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        path = life.rollout("rollout")
    point = best(run)
    assert (point.name, point.trainer, point.data_plane) == ("rollout", None, None)
    assert (point.journal, point.loaded) == (path / "journal", Inventory())
    assert restored_projection(point).train_step == 0


FIELDS = {
    "kind": CheckpointKind.ROLLOUT,
    "run_id": "another",
    "log_id": "another",
    "position": e.Position(1, 1, 1),
    "train_step": 9,
    "weight_version": 9,
    "dataset_fingerprint": "another",
    "num_storage_units": 9,
}


@pytest.mark.parametrize("field", FIELDS)
def test_anchor_that_differs_in_any_field_is_refused_by_the_name_of_the_field(run, field):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        life.checkpoint()
        rollout = read_manifest(life.rollout("rollout"))
    anchor = run.checkpoints / "step_000001"
    assert verified_anchor(anchor, rollout).manifest == read_manifest(anchor)
    change_manifest(anchor, **{field: FIELDS[field]})
    with pytest.raises(
        CheckpointError, match=rf"is not the checkpoint .*: {field}: expected [^;]*, found [^;]*$"
    ):
        verified_anchor(anchor, rollout)


def test_one_that_promises_other_rows_than_its_projection_is_skipped(run):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        life.checkpoint()
        path = life.rollout("rollout")
    change_manifest(path, staging_digest="00")
    point = best(run)
    assert point.name == "step_000001"
    assert "promise different staging rows" in point.skipped[0].reason


def test_one_that_a_later_restart_went_back_to_before_is_skipped_with_the_reason(run):
    # Rows that it has were cleared from what that restart loaded, and given up.
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        life.checkpoint()
        life.told.ready()
        life.rollout("rollout", by_journal=False)
        life.told.restore(life.anchored)
    point = best(run)
    assert point.name == "step_000001"
    assert "went back to before it, to step_000001" in point.skipped[0].reason


class Promised:
    """A group finalized before the anchor, one sealed before and finalized after it, and one sealed after it."""

    def __init__(self) -> None:
        self.told = told = Story()
        self.early, self.late = told.finalized(), told.ready()
        self.anchor_seq = told.p.last_seq
        told.start_finalize(self.late)
        told.finish_finalize(self.late)
        self.sealed = told.ready(granularity=Granularity.SIBLING)
        self.place = e.Position(1, told.p.last_seq, 0)

    def rows(self, *group_ids: int) -> dict[str, RowTag]:
        groups = [self.told.group(group_id) for group_id in group_ids]
        return {k: tag for g in groups for s in g.siblings.values() for k, tag in staged_rows(g, s).items()}

    def planned(self, staging: dict[str, RowTag], training: dict[str, RowTag]) -> RecoveryPlan:
        return plan_recovery(
            self.told.p,
            Inventory(staging, training),
            checkpoint="rollout",
            promised=self.place,
            promised_finalized_seq=self.anchor_seq,
            policy=RecoveryPolicy(),
        )


def test_group_finalized_since_the_anchor_is_promised_by_its_staged_rows_and_finalized_again():
    run = Promised()
    canonical = canonical_rows(run.told.group(run.early))
    plan = run.planned(run.rows(run.late, run.sealed), canonical)
    assert plan.finalized == (run.early,)
    assert [(f.group_id, f.reason) for f in plan.finalize_failed] == [(run.late, Reason.ROWS_MISSING)]
    assert (plan.superseded, plan.lost_tokens, plan.missing_promised) == ((), 0, ())
    with pytest.raises(RowsMissingError, match=next(iter(run.rows(run.late)))):
        run.planned(run.rows(run.sealed), canonical)
    with pytest.raises(RowsMissingError, match=next(iter(run.rows(run.sealed)))):
        run.planned(run.rows(run.late), canonical)


def test_group_finalized_at_the_anchor_is_promised_by_its_canonical_rows():
    run = Promised()
    with pytest.raises(RowsMissingError, match=next(iter(canonical_rows(run.told.group(run.early))))):
        run.planned(run.rows(run.late, run.sealed), {})


def test_rows_of_whatever_was_sealed_since_the_anchor_are_taken_from_the_journal():
    run = Promised()
    told = run.told
    placeheld = told.generating(siblings=1)
    told.seal(placeheld, 0, placeholder=True)
    running = told.generating(siblings=1)
    parked = told.ready()
    told.commit(e.GroupParked(group_id=parked, reason=Reason.RETRY_BUDGET))
    assert journalled_attempts(told.p, run.anchor_seq) == {(run.sealed, 0, 1), (run.sealed, 1, 1)}
    of = {group_id for group_id, _, _ in journalled_attempts(told.p, 0)}
    assert of == {run.early, run.late, run.sealed}
    assert running not in of
    # A step that was applied since the anchor is trained on again.
    told.train(run.early)
    assert run.early in {group_id for group_id, _, _ in journalled_attempts(told.p, 0)}


@pytest.mark.parametrize("where", ["run", "checkpoint"])
def test_offline_plan_counts_on_the_runs_journal_and_on_the_checkpoints(run, where):
    with open_ledger(run.log) as ledger:
        life = Life(run, ledger)
        life.told.train(life.told.finalized())
        life.checkpoint()
        group = life.told.ready()
        path = life.rollout("rollout")
        sealed = [s.sealed for s in life.told.group(group).siblings.values() if s.sealed is not None]
    directory = run if where == "run" else RunDirectory(path)
    journal = journal_in(directory)
    for result in sealed:
        journal.append(journal_rows(result))
    report = plan_offline(run, policy=RecoveryPolicy()).report
    assert (report.checkpoint, report.siblings_reused, report.tokens_to_redo) == ("rollout", 2, 0)
    for segment in directory.journal.iterdir():
        segment.unlink()
    with pytest.raises(RowsMissingError, match="rollout promised 4 rows"):
        plan_offline(run, policy=RecoveryPolicy())
