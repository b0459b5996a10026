"""The soak: real runs that are killed at seeded random moments until they are done, and what became of it.

A run in lock-step (no staleness, seeded sampling, deterministic training) that is killed any number of times must end
with weights bit-identical to those of a run that was never killed, trained on the same examples in the same order. A run
that generates ahead of training cannot be compared so: of it, nothing may be lost, and nothing trained on twice.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import psutil
from kinlog_e2e import KinlogProcess, Pause, blake2b
from msgspec.structs import replace

from kinlog.lineage.fold import fold
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import GroupPhase, Projection
from kinlog.replay.audit.audit import Audit, audit_log
from kinlog.replay.checkpoints import TEMPORARY_PREFIX
from kinlog.replay.examples.difference import Comparison, compare_examples
from kinlog.replay.examples.steps import StepExamples, trained_examples
from kinlog.schemas.config import dump_config, load_config
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
from kinlog.schemas.events import CheckpointCommitted, RecoveryPlanned, SiblingSealed
from kinlog.schemas.settings import SamplerSettings

#: What a victim's process is killed for: the whole tree, or one actor of it, by its Ray class.
WHOLE_TREE = "whole tree"
TARGETS = {
    WHOLE_TREE: "",
    "generation worker": "RolloutWorker",
    "finalizer": "FinalizerWorker",
    "storage unit": "SimpleStorageUnit",
    "controller": "ControllerActor",
}
#: Those whose death the run survives by itself.
_REVIVED = {"generation worker", "finalizer"}

#: Once a life has recovered, a moment that does not come is not waited for any longer: the kill happens then.
_PATIENCE_S = 8.0
#: About how long a recovery takes on two cores, nearly all of it imports in five processes.
_RECOVERY_S = 40.0

#: What the soak trains: it is shipped, and says at its top what the soak proves. Both granularities are in it.
LOCK_STEP = Path(str(files("kinlog.controller"))) / "examples" / "lock_step.yaml"
_ASYNCHRONOUS = SamplerSettings(name="weight_fifo", max_staleness_versions=100)


def write_soak_config(path: Path, *, max_steps: int, lock_step: bool) -> Path:
    """Write the soak's configuration: no budget is ever spent, however often it is killed, and segments are small."""
    shipped = load_config(LOCK_STEP)
    config = replace(
        shipped,
        trainer=replace(shipped.trainer, max_steps=max_steps),
        rollout=replace(shipped.rollout, max_infrastructure_retries=1000, max_data_retries=1000),
        sampler=shipped.sampler if lock_step else _ASYNCHRONOUS,
        deterministic=lock_step,
        rollout_recovery=replace(shipped.rollout_recovery, prefix="discard" if lock_step else "resume"),
        row_journal=replace(shipped.row_journal, progress_every_s=0.2),
        supervision=replace(shipped.supervision, max_retry_backoff_s=2.0),
        log=replace(shipped.log, segment_bytes=65536),
    )
    path.write_text(dump_config(config))
    return path


# ---- moments ----------------------------------------------------------------------------------------------------


class Watcher:
    """Follows a run from outside: its log, and its checkpoint directory."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.p = Projection()
        self.epoch_at_start = 0
        self.planned_in_epoch = 0
        self.sealed_seq = 0
        self.checkpoint_seq = 0

    def look(self) -> None:
        """Read on. What is met in the middle of a write is read the next time."""
        with suppress(RunNotFoundError, LogDamagedError):
            for record in scan_log(self._run.log).events(after_seq=self.p.last_seq):
                fold(self.p, record)
                match record.event:
                    case SiblingSealed():
                        self.sealed_seq = record.seq
                    case CheckpointCommitted():
                        self.checkpoint_seq = record.seq
                    case RecoveryPlanned():
                        self.planned_in_epoch = record.epoch

    @property
    def recovered(self) -> bool:
        """Whether this life's recovery is done, or it is the first, which has none."""
        return self.p.last_epoch > self.epoch_at_start and (
            self.epoch_at_start == 0 or self.planned_in_epoch == self.p.last_epoch
        )

    def unfinished_checkpoint(self) -> list[str] | None:
        """What a checkpoint that is being made has so far, ``None`` when none is."""
        with suppress(OSError):
            for path in self._run.checkpoints.iterdir():
                if path.name.startswith(TEMPORARY_PREFIX):
                    return [found.name for found in path.iterdir()]
        return None

    def in_phase(self, phase: GroupPhase) -> bool:
        return any(group.phase is phase for group in self.p.groups.values())


