"""A real run is killed with steps applied since the trainer's last checkpoint, and goes back to a checkpoint of rollouts:
where it is, and elsewhere, where there is no other journal. Each of these lives is told to stop, and ends in order, whoever
gets the signal, with all the time that it needs and with hardly any; a last one goes on from there.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import psutil
import pytest
from kinlog_e2e import PATIENT, KinlogProcess, events_so_far, of_kind, recorded, run_kinlog, write_config
from kinlog_e2e_lives import reserved_granularity
from msgspec.structs import replace

from kinlog.controller.adopt import adopt_checkpoint
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.checkpoints import read_manifest
from kinlog.replay.projection import replay
from kinlog.schemas import events as e
from kinlog.schemas.errors import PreemptedError
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import CheckpointKind, Granularity, Reason

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("the run that goes back and stops")]

_ENDLESS = 10_000


@dataclass(frozen=True, kw_only=True)
class Killed:
    """The run as it was killed."""

    run: RunDirectory
    records: list[e.RecordedEvent]
    newest: e.CheckpointCommitted
    """Of rollouts; a step was applied between its anchor and it."""
    manifest: Manifest
    copy: RunDirectory
    """The run that this checkpoint made elsewhere."""
    copied: list[e.RecordedEvent]


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A second life that was told to stop."""

    signal_name: str
    epoch: int
    train_step_before: int
    exit_code: int
    output: str
    survivors: list[str]
    records: list[e.RecordedEvent]
    audit: "tuple[int, str, str]"
    """Exit code, stdout, stderr."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The third life of the run, which trains to its end."""

    steps: int
    exit_code: int
    story: str
    records: list[e.RecordedEvent]
    audit: "tuple[int, str, str]"


def next_epoch(before: Sequence[e.RecordedEvent]) -> int:
    return before[-1].epoch + 1 if before else 1


@contextmanager
def life_of(
    run: RunDirectory,
    before: Sequence[e.RecordedEvent] = (),
    *,
    max_steps: int = _ENDLESS,
    rollout_every_s: float = 0.0,
    preemption_grace_s: float = PATIENT.preemption_grace_s,
) -> Iterator[KinlogProcess]:
    """A life of the run, resumed if there was one before."""
    config = write_config(
        run.path.with_name(f"{run.path.name}.{next_epoch(before)}.yaml"),
        max_steps=max_steps,
        whole_task="bits",
        num_storage_units=1,
        supervision=replace(PATIENT, preemption_grace_s=preemption_grace_s),
    )
    if rollout_every_s:
        often = f"{{every_steps: 4, rollout_every_s: {rollout_every_s}}}"
        config.write_text(config.read_text().replace("{every_steps: 2}", often))
    resume = ["--resume"] if before else []
    output = config.with_suffix(".out")
    life = KinlogProcess(output, "train", str(config), "--run-dir", str(run.path), *resume)
    try:
        yield life
    finally:
        life.end()


def audited(run: RunDirectory) -> "tuple[int, str, str]":
    audit = run_kinlog("audit", str(run.path))
    return audit.returncode, audit.stdout, audit.stderr


def newest_is_in_the_middle(run: Path) -> bool | None:
    """Whether the newest checkpoint is of rollouts, a step was applied between its anchor and it, and siblings sealed since."""
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


def is_generating(run: Path, before: Sequence[e.RecordedEvent]) -> bool | None:
    """Whether the life after this has trained a step, and is in the middle of a group."""
    events = events_so_far(run)
    siblings = [list(group.siblings.values()) for group in replay(events).live_groups()]
    in_the_middle = any(any(s.running for s in of) and any(s.sealed for s in of) for of in siblings)
    return (in_the_middle and bool(of_kind(events, e.StepApplied, epoch=next_epoch(before)))) or None


