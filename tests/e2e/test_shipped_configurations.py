"""A configuration that is shipped trains: one real step, on Ray, TransferQueue and torch.

The one whose sampler no other end-to-end test has. What the others differ in is the controller's business, which
``controller/test_shipped_examples.py`` has each of them train with; the soak trains the lock-step one.
"""

from importlib.resources import files
from pathlib import Path

import pytest
from kinlog_e2e import PATIENT, KinlogProcess, recorded
from msgspec.structs import replace

from kinlog.schemas import events as e
from kinlog.schemas.config import dump_config, load_config
from kinlog.schemas.reasons import CheckpointKind

EXAMPLES = Path(str(files("kinlog.controller"))) / "examples"
SHIPPED = EXAMPLES / "windowed.yaml"


@pytest.mark.e2e
def test_shipped_configuration_runs_one_real_train_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nobody is there, and a run joins nobody
    config = load_config(SHIPPED)
    config = replace(
        config,
        trainer=replace(config.trainer, max_steps=1),
        supervision=PATIENT,
        run_dir=str(tmp_path / "run"),
    )
    short = tmp_path / "config.yaml"
    short.write_text(dump_config(config))
    life = KinlogProcess(tmp_path / "output", "train", str(short))
    try:
        assert life.wait() == 0, life.story()
    finally:
        life.end()
    events = [record.event for record in recorded(tmp_path / "run")]
    (step,) = [event for event in events if isinstance(event, e.StepApplied)]
    assert len(step.group_ids) == config.trainer.groups_per_step
    committed = [event for event in events if isinstance(event, e.CheckpointCommitted)]
    assert (committed[-1].checkpoint_kind, committed[-1].train_step) == (CheckpointKind.TRAINER, 1)
    granularities = {event.granularity for event in events if isinstance(event, e.GroupReserved)}
    recovery, tasks = config.rollout_recovery, config.dataset.tasks
    assert granularities <= {recovery.resolve(agent_name=t.agent, task_name=t.name) for t in tasks}
    assert isinstance(events[-1], e.WriterClosed)