def _moments(watcher: Watcher, chance: random.Random) -> dict[str, Callable[[], bool]]:
    """By phase: whether now is the moment. Each is asked again and again."""
    started = time.monotonic()
    within_s = chance.uniform(0.0, _RECOVERY_S)
    sealed_before = watcher.sealed_seq
    seals = chance.randint(1, 6)

    def running() -> bool:
        return watcher.recovered and any(
            sibling.running for group in watcher.p.groups.values() for sibling in group.siblings.values()
        )

    def checkpoint_has(*names: str, lacks: str) -> Callable[[], bool]:
        def is_so() -> bool:
            found = watcher.unfinished_checkpoint()
            return found is not None and all(name in found for name in names) and lacks not in found

        return is_so

    return {
        "recovery": lambda: time.monotonic() - started > within_s and not watcher.recovered,
        "generation": running,
        "sealing": lambda: watcher.recovered and watcher.sealed_seq > sealed_before + seals,
        "finalizing": lambda: watcher.recovered and watcher.in_phase(GroupPhase.FINALIZING),
        "optimizer step": lambda: watcher.recovered and watcher.in_phase(GroupPhase.CLAIMED),
        "checkpoint: data plane": checkpoint_has(lacks="trainer"),
        "checkpoint: trainer": checkpoint_has("data_plane", "trainer", lacks="manifest.json"),
        "checkpoint: commit": checkpoint_has("manifest.json", lacks="nothing"),
    }


PHASES = (
    "recovery",
    "generation",
    "sealing",
    "finalizing",
    "optimizer step",
    "checkpoint: data plane",
    "checkpoint: trainer",
    "checkpoint: commit",
)


# ---- the soak ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL."""

    phase: str
    """What the run was doing, as asked for; ``elsewhere`` when that moment did not come."""
    target: str
    seq: int
    """The last event that was read before."""


@dataclass(kw_only=True)
class Victim:
    """A run that was killed until it was done."""

    path: Path
    kills: list[Kill] = field(default_factory=list)
    audit: Audit | None = None
    comparison: Comparison | None = None
    weights_equal: bool | None = None
    resumed: tuple[int, int] = (0, 0)
    """Seals of attempts that went on from an earlier one's tokens, and how many tokens these were."""

    @property
    def sealed_regenerated(self) -> int:
        """Sealed siblings that restarts had generated again."""
        assert self.audit is not None
        return sum(sum(restart.regenerated.values()) for restart in self.audit.restarts)

    @property
    def problems(self) -> list[str]:
        assert self.audit is not None
        found = list(self.audit.failures)
        if self.sealed_regenerated:
            found.append(f"{self.sealed_regenerated} sealed siblings were generated again")
        if self.comparison is not None and not self.comparison.same:
            found.append("it was not trained on the same examples")
        if self.weights_equal is False:
            found.append("its weights differ")
        return found


def train_undisturbed(base: Path, config: Path) -> Path:
    """Train the reference: a run that nobody kills. Returns its directory."""
    path = base / "undisturbed"
    life = KinlogProcess(base / "undisturbed.out", "train", str(config), "--run-dir", str(path))
    try:
        assert life.wait() == 0, life.story()
    finally:
        life.end()
    return path


def kill_until_done(
    base: Path,
    config: Path,
    *,
    name: str,
    chance: random.Random,
    targets: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
) -> Victim:
    """Train a run and kill ``targets`` of it, one after the other, at random moments; then let it train to the end."""
    victim = Victim(path=base / name)
    watcher = Watcher(RunDirectory(victim.path))
    lives = 0
    while True:
        lives += 1
        resume = ["--resume"] if watcher.p.last_seq else []
        arguments = ["train", str(config), "--run-dir", str(victim.path), *resume]
        life = KinlogProcess(base / f"{name}.{lives}.out", *arguments)
        watcher.epoch_at_start = watcher.p.last_epoch
        try:
            while len(victim.kills) < len(targets):
                kill = _kill_once(life, watcher, chance, targets[len(victim.kills)])
                if kill is None:
                    break  # it came to its end
                victim.kills.append(kill)
                say(f"{name}: kill {len(victim.kills)}, {kill.phase}, {kill.target}, at seq {kill.seq}")
                if kill.target not in _REVIVED:
                    break
            exit_code = life.wait()  # of what died with its controller or data plane, the rest ends by itself
        finally:
            life.end()
        watcher.look()
        if exit_code == 0:
            return victim
        assert victim.kills, f"it failed before it was killed: {life.story()}"


