"""A real run whose prompts are answered by unmodified agents, which know nothing but OpenAI's client."""

from pathlib import Path

import kinlog_agents
import pytest
from kinlog_e2e import PATIENT, KinlogProcess, in_yaml, of_kind, recorded, run_kinlog

from kinlog.replay.projection import replay
from kinlog.schemas import events as e

pytestmark = pytest.mark.e2e

RETRYING, BLOCKING = "kinlog_agents:Retrying", "kinlog_agents:Blocking"

CONFIG = f"""\
model: {{hidden_size: 32, num_layers: 1, num_heads: 2, max_positions: 96}}
generation: {{max_batch_size: 8, max_new_tokens: 8}}
dataset:
  size: 64
  tasks:
    - {{name: bits, generator: count_bits, agent: "{RETRYING}", options: {{min_n: 1, max_n: 9}}}}
    - {{name: gcd, generator: gcd, agent: "{BLOCKING}", options: {{min_value: 1, max_value: 6}}}}
trainer: {{max_steps: 2, groups_per_step: 2}}
rollout: {{num_generations: 4, max_live_groups: 4, max_inflight_siblings: 16, sibling_timeout_s: 900}}
sampler: {{name: in_order}}
checkpointing: {{every_steps: 2}}
supervision: {in_yaml(PATIENT)}
data_plane: {{num_storage_units: 1, call_timeout_s: 190}}
"""


def test_run_trains_on_what_agents_asked_at_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(kinlog_agents.__file__).parent))
    config, run = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    life = KinlogProcess(tmp_path / "output", "train", str(config), "--run-dir", str(run))
    try:
        assert life.wait() == 0, life.story()
    finally:
        life.end()
    records = recorded(run)
    assert replay(records).train_step == 2
    agents = {event.group_id: event.prompt.agent_name for event in of_kind(records, e.GroupReserved)}
    parents = {
        agent: {
            tuple(call.parent for call in sealed.receipt.calls)
            for sealed in of_kind(records, e.SiblingSealed)
            if agents[sealed.group_id] == agent
        }
        for agent in (RETRYING, BLOCKING)
    }
    # Its first answer was asked for again: a dead branch.
    assert parents == {RETRYING: {(-1, -1, 1)}, BLOCKING: {(-1,)}}
    assert of_kind(records, e.AttemptSuperseded) == []
    trained = {group_id for step in of_kind(records, e.StepApplied) for group_id in step.group_ids}
    assert {agents[group_id] for group_id in trained} == {RETRYING, BLOCKING}
    audit = run_kinlog("audit", str(run))
    assert audit.returncode == 0, audit.stdout + audit.stderr
