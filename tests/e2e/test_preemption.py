"""A real run that is told to stop: it ends in time and in order, whoever gets the signal, and goes on from there."""

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from kinlog_e2e import KinlogProcess, events_so_far, of_kind, recorded, run_kinlog, write_config

from kinlog.replay.projection import replay
from kinlog.schemas import events as e
from kinlog.schemas.errors import PreemptedError
from kinlog.schemas.reasons import Reason

pytestmark = pytest.mark.e2e


def is_generating(run: Path, epoch: int) -> bool | None:
    """Whether a life has trained a step, and is in the middle of a group."""
    events = events_so_far(run)
    siblings = [list(group.siblings.values()) for group in replay(events).live_groups()]
    in_the_middle = any(any(s.running for s in of) and any(s.sealed for s in of) for of in siblings)
    return (in_the_middle and bool(of_kind(events, e.StepApplied, epoch=epoch))) or None


def check_end(life: KinlogProcess, run: Path, epoch: int, name: str) -> None:
    assert life.wait() == PreemptedError.exit_code == 25, life.story()
    assert f"{name}: finishing what is under way" in life.output()
    assert "kinlog: error [preempted]: the run was told to stop" in life.output()
    assert "Traceback" not in life.output()
    assert life.survivors() == []
    records = recorded(run)
    assert isinstance(records[-1].event, e.WriterClosed)
    assert records[-1].epoch == epoch
    p = replay(records)
    assert not any(s.running for group in p.live_groups() for s in group.siblings.values())


def test_run_that_is_told_to_stop_ends_in_order_and_goes_on_with_everything_sealed(tmp_path: Path):
    run = tmp_path / "run"
    endless = write_config(tmp_path / "endless.yaml", max_steps=10_000, whole_task="gcd")
    life = KinlogProcess(tmp_path / "1.out", "train", str(endless), "--run-dir", str(run))
    try:
        life.until(lambda: is_generating(run, 1), "it was in the middle of a group")
        life.send(signal.SIGTERM)
        check_end(life, run, 1, "SIGTERM")
    finally:
        life.end()

    life = KinlogProcess(tmp_path / "2.out", "train", str(endless), "--run-dir", str(run), "--resume")
    try:
        life.until(lambda: is_generating(run, 2), "it was in the middle of a group again")
        # As a terminal does it, and worse: every process gets it, those of Ray and the workers included.
        for process in life.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        check_end(life, run, 2, "SIGINT")
    finally:
        life.end()

    steps = replay(recorded(run)).train_step + 2
    config = write_config(tmp_path / "last.yaml", max_steps=steps, whole_task="gcd")
    life = KinlogProcess(tmp_path / "3.out", "train", str(config), "--run-dir", str(run), "--resume")
    try:
        assert life.wait() == 0, life.story()
    finally:
        life.end()
    records = recorded(run)
    assert replay(records).train_step == steps
    for recovery in of_kind(records, e.RecoveryPlanned):
        assert recovery.siblings_reused > 0
    # No restart found an attempt running, or a sealed sibling's rows gone.
    given_up = {event.reason for event in of_kind(records, e.AttemptSuperseded)}
    assert not given_up & {Reason.CONTROLLER_RESTART, Reason.ROWS_MISSING, Reason.DIGEST_MISMATCH}
    audited = run_kinlog("audit", str(run))
    assert (audited.returncode, audited.stderr) == (0, ""), audited.stdout
