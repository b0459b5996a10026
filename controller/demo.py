"""The demonstration: a real run that is killed in the middle of generation, resumed, and audited from its log.

Every life of the run is a ``kinlog train`` of its own, in its own process tree, so that SIGKILL means what it says.
"""

import subprocess
import sys
import threading
import time
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import psutil

from kinlog.lineage.fold import fold
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import GroupState, Projection
from kinlog.schemas.errors import DemoFailedError, LogDamagedError, RunNotFoundError
from kinlog.schemas.events import CheckpointCommitted

__all__ = ["run_demo", "kill_tree", "LogFollower", "Moment"]

_POLL_S = 0.05

#: Finished siblings of unfinished groups that the checkpoint must hold: fewer would show little.
_MIN_REUSABLE = 8


class Moment(NamedTuple):
    """An instant at which killing the run shows what recovery is about."""

    checkpoint: str
    seq: int
    unfinished_groups: tuple[int, ...]
    """Groups that have both sealed and running siblings."""
    sealed: int
    """Their sealed siblings."""
    running: int
    """Their running ones."""
    reusable: int
    """Sealed siblings that the checkpoint holds of groups that were unfinished when it was taken."""


def run_demo(run_dir: Path, *, config: Path | None = None, min_step: int = 10) -> None:
    """Train, kill, resume, train to the end, verify.

    Parameters
    ----------
    run_dir:
        Where the run goes. It must not exist.
    config:
        The configuration; by default the embedded one.
    min_step:
        The run is killed after a checkpoint at this step or later.

    Raises
    ------
    DemoFailedError
        A life of the run ended otherwise than it should.
    """
    config = config or Path(str(files("kinlog.controller") / "demo.yaml"))
    _title("1  a run begins")
    moment = _train_and_kill(config, run_dir, min_step)
    _title("2  it was killed: what the log says")
    _say(
        f"SIGKILL to the whole process tree, after checkpoint {moment.checkpoint}. At seq {moment.seq}\n"
        f"{len(moment.unfinished_groups)} groups had both: {moment.sealed} sealed and {moment.running} running siblings.\n"
        f"The checkpoint holds {moment.reusable} finished siblings of groups that were unfinished when it was taken."
    )
    _kinlog("plan", str(run_dir))
    _title("3  it is resumed, and trains to the end")
    _kinlog("train", str(config), "--run-dir", str(run_dir), "--resume")
    _title("4  the log is verified and audited")
    _kinlog("log", "verify", str(run_dir))
    _kinlog("audit", str(run_dir))
    _say(
        f"\nLook further:\n  kinlog log stats {run_dir}\n  kinlog log show {run_dir} --group {moment.unfinished_groups[0]}"
    )


def _train_and_kill(config: Path, run_dir: Path, min_step: int) -> Moment:
    process = subprocess.Popen(_command("train", str(config), "--run-dir", str(run_dir)))
    killer = _Killer(process, RunDirectory(run_dir), min_step)
    killer.start()
    process.wait()
    killer.join()
    if killer.moment is None:
        raise DemoFailedError(
            f"the run ended by itself (exit code {process.returncode}) before it could be killed in the middle of a group"
        )
    return killer.moment


class _Killer(threading.Thread):
    """Follows a run's log from outside, as anyone may, and kills the run at the first moment worth it."""

    def __init__(self, process: "subprocess.Popen[bytes]", run: RunDirectory, min_step: int) -> None:
        super().__init__(name="demo-killer", daemon=True)
        self._process = process
        self._run = run
        self._min_step = min_step
        self.moment: Moment | None = None

    def run(self) -> None:
        follower = LogFollower(self._run, min_step=self._min_step, min_reusable=_MIN_REUSABLE)
        while self._process.poll() is None:
            time.sleep(_POLL_S)
            try:
                moment = follower.look()
            except (RunNotFoundError, LogDamagedError):
                continue  # not there yet, or read in the middle of a write
            if moment is not None:
                self.moment = moment
                kill_tree(self._process.pid)
                return


class LogFollower:
    """Reads on in a log that is being written, and tells a good moment to kill the run.

    Parameters
    ----------
    run:
        The run. Its log must exist when :meth:`look` is called.
    min_step:
        No moment before a checkpoint at this step is a good one.
    min_reusable:
        Nor is one whose checkpoint holds fewer sealed siblings of groups that were unfinished when it was taken.
    """

    def __init__(self, run: RunDirectory, *, min_step: int, min_reusable: int) -> None:
        self._run = run
        self._min_step = min_step
        self._min_reusable = min_reusable
        self._now = Projection()
        self._checkpoint: CheckpointCommitted | None = None

    @property
    def projection(self) -> Projection:
        """What the log amounted to when it was last looked at."""
        return self._now

    def look(self) -> Moment | None:
        """Read on, and return what makes this a good moment to kill the run, ``None`` when it is none.

        Some group must have both sealed and running siblings, and the newest checkpoint must hold sealed siblings of
        groups that were unfinished.
        """
        scan = scan_log(self._run.log)
        if self._now.last_seq + 1 < scan.first_seq:
            self._now = scan.beginning()
        for record in scan.events(after_seq=self._now.last_seq):
            fold(self._now, record)
            if isinstance(record.event, CheckpointCommitted):
                self._checkpoint = record.event
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint.train_step < self._min_step:
            return None
        groups = [
            group
            for group in self._now.live_groups()
            if any(s.running for s in group.siblings.values())
            and any(s.sealed is not None for s in group.siblings.values())
        ]
        reusable = sum(
            _sealed_by(group, checkpoint.position.seq) for group in self._unfinished_at(checkpoint)
        )
        if not groups or reusable < self._min_reusable:
            return None
        siblings = [sibling for group in groups for sibling in group.siblings.values()]
        return Moment(
            checkpoint=checkpoint.name,
            seq=self._now.last_seq,
            unfinished_groups=tuple(group.group_id for group in groups),
            sealed=sum(sibling.sealed is not None for sibling in siblings),
            running=sum(sibling.running for sibling in siblings),
            reusable=reusable,
        )

    def _unfinished_at(self, checkpoint: CheckpointCommitted) -> list[GroupState]:
        """Return the groups of which the checkpoint holds some siblings, and not yet all."""
        return [
            group
            for group in self._now.groups.values()
            if 0 < _sealed_by(group, checkpoint.position.seq) < group.num_generations
        ]


def _sealed_by(group: GroupState, seq: int) -> int:
    return sum(0 < sibling.sealed_seq <= seq for sibling in group.siblings.values())


def kill_tree(pid: int) -> int:
    """SIGKILL a process and everything it started. Returns how many processes were killed."""
    root = psutil.Process(pid)
    # The root first: it must not see its children die, and clean up.
    tree = [root, *root.children(recursive=True)]
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree[1:], timeout=10)
    return len(tree)


def _kinlog(*arguments: str) -> None:
    _say(f"$ kinlog {' '.join(arguments)}")
    returned = subprocess.run(_command(*arguments), check=False).returncode
    if returned != 0:
        raise DemoFailedError(f"kinlog {' '.join(arguments)} returned {returned}")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kinlog.controller", *arguments]


def _title(text: str) -> None:
    _say(f"\n=== {text} " + "=" * max(3, 100 - len(text)))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - this module is the command's output