def random_targets(chance: random.Random, number: int) -> list[str]:
    """Return what to kill, one after the other: half of the time everything at once."""
    return [chance.choice([WHOLE_TREE] * 4 + list(TARGETS)[1:]) for _ in range(number)]


def _kill_once(life: KinlogProcess, watcher: Watcher, chance: random.Random, target: str) -> Kill | None:
    """Wait for a random moment, and kill a part of the run. ``None`` when the run ended first."""
    phase = chance.choice(PHASES)
    is_time = _moments(watcher, chance)[phase]
    patience_s = _PATIENCE_S + chance.uniform(0, 5)
    deadline = None
    process = None
    while not life.ended:
        pause = Pause()
        watcher.look()
        if deadline is None and watcher.recovered:
            deadline = time.monotonic() + patience_s
        if target != WHOLE_TREE and (process is None or not process.is_running()):
            process = life.actor(TARGETS[target])
        there = target == WHOLE_TREE or process is not None
        late = deadline is not None and time.monotonic() > deadline
        if there and (late or is_time()):
            kill = Kill(phase="elsewhere" if late else phase, target=target, seq=watcher.p.last_seq)
            if process is None:
                life.kill()
            else:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            return kill
        pause.rest()
    return None


def judge(victim: Victim, undisturbed: Path | None) -> None:
    """Audit a victim from its log, and compare it with the run that nobody killed."""
    scan = scan_log(RunDirectory(victim.path).log)
    victim.audit = audit_log(scan)
    seals = [record.event for record in scan.events() if isinstance(record.event, SiblingSealed)]
    resumed = [seal.resumed_tokens for seal in seals if seal.resumed_tokens]
    victim.resumed = len(resumed), sum(resumed)
    if undisturbed is not None:
        victim.comparison = compare_examples(*(_examples(path) for path in (undisturbed, victim.path)))
        victim.weights_equal = weights_of(undisturbed) == weights_of(victim.path)


def _examples(path: Path) -> dict[int, StepExamples]:
    scan = scan_log(RunDirectory(path).log)
    return trained_examples(scan.events(), scan.beginning())


def weights_of(path: Path) -> dict[str, str]:
    """Return the digests of the newest checkpoint's trainer files: weights, optimizer and random state."""
    newest = max(path.joinpath("checkpoints").glob("step_*"))
    trainer = newest / "trainer"
    files = {file.name: blake2b(file) for file in sorted(trainer.rglob("*")) if file.is_file()}
    assert files, f"{newest} has no trainer state"
    return {"checkpoint": newest.name, **files}


def render(victims: list[Victim]) -> str:
    """The soak's table."""
    kills = [kill for victim in victims for kill in victim.kills]
    phases, targets = Counter(kill.phase for kill in kills), Counter(kill.target for kill in kills)
    audits = [victim.audit for victim in victims if victim.audit is not None]
    restarts = [restart for audit in audits for restart in audit.restarts]
    equal = [victim.weights_equal for victim in victims if victim.weights_equal is not None]
    lines = [
        ("kills", str(len(kills))),
        *((f"  {phase}", str(phases[phase])) for phase in (*PHASES, "elsewhere")),
        *((f"  of the {target}", str(targets[target])) for target in TARGETS),
        ("runs", str(len(victims))),
        ("restarts", str(len(restarts))),
        ("siblings sealed before", str(sum(restart.sealed_before for restart in restarts))),
        ("  regenerated after", str(sum(sum(restart.regenerated.values()) for restart in restarts))),
        ("tokens saved", f"{sum(restart.tokens_reused for restart in restarts):,}"),
        ("tokens redone", f"{sum(restart.tokens_regenerated for restart in restarts):,}"),
        ("cut off, and gone on from", f"{sum(victim.resumed[0] for victim in victims):,} siblings"),
        ("  tokens", f"{sum(victim.resumed[1] for victim in victims):,}"),
        ("prompts lost", str(sum(len(audit.draws_missing) + len(audit.unaccounted) for audit in audits))),
        ("groups applied twice", str(sum(len(audit.applied_twice) for audit in audits))),
        ("weights equal", f"{sum(equal)} of {len(equal)} runs" if equal else "not compared"),
        (
            "same examples",
            f"{sum(v.comparison.same for v in victims if v.comparison)} of {len(equal)} runs"
            if equal
            else "not compared",
        ),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)