@pytest.fixture(scope="module")
def past_anchor(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    base = tmp_path_factory.mktemp("goes_back")
    run, copy = RunDirectory(base / "run"), RunDirectory(base / "copy")
    with life_of(run, rollout_every_s=0.2) as life:
        life.until(
            lambda: killed_in_the_middle(life, run.path), "a rollout checkpoint was in the middle of steps"
        )
    records = recorded(run.path)
    newest = of_kind(records, e.CheckpointCommitted)[-1]
    manifest = read_manifest(run.checkpoints / newest.name)
    assert manifest.anchor is not None
    adopt_checkpoint(run.checkpoints / newest.name, copy, anchor=run.checkpoints / manifest.anchor)
    return Killed(
        run=run, records=records, newest=newest, manifest=manifest, copy=copy, copied=recorded(copy.path)
    )


@pytest.fixture(scope="module")
def elsewhere(past_anchor: Killed) -> Stopped:
    """The copy's second life. Only the process that was started is told, as those who preempt do it."""
    run = past_anchor.copy
    with life_of(run, past_anchor.copied, rollout_every_s=0.2) as life:
        life.until(lambda: is_generating(run.path, past_anchor.copied), "it was in the middle of a group")
        life.send(signal.SIGTERM)
        return stopped(life, run, "SIGTERM", past_anchor.copied)


@pytest.fixture(scope="module")
def here(past_anchor: Killed) -> Stopped:
    """The run's own second life, which has hardly any time to end. Every process is told, those of Ray and the workers
    included: as a terminal does it, and worse."""
    run = past_anchor.run
    with life_of(run, past_anchor.records, preemption_grace_s=0.5) as life:
        life.until(lambda: is_generating(run.path, past_anchor.records), "it was in the middle of a group")
        for process in life.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        return stopped(life, run, "SIGINT", past_anchor.records)


def stopped(
    life: KinlogProcess, run: RunDirectory, signal_name: str, before: list[e.RecordedEvent]
) -> Stopped:
    return Stopped(
        signal_name=signal_name,
        epoch=next_epoch(before),
        train_step_before=replay(before).train_step,
        exit_code=life.wait(),
        output=life.output(),
        survivors=life.survivors(),
        records=recorded(run.path),
        audit=audited(run),
    )


@pytest.fixture(scope="module")
def ended(past_anchor: Killed, here: Stopped) -> Ended:
    steps = replay(here.records).train_step + 2
    with life_of(past_anchor.run, here.records, max_steps=steps) as life:
        exit_code = life.wait()
        story = life.story()
    return Ended(
        steps=steps,
        exit_code=exit_code,
        story=story,
        records=recorded(past_anchor.run.path),
        audit=audited(past_anchor.run),
    )


@pytest.fixture(params=["elsewhere", "here"])
def stopped_life(request: pytest.FixtureRequest) -> Stopped:
    life: Stopped = request.getfixturevalue(request.param)
    return life


def test_rollout_checkpoint_takes_its_rows_from_the_journal_and_names_its_anchor(past_anchor: Killed):
    assert (past_anchor.manifest.kind, past_anchor.manifest.rows_from) == (CheckpointKind.ROLLOUT, "journal")
    assert past_anchor.manifest.anchor == f"step_{past_anchor.newest.train_step:06d}"


def test_run_goes_back_to_a_rollout_checkpoint_and_generates_nothing_again_that_was_sealed(
    past_anchor: Killed, stopped_life: Stopped
):
    records = stopped_life.records
    restored = of_kind(records, e.RunRestored)[-1]
    assert restored.train_step == past_anchor.newest.train_step < stopped_life.train_step_before
    assert restored.checkpoint is not None
    assert restored.checkpoint.startswith("rollout_")
    planned = of_kind(records, e.RecoveryPlanned)[-1]
    assert planned.siblings_reused > 0
    assert planned.tokens_redone == 0
    given_up = {event.reason for event in of_kind(records, e.AttemptSuperseded, epoch=stopped_life.epoch)}
    assert given_up <= {Reason.CONTROLLER_RESTART, Reason.COHORT_RESTART, Reason.PREEMPTED}


def test_run_that_is_told_to_stop_ends_in_order(stopped_life: Stopped):
    assert stopped_life.exit_code == PreemptedError.exit_code == 25, stopped_life.output
    assert f"{stopped_life.signal_name}: finishing what is under way" in stopped_life.output
    assert "kinlog: error [preempted]: the run was told to stop" in stopped_life.output
    assert "Traceback" not in stopped_life.output
    assert stopped_life.survivors == []
    last = stopped_life.records[-1]
    assert isinstance(last.event, e.WriterClosed)
    assert last.epoch == stopped_life.epoch
    live = replay(stopped_life.records).live_groups()
    assert not any(s.running for group in live for s in group.siblings.values())
    code, stdout, stderr = stopped_life.audit
    assert (code, stderr) == (0, ""), stdout


def test_what_is_under_way_is_sealed_in_the_time_that_there_is(elsewhere: Stopped, here: Stopped):
    preempted = [
        [
            event
            for event in of_kind(life.records, e.AttemptSuperseded, epoch=life.epoch)
            if event.reason is Reason.PREEMPTED
        ]
        for life in (elsewhere, here)
    ]
    assert not preempted[0]
    assert preempted[1]


def test_what_was_given_up_at_the_end_goes_on_from_its_tokens(here: Stopped, ended: Ended):
    next_attempts = {
        (event.group_id, event.generation, event.attempt + 1)
        for event in of_kind(here.records, e.AttemptSuperseded, epoch=here.epoch)
        if event.reason is Reason.PREEMPTED
    }
    identity = attrgetter("group_id", "generation", "attempt")
    cohorts = reserved_granularity(ended.records)
    sent = {
        identity(event): event
        for event in of_kind(ended.records, e.SiblingDispatched, epoch=here.epoch + 1)
        if identity(event) in next_attempts and cohorts[event.group_id] is Granularity.SIBLING
    }
    assert sent
    assert all(event.resumes_attempt == event.attempt - 1 for event in sent.values())
    sealed = [seal for seal in of_kind(ended.records, e.SiblingSealed) if identity(seal) in sent]
    assert any(0 < seal.resumed_tokens <= seal.completion_tokens for seal in sealed)


def test_run_that_was_told_to_stop_goes_on_with_everything_sealed(here: Stopped, ended: Ended):
    assert ended.exit_code == 0, ended.story
    assert replay(ended.records).train_step == ended.steps
    (planned,) = of_kind(ended.records, e.RecoveryPlanned, epoch=here.epoch + 1)
    assert planned.siblings_reused > 0
    # The restart found no attempt running, and no sealed sibling's rows gone.
    given_up = {event.reason for event in of_kind(ended.records, e.AttemptSuperseded, epoch=here.epoch + 1)}
    assert not given_up & {Reason.CONTROLLER_RESTART, Reason.ROWS_MISSING, Reason.DIGEST_MISMATCH}
    code, stdout, stderr = ended.audit
    assert (code, stderr) == (0, ""), stdout
