"""A real run that generates with vLLM, in workers of another interpreter: its engine is killed, then all of it, and it is
resumed to the end."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from kinlog_e2e import PATIENT, KinlogProcess, events_so_far, in_yaml, of_kind, recorded, run_kinlog

from kinlog.controller.demo import LogFollower, Moment
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import Projection
from kinlog.replay.projection import replay
from kinlog.schemas import events as e
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
from kinlog.schemas.reasons import Reason

#: The environment that ``make test-vllm`` builds.
PYTHON = Path(
    os.environ.get("KINLOG_VLLM_PYTHON", Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is not built: make test-vllm"),
]

_END_TIMEOUT_S = 60.0

# The engine is not in the configuration: the command line says it.
_CONFIG = """\
model: {{hidden_size: 64, num_layers: 1, num_heads: 2, max_positions: 160}}
generation:
  python: {python}
  max_batch_size: 8
  max_new_tokens: 60
  vllm: {{dtype: float32, enforce_eager: true, kv_cache_gib: 0.125}}
dataset:
  size: 256
  tasks:
    - {{name: gcd, generator: gcd, agent: single_turn, options: {{min_value: 1, max_value: 6}}}}
    - {{name: bits, generator: count_bits, agent: retry, options: {{min_n: 1, max_n: 9}}}}
trainer: {{max_steps: {max_steps}, groups_per_step: 2, learning_rate: 2.0e-3}}
rollout: {{num_generations: 4, max_live_groups: 6, max_inflight_siblings: 12, max_infrastructure_retries: 30, sibling_timeout_s: 900}}
supervision: {supervision}
sampler: {{name: weight_fifo, max_staleness_versions: 100}}
checkpointing: {{every_steps: 1}}
row_journal: {{progress_every_s: 0.05}}
data_plane: {{num_storage_units: 1, call_timeout_s: 190}}
"""

Attempt = tuple[int, int, int]


def _config(*, max_steps: int) -> str:
    return _CONFIG.format(python=PYTHON, supervision=in_yaml(PATIENT), max_steps=max_steps)


@dataclass(frozen=True)
class TwoLives:
    """A run whose engine was killed, that was killed as a whole later, and then resumed and trained to the end."""

    path: Path
    max_steps: int
    running_when_engine_died: set[Attempt]
    processes: list[psutil.Process]
    """vLLM's, of the first life."""
    killed: Projection
    records: list[e.RecordedEvent]
    exit_code: int
    story: str


def engine_processes(life: KinlogProcess) -> list[psutil.Process]:
    """vLLM's processes. They rename themselves, which hides the mark that they inherited."""
    worker = life.actor("RolloutWorker")
    if worker is None:
        return []
    return [child for child in worker.children(recursive=True) if child.name().startswith("VLLM::")]


def running(run: Path) -> set[Attempt]:
    live = replay(events_so_far(run)).live_groups()
    siblings = [(group, sibling) for group in live for sibling in group.siblings.values()]
    return {(g.group_id, s.generation, s.attempt) for g, s in siblings if s.running}


def killed_engine(life: KinlogProcess, run: Path) -> set[Attempt] | None:
    """Kill vLLM's engine process while siblings are being generated, and return them."""
    if not of_kind(events_so_far(run), e.StepApplied):
        return None
    with life.frozen():
        under_way = running(run)
        if under_way:
            next(p for p in engine_processes(life) if "EngineCore" in p.name()).kill()
    return under_way or None


def recovered(run: Path) -> bool | None:
    """Whether a worker was lost, and siblings were sealed after that."""
    records = events_so_far(run)
    lost = [r.seq for r in records if getattr(r.event, "reason", None) is Reason.WORKER_LOST]
    sealed = [r.seq for r in records if isinstance(r.event, e.SiblingSealed)]
    return bool(lost and sealed and sealed[-1] > lost[-1]) or None


