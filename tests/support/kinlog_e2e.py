"""Real lives of a run for the end-to-end tests: ``kinlog`` in process trees of its own, frozen, killed, and looked at."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pyarrow as pa
import pytest

from kinlog.controller.demo import kill_tree
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
from kinlog.schemas.events import RecordedEvent
from kinlog.schemas.settings import SupervisionSettings

T = TypeVar("T")

#: Nothing here is a timed test: these only end what hangs, and are above every time-out of a run.
LIFE_TIMEOUT_S = 1800.0
COMMAND_TIMEOUT_S = 1800.0

#: For runs whose processes may not be taken for dead or hung because the machine is busy with other tests.
PATIENT = SupervisionSettings(
    max_retry_backoff_s=2.0,
    probe_timeout_s=240.0,
    start_timeout_s=1200.0,
    restart_timeout_s=1200.0,
    preemption_grace_s=600.0,
    stall_timeout_s=1500.0,
)

_MARK = "KINLOG_E2E_LIFE"
_POLL_S = 0.03
#: Who looks on takes at most a fifth of a core from the run that is looked at.
_REST_PER_LOOK = 4.0
_TAIL_LINES = 40

_CONFIG = """\
model: {{hidden_size: 32, num_layers: 1, num_heads: 2, max_positions: 160}}
generation: {{max_batch_size: 6, max_new_tokens: 60}}
dataset:
  size: 256
  tasks:
    - {{name: gcd, generator: gcd, agent: single_turn, options: {{min_value: 1, max_value: 6}}}}
    - {{name: bits, generator: count_bits, agent: retry, options: {{min_n: 1, max_n: 9}}}}
trainer: {{max_steps: {max_steps}, groups_per_step: 4, learning_rate: 2.0e-3}}
rollout:
  {{num_generations: 4, max_live_groups: 12, max_inflight_siblings: 24, max_turns: 2, max_infrastructure_retries: 30, sibling_timeout_s: 900}}
supervision: {supervision}
sampler: {{name: weight_fifo, max_staleness_versions: 100}}
rollout_recovery:
  default_granularity: sibling
  task_granularity_overrides: {{{whole_task}: prompt_group}}
checkpointing: {{every_steps: 2}}
data_plane: {{num_storage_units: {num_storage_units}, call_timeout_s: 190}}
row_journal: {{progress_every_s: 0.1}}
log: {{segment_bytes: 65536}}
"""


def write_config(
    path: Path,
    *,
    max_steps: int,
    whole_task: str,
    num_storage_units: int = 2,
    supervision: SupervisionSettings = PATIENT,
) -> Path:
    """Write a small configuration of two tasks, ``gcd`` and ``bits``; ``whole_task`` is redone by prompt group."""
    path.write_text(
        _CONFIG.format(
            max_steps=max_steps,
            whole_task=whole_task,
            num_storage_units=num_storage_units,
            supervision=in_yaml(supervision),
        )
    )
    return path


def in_yaml(settings: SupervisionSettings) -> str:
    """The settings as a value in a configuration's text."""
    return msgspec.json.encode(settings).decode()


class Pause:
    """Between two looks at a run: the longer a look took, the longer."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def rest(self) -> None:
        time.sleep(max(_POLL_S, _REST_PER_LOOK * (time.monotonic() - self._began)))


class KinlogProcess:
    """A ``kinlog`` command in a process tree of its own, whose every process can be told by a mark it inherits."""

    def __init__(self, output: Path, *arguments: str) -> None:
        self._mark = uuid.uuid4().hex
        self._output = output
        self.command = f"kinlog {' '.join(arguments)}"
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kinlog.controller", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {_MARK: self._mark},
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def story(self) -> str:
        """What a reader of a failed test needs: how it ended, and the end of what it said."""
        tail = "\n".join(self.output().splitlines()[-_TAIL_LINES:])
        return (
            f"{self.command}\nexit code: {self._process.poll()}\nthe last {_TAIL_LINES} lines of it:\n{tail}"
        )

    def send(self, number: signal.Signals) -> None:
        """Signal the one process that was started, as those who preempt do."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        try:
            return self._process.wait(LIFE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {self.story()}")

    def until(self, look: Callable[[], T | None], what: str) -> T:
        """Look again and again while it runs, until there is something to return."""
        deadline = time.monotonic() + LIFE_TIMEOUT_S
        while time.monotonic() < deadline:
            ended = self.ended
            pause = Pause()
            found = look()
            if found is not None:
                return found
            if ended:
                pytest.fail(f"it ended before {what}: {self.story()}")
            pause.rest()
        pytest.fail(f"waited in vain until {what}: {self.story()}")

    def processes(self) -> list[psutil.Process]:
        """All that it started and that has not ended, orphans included."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def actor(self, name: str) -> psutil.Process | None:
        """The process of a Ray actor, if it is there."""
        for process in self.processes():
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(f"ray::{name}"):
                    return process
        return None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop every process of it for the length of the block: what the log says then is how things are."""
        stopped = self.processes()
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def kill(self) -> None:
        """SIGKILL the whole tree."""
        with suppress(psutil.NoSuchProcess):
            kill_tree(self._process.pid)
        self._process.wait()

    def end(self) -> None:
        """Leave nothing of it behind, whatever became of the test."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def survivors(self) -> list[str]:
        """What of it still runs, after some time to end in order."""
        deadline = time.monotonic() + 60.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        names = []
        for process in left:
            with suppress(psutil.Error):
                names.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        return names


def run_kinlog(*arguments: str, python: Path | str = sys.executable) -> "subprocess.CompletedProcess[str]":
    """Run a ``kinlog`` command to its end."""
    return subprocess.run(
        [str(python), "-m", "kinlog.controller", *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )


# ---- what is on disk --------------------------------------------------------------------------------------------


def recorded(run: Path) -> list[RecordedEvent]:
    """All events of a run's log."""
    return list(scan_log(RunDirectory(run).log).events())


def events_so_far(run: Path) -> list[RecordedEvent]:
    """All events of a log that is being written; none when it is not there yet, or was met in the middle of a write."""
    try:
        return recorded(run)
    except (RunNotFoundError, LogDamagedError):
        return []


def segments_of(log: Path) -> list[Path]:
    """The segments of a log, oldest first."""
    return sorted(log.glob("*.arrows"))


def read_with_pyarrow(segment: Path) -> pa.Table:
    """Read a segment as anybody does who knows nothing of kinlog."""
    with pa.OSFile(str(segment)) as file:
        return pa.ipc.open_stream(file).read_all()


def digests_of(path: Path) -> dict[str, str]:
    """Everything below a directory: the digest of each file, and each directory."""
    return {
        found.relative_to(path).as_posix(): blake2b(found) if found.is_file() else "directory"
        for found in sorted(path.rglob("*"))
    }


def blake2b(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def flip_byte(path: Path, offset_bytes: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 0x10
    path.write_bytes(data)


def of_kind(records: Sequence[RecordedEvent], kind: type[T], *, epoch: int | None = None) -> list[T]:
    """The events of a kind, of one life or of all."""
    return [r.event for r in records if isinstance(r.event, kind) and epoch in (None, r.epoch)]
