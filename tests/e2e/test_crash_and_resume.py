"""A real run on Ray, TransferQueue and torch is SIGKILLed in the middle of generation, and resumed to the end."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from kinlog_e2e import blake2b, of_kind, read_with_pyarrow, run_kinlog, segments_of
from kinlog_e2e_lives import KilledRun, ResumedRun, reserved_granularity

from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import GroupPhase
from kinlog.replay.checkpoints import MANIFEST_NAME, read_manifest
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason
from kinlog.schemas.receipts import staging_key

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("the run that is killed")]

SECOND = 2
"""The epoch of the life after the kill."""


def planned_supersedes(resumed: ResumedRun) -> list[e.AttemptSuperseded]:
    """What the restart itself gave up: all that it recorded before the first dispatch."""
    second = [record for record in resumed.records if record.epoch == SECOND]
    first_dispatch = next(i for i, r in enumerate(second) if isinstance(r.event, e.SiblingDispatched))
    return of_kind(second[:first_dispatch], e.AttemptSuperseded)


def surviving_steps(records: list[e.RecordedEvent]) -> list[e.StepApplied]:
    """The optimizer steps that no restart undid."""
    steps: list[e.StepApplied] = []
    for record in records:
        if isinstance(record.event, e.RunRestored):
            steps = [step for step in steps if step.train_step <= record.event.train_step]
        elif isinstance(record.event, e.StepApplied):
            steps.append(record.event)
    return steps


def files_below(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


# ---- the kill -----------------------------------------------------------------------------------------------------


def test_a_group_had_both_sealed_and_running_siblings_when_it_was_killed(killed: KilledRun):
    assert killed.moment.seq == killed.p.last_seq
    assert any(
        any(s.sealed for s in group.siblings.values()) and any(s.running for s in group.siblings.values())
        for group in killed.p.live_groups()
    )
    assert killed.moment.reusable >= 2


def test_sigkill_of_the_tree_leaves_no_process_of_the_run(killed: KilledRun):
    assert killed.survivors == []


def test_stock_pyarrow_reads_a_segment_while_it_is_written(killed: KilledRun):
    lengths = {reading.num_rows for reading in killed.live_readings}
    assert len(lengths) > 1, "it did not grow between two readings"
    for reading in killed.live_readings:
        seqs = reading.column("seq").to_pylist()
        assert {later - earlier for earlier, later in pairwise(seqs)} <= {1}
    assert [
        seq for reading in killed.readings_at_the_end for seq in reading.column("seq").to_pylist()
    ] == list(range(1, killed.p.last_seq + 1))


def test_whole_groups_are_never_sealed_in_part(killed: KilledRun):
    cohorts = [g for g in killed.p.groups.values() if g.granularity is Granularity.PROMPT_GROUP]
    assert cohorts
    for group in cohorts:
        assert len({sibling.sealed is not None for sibling in group.siblings.values()}) == 1


# ---- the plan, before anything is started -------------------------------------------------------------------------


def test_plan_tells_beforehand_what_the_restart_then_did(killed: KilledRun, resumed: ResumedRun):
    code, stdout, stderr = resumed.plan
    assert (code, stderr) == (0, "")
    report = json.loads(stdout)["report"]
    restored = of_kind(resumed.records, e.RunRestored)[0]
    assert report["checkpoint"] == restored.checkpoint == killed.moment.checkpoint
    assert report["executed"] is False
    recovery = of_kind(resumed.records, e.RecoveryPlanned)[0]
    # Rows that were put just before the save, and sealed just after it, are there although nobody could tell.
    assert 0 < report["siblings_reused"] <= recovery.siblings_reused
    running = report["siblings_redispatched"]["controller_restart"]
    assert running == sum(event.reason is Reason.CONTROLLER_RESTART for event in planned_supersedes(resumed))


# ---- what the restart kept, and what it redid ---------------------------------------------------------------------


def test_run_is_trained_to_the_end_after_the_restart(killed: KilledRun, resumed: ResumedRun):
    assert resumed.exit_code == 0, resumed.story
    assert resumed.p.train_step == resumed.max_steps
    steps = [step.train_step for step in surviving_steps(resumed.records)]
    assert steps == list(range(1, resumed.max_steps + 1))
    assert isinstance(resumed.records[-1].event, e.WriterClosed)


def test_sibling_sealed_before_the_checkpoint_is_not_dispatched_again(killed: KilledRun, resumed: ResumedRun):
    finished = killed.sealed_by_checkpoint()
    dispatched = {
        (event.group_id, event.generation)
        for event in of_kind(resumed.records, e.SiblingDispatched, epoch=SECOND)
    }
    assert finished
    assert finished & dispatched == set()


def test_sibling_that_was_cut_off_goes_on_from_the_tokens_that_it_had(killed: KilledRun, resumed: ResumedRun):
    """Of those that are redone sibling by sibling; a group that is redone whole begins anew."""
    cut_off = {
        (event.group_id, event.generation): event.attempt
        for event in planned_supersedes(resumed)
        if event.reason is Reason.CONTROLLER_RESTART
    }
    sent = of_kind(resumed.records, e.SiblingDispatched, epoch=SECOND)
    first_sent = {(event.group_id, event.generation): event for event in reversed(sent)}
    alone = [
        first_sent[identity]
        for identity in cut_off
        if killed.p.groups[identity[0]].granularity is Granularity.SIBLING and identity in first_sent
    ]
    assert alone
    assert all(event.resumes_attempt == cut_off[event.group_id, event.generation] for event in alone)
    sealed = {
        (event.group_id, event.generation, event.attempt): event
        for event in of_kind(resumed.records, e.SiblingSealed, epoch=SECOND)
    }
    of_alone = [
        sealed[key] for event in alone if (key := (event.group_id, event.generation, event.attempt)) in sealed
    ]
    assert any(0 < seal.resumed_tokens <= seal.completion_tokens for seal in of_alone)
    anew = {
        (event.group_id, event.generation, event.attempt) for event in sent if event.resumes_attempt is None
    }
    assert all(sealed[key].resumed_tokens == 0 for key in anew & sealed.keys())


def test_reused_siblings_of_unfinished_groups_are_trained_on_as_they_were_sealed(
    killed: KilledRun, resumed: ResumedRun
):
    unfinished = [
        group
        for group in killed.at_checkpoint.live_groups()
        if 0 < sum(s.sealed is not None for s in group.siblings.values()) < group.num_generations
    ]
    assert unfinished
    finalized = {event.group_id: event for event in of_kind(resumed.records, e.GroupFinalized)}
    applied = {group_id for step in surviving_steps(resumed.records) for group_id in step.group_ids}
    for group in unfinished:
        assert group.group_id in applied
        attempts = {row.generation: row.attempt for row in finalized[group.group_id].rows}
        for generation, sibling in group.siblings.items():
            if sibling.sealed is not None:
                assert attempts[generation] == sibling.attempt


def test_running_sibling_is_dispatched_again_with_the_next_attempt(killed: KilledRun, resumed: ResumedRun):
    given_up = {(event.group_id, event.generation): event for event in planned_supersedes(resumed)}
    again: dict[tuple[int, int], int] = {}
    for event in of_kind(resumed.records, e.SiblingDispatched, epoch=SECOND):
        again.setdefault((event.group_id, event.generation), event.attempt)
    running = killed.running()
    assert any(group.granularity is Granularity.SIBLING for group, _ in running)
    for group, sibling in running:
        key = (group.group_id, sibling.generation)
        assert given_up[key].attempt == sibling.attempt
        assert given_up[key].reason in (Reason.CONTROLLER_RESTART, Reason.COHORT_RESTART)
        assert again[key] == sibling.attempt + 1


def test_sibling_sealed_past_the_checkpoint_is_put_back_from_the_row_journal_and_reused(
    killed: KilledRun, resumed: ResumedRun
):
    saved = (killed.checkpoint / "data_plane" / "controller_state.pkl").read_bytes()
    given_up = {(event.group_id, event.generation) for event in planned_supersedes(resumed)}
    dispatched = {
        (event.group_id, event.generation)
        for event in of_kind(resumed.records, e.SiblingDispatched, epoch=SECOND)
    }
    lost_with_the_data_plane = 0
    for group, sibling in killed.sealed_past_checkpoint():
        key = (group.group_id, sibling.generation)
        assert key not in given_up
        assert key not in dispatched
        lost_with_the_data_plane += staging_key(*key, sibling.attempt, 0).encode() not in saved
    assert lost_with_the_data_plane
    put_back = re.search(r"rows put back +(\d+)", resumed.output)
    assert put_back is not None, resumed.output
    assert int(put_back[1]) >= lost_with_the_data_plane


def test_prompt_group_is_redone_whole(killed: KilledRun, resumed: ResumedRun):
    cohorts = {
        group.group_id: group
        for group, _ in killed.running()
        if group.granularity is Granularity.PROMPT_GROUP
    }
    assert cohorts
    given_up = Counter(event.group_id for event in planned_supersedes(resumed))
    for group_id, group in cohorts.items():
        assert given_up[group_id] == group.num_generations
        before = {sibling.attempt for sibling in group.siblings.values()}
        assert len(before) == 1
        dispatched = [
            (event.generation, event.attempt)
            for event in of_kind(resumed.records, e.SiblingDispatched, epoch=SECOND)
            if event.group_id == group_id
        ]
        whole = [(generation, max(before) + 1) for generation in sorted(group.siblings)]
        assert dispatched[: group.num_generations] == whole


def test_cohort_seals_atomically_or_not_at_all(resumed: ResumedRun):
    granularity = reserved_granularity(resumed.records)
    sealed: dict[tuple[int, int], set[int]] = {}
    for event in of_kind(resumed.records, e.SiblingSealed):
        if granularity[event.group_id] is Granularity.PROMPT_GROUP:
            sealed.setdefault((event.group_id, event.attempt), set()).add(event.generation)
    cohorts = {(event.group_id, event.attempt) for event in of_kind(resumed.records, e.CohortSealed)}
    assert set(sealed) == cohorts
    assert all(generations == set(range(4)) for generations in sealed.values())


def test_granularity_of_existing_groups_is_kept_although_the_configuration_changed(
    killed: KilledRun, resumed: ResumedRun
):
    existing = reserved_granularity(killed.records)
    reserved = {event.group_id: event for event in of_kind(resumed.records, e.GroupReserved)}
    assert {group_id: reserved[group_id].granularity for group_id in existing} == existing
    by_task = {
        (event.prompt.task_name, event.granularity, event.group_id in existing) for event in reserved.values()
    }
    assert by_task == {
        ("gcd", Granularity.PROMPT_GROUP, True),
        ("bits", Granularity.SIBLING, True),
        ("gcd", Granularity.SIBLING, False),
        ("bits", Granularity.PROMPT_GROUP, False),
    }


def test_restart_says_what_it_does(killed: KilledRun, resumed: ResumedRun):
    recovery = of_kind(resumed.records, e.RecoveryPlanned)[0]
    assert killed.moment.checkpoint in resumed.output
    assert re.search(rf"siblings reused +{recovery.siblings_reused}\b", resumed.output), resumed.output
    assert recovery.siblings_redispatched == len(planned_supersedes(resumed))


def test_rows_that_nobody_refers_to_are_cleared_and_counted(resumed: ResumedRun):
    recovery = of_kind(resumed.records, e.RecoveryPlanned)[0]
    cleared = [
        event
        for event in of_kind(resumed.records, e.RowsCleared, epoch=SECOND)
        if event.reason is Reason.UNREFERENCED
    ]
    assert sum(event.num_rows for event in cleared) == recovery.rows_unreferenced


# ---- nothing is lost, nothing trained on twice --------------------------------------------------------------------


def test_each_group_is_applied_at_most_once_on_the_surviving_history(resumed: ResumedRun):
    times = Counter(group_id for step in surviving_steps(resumed.records) for group_id in step.group_ids)
    assert len(times) == 4 * resumed.max_steps
    assert set(times.values()) == {1}


def test_drawn_is_applied_dropped_parked_and_alive(resumed: ResumedRun):
    drawn = {event.group_id for event in of_kind(resumed.records, e.GroupReserved)}
    applied = {group_id for step in surviving_steps(resumed.records) for group_id in step.group_ids}
    dropped = {event.group_id for event in of_kind(resumed.records, e.GroupDropped)}
    parked = {event.group_id for event in of_kind(resumed.records, e.GroupParked)}
    alive = {group.group_id for group in resumed.p.live_groups()}
    assert len(drawn) == len(applied) + len(dropped) + len(parked) + len(alive)
    assert drawn == applied | dropped | parked | alive


def test_dataset_goes_on_after_the_last_draw(killed: KilledRun, resumed: ResumedRun):
    draws = [event.prompt.draw_index for event in of_kind(resumed.records, e.GroupReserved)]
    assert draws == list(range(len(draws)))
    assert len(draws) > killed.p.draw_cursor


@pytest.mark.parametrize("command", [("log", "verify"), ("audit",)])
def test_log_is_sound_and_proves_it(killed: KilledRun, resumed: ResumedRun, command: tuple[str, ...]):
    for run in (killed.copy, resumed.path):
        result = run_kinlog(*command, str(run))
        assert (result.returncode, result.stderr) == (0, ""), result.stdout


def test_stock_pyarrow_reads_every_closed_segment(resumed: ResumedRun):
    segments = segments_of(RunDirectory(resumed.path).log)
    assert len(segments) > 2
    seqs = [seq for segment in segments for seq in read_with_pyarrow(segment).column("seq").to_pylist()]
    assert seqs == [record.seq for record in resumed.records]


# ---- checkpoints --------------------------------------------------------------------------------------------------


def test_every_file_of_a_checkpoint_is_in_its_manifest_with_its_digest(
    killed: KilledRun, resumed: ResumedRun
):
    checkpoints = [
        path
        for run in (killed.copy, resumed.path)
        for path in RunDirectory(run).checkpoints.iterdir()
        if not path.name.startswith(".")
    ]
    assert len(checkpoints) == 4
    for path in checkpoints:
        promised = {entry.path: (entry.size_bytes, entry.blake2b) for entry in read_manifest(path).files}
        found = {name: ((path / name).stat().st_size, blake2b(path / name)) for name in files_below(path)}
        del found[MANIFEST_NAME]
        assert found == promised


def test_trainer_checkpoint_is_safetensors_and_json(resumed: ResumedRun):
    checkpoint = RunDirectory(resumed.path).checkpoints / f"step_{resumed.max_steps:06d}"
    assert files_below(checkpoint / "trainer") == [
        "optimizer.safetensors",
        "trainer.json",
        "weights.safetensors",
    ]
    json.loads((checkpoint / "trainer" / "trainer.json").read_bytes())
    for name in ("optimizer", "weights"):
        content = (checkpoint / "trainer" / f"{name}.safetensors").read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header


def test_only_the_native_data_plane_has_pickles_in_a_checkpoint(resumed: ResumedRun):
    checkpoint = RunDirectory(resumed.path).checkpoints / f"step_{resumed.max_steps:06d}"
    for name in files_below(checkpoint):
        start = (checkpoint / name).read_bytes()[:4]
        pickled = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
        if pickled or start == b"PK\x03\x04" or name.endswith((".pkl", ".pt", ".bin")):
            assert name.startswith("data_plane/")


# ---- single actors that die ---------------------------------------------------------------------------------------


def test_killed_generation_worker_costs_the_attempts_it_had_and_no_more(resumed: ResumedRun):
    lost = {
        (event.group_id, event.generation, event.attempt)
        for event in of_kind(resumed.records, e.AttemptSuperseded, epoch=SECOND)
        if event.reason is Reason.WORKER_LOST
    }
    had = resumed.running_when_worker_died
    sealed = {
        (event.group_id, event.generation, event.attempt)
        for event in of_kind(resumed.records, e.SiblingSealed, epoch=SECOND)
    }
    assert lost & had
    whole = {
        (event.group_id, event.generation, event.attempt)
        for event in of_kind(resumed.records, e.AttemptSuperseded, epoch=SECOND)
        if event.reason is Reason.COHORT_RESTART
    }
    # What had been answered before it died may still have been sealed.
    assert had <= lost | sealed | whole
    given_again = {
        (event.group_id, event.generation, event.attempt - 1)
        for event in of_kind(resumed.records, e.SiblingDispatched, epoch=SECOND)
    }
    assert lost <= given_again
    assert resumed.p.parked_total == 0


def test_killed_finalizer_is_driven_again_and_publishes_each_group_once(resumed: ResumedRun):
    started = Counter(event.group_id for event in of_kind(resumed.records, e.FinalizeStarted, epoch=SECOND))
    finalized = Counter(event.group_id for event in of_kind(resumed.records, e.GroupFinalized, epoch=SECOND))
    had = resumed.finalizing_when_finalizer_died
    assert any(started[group_id] > 1 for group_id in had)
    assert set(finalized.values()) == {1}
    assert had <= set(finalized)
    assert all(
        resumed.p.groups[group_id].phase is not GroupPhase.PARKED
        for group_id in had
        if group_id in resumed.p.groups
    )


# ---- the end ------------------------------------------------------------------------------------------------------


def test_no_process_of_the_run_is_left_at_its_end(resumed: ResumedRun):
    assert resumed.survivors == []