def killed_in_the_middle(life: KinlogProcess, follower: LogFollower) -> Moment | None:
    """Kill the whole tree, if groups have both sealed and running siblings."""
    try:
        if follower.look() is None:
            return None
        with life.frozen():
            moment = follower.look()
            if moment is not None:
                life.kill()
            return moment
    except (RunNotFoundError, LogDamagedError):
        return None  # read in the middle of a write


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> TwoLives:
    base = tmp_path_factory.mktemp("vllm")
    run = RunDirectory(base / "run")
    config = base / "run.yaml"
    command = ("train", str(config), "--engine", "vllm", "--run-dir", str(run.path))
    config.write_text(_config(max_steps=10_000))
    life = KinlogProcess(base / "1.out", *command)
    try:
        under_way = life.until(lambda: killed_engine(life, run.path), "there was something to generate")
        life.until(lambda: recovered(run.path), "the worker was there again, and generated")
        processes = engine_processes(life)
        follower = LogFollower(run, min_step=1, min_reusable=1)
        life.until(lambda: killed_in_the_middle(life, follower), "there was a moment to kill it")
    finally:
        life.end()
    killed = replay(recorded(run.path))
    max_steps = killed.train_step + 2
    config.write_text(_config(max_steps=max_steps))
    second = KinlogProcess(base / "2.out", *command, "--resume")
    try:
        exit_code = second.wait()
    finally:
        second.end()
    return TwoLives(
        path=run.path,
        max_steps=max_steps,
        running_when_engine_died=under_way,
        processes=processes,
        killed=killed,
        records=recorded(run.path),
        exit_code=exit_code,
        story=second.story(),
    )


def test_run_is_trained_to_the_end_on_vllm(lives: TwoLives):
    assert lives.exit_code == 0, lives.story
    assert replay(lives.records).train_step == lives.max_steps
    assert isinstance(lives.records[-1].event, e.WriterClosed)


def test_death_of_the_engine_costs_what_was_under_way_and_no_more(lives: TwoLives):
    lost = {
        (event.group_id, event.generation, event.attempt)
        for event in of_kind(lives.records, e.AttemptSuperseded, epoch=1)
        if event.reason is Reason.WORKER_LOST
    }
    sealed = {
        (event.group_id, event.generation, event.attempt)
        for event in of_kind(lives.records, e.SiblingSealed, epoch=1)
    }
    had = lives.running_when_engine_died
    assert lost & had
    # What vLLM had answered before it died may still have been sealed.
    assert had <= lost | sealed
    assert lost & sealed == set()
    assert replay(lives.records).parked_total == 0


def test_no_process_of_vllm_is_left_of_a_run_that_was_killed(lives: TwoLives):
    assert len(lives.processes) == 2
    _, alive = psutil.wait_procs(lives.processes, _END_TIMEOUT_S)
    assert alive == []


def test_sealed_siblings_are_used_again_and_not_generated_again(lives: TwoLives):
    sealed = {
        (group.group_id, sibling.generation)
        for group in lives.killed.live_groups()
        for sibling in group.siblings.values()
        if sibling.sealed is not None
    }
    dispatched = {
        (event.group_id, event.generation) for event in of_kind(lives.records, e.SiblingDispatched, epoch=2)
    }
    assert sealed
    assert sealed & dispatched == set()
    planned = of_kind(lives.records, e.RecoveryPlanned)[0]
    assert planned.siblings_reused >= len(sealed)


@pytest.mark.parametrize("epoch", [1, 2], ids=["the engine was killed", "everything was killed"])
def test_siblings_that_were_cut_off_go_on_from_the_tokens_that_they_had(lives: TwoLives, epoch: int):
    assert any(seal.resumed_tokens > 0 for seal in of_kind(lives.records, e.SiblingSealed, epoch=epoch))


def test_tokens_are_stamped_with_the_version_that_the_trainer_gave(lives: TwoLives):
    seals = of_kind(lives.records, e.SiblingSealed)
    newest = max(event.max_weight_version for event in seals)
    assert newest > 0
    assert all(event.weight_version <= event.max_weight_version <= lives.max_steps for event in seals)


def test_everything_is_conserved_and_trained_on_once(lives: TwoLives):
    audited = run_kinlog("audit", str(lives.path))
    assert (audited.returncode, audited.stderr) == (0, ""), audited.stdout
