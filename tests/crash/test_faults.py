"""A disk that is full or fails: the writer stops for good, training is told, nothing acknowledged is lost, a restart is clean."""

import errno
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from kinlog_lives import Life, assert_conserved, history, next_life, replayed
from kinlog_stores import FaultyStore

from kinlog.lineage.state import projection_digest
from kinlog.schemas import events as e
from kinlog.schemas.errors import LogWriteError

CHILD = Path(sys.modules["kinlog_stores"].__file__ or "").parent / "kinlog_full_disk_child.py"


class Saw(msgspec.Struct):
    """What the child that filled the disk saw."""

    acknowledged: int
    kept: int
    after: int
    end: int
    read: int
    errors: list[str]


def assert_refused_and_recovered(saw: Saw) -> None:
    assert 10 < saw.acknowledged < 10_000, "the disk was never full"
    assert saw.kept >= saw.acknowledged
    assert saw.after == saw.end == saw.read == saw.kept + 1
    first, again, closing, *_ = saw.errors
    assert "Nothing acknowledged is lost. Free or repair the disk, then resume the run." in first
    assert first == again == closing, "a writer that failed once fails for good"


def test_full_disk_loses_nothing_acknowledged_and_the_log_goes_on_when_there_is_room(tmp_path: Path):
    # A mount in a namespace of its own: it ends with the process, whatever becomes of the test.
    mount = f"mount -t tmpfs -o size=1m kinlog-test '{tmp_path}'"
    namespace = ["unshare", "--mount", "sh", "-c"]
    try:
        allowed = subprocess.run([*namespace, mount], capture_output=True, check=False, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare command here: a small tmpfs cannot be mounted for the test")
    if allowed.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {allowed.stderr.strip()}")
    child = subprocess.run(
        [*namespace, f"{mount} && '{sys.executable}' '{CHILD}' '{tmp_path}'"],
        capture_output=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()
    saw = msgspec.json.decode(child.stdout, type=Saw)
    assert_refused_and_recovered(saw)
    assert f"[Errno {errno.ENOSPC}]" in saw.errors[0]
    assert "cannot be opened for writing" in saw.errors[3]


def test_file_that_may_not_grow_loses_nothing_acknowledged_and_the_log_goes_on_when_it_may(tmp_path: Path):
    child = subprocess.run([sys.executable, CHILD, tmp_path, "150000"], capture_output=True, check=False)
    assert child.returncode == 0, child.stderr.decode()
    saw = msgspec.json.decode(child.stdout, type=Saw)
    assert_refused_and_recovered(saw)
    assert "short write" in saw.errors[0]


# ---- a whole run --------------------------------------------------------------------------------------------------


class LogFault:
    """Lets the next operation of a kind on a run's log fail, once."""

    def __init__(self, log: Path, operation: str, code: int) -> None:
        self._log = log
        self._operation = operation
        self._code = code
        self.raised_at: list[Path] = []
        self.after: list[tuple[str, Path]] = []
        """What was written to the log after that."""

    def __call__(self, operation: str, path: Path) -> None:
        if path.parent != self._log:
            return
        if self.raised_at:
            self.after.append((operation, path))
        elif operation == self._operation:
            self.raised_at.append(path)
            raise OSError(self._code, errno.errorcode[self._code])


@pytest.mark.parametrize(
    ("operation", "code"),
    [("write", errno.EIO), ("write", errno.ENOSPC), ("sync", errno.EIO), ("sync", errno.ENOSPC)],
)
async def test_run_whose_log_fails_once_stops_and_resumes_as_if_nothing_had_been(
    tmp_path: Path, operation: str, code: int
):
    store = FaultyStore()
    life = Life(tmp_path / "run")
    life.controller._store = store
    await life.begin(resume=False)
    await life.train_until(lambda p: bool(p.checkpoints))
    store.before = fault = LogFault(life.directory.log, operation, code)
    with pytest.raises(LogWriteError, match="Free or repair the disk, then resume the run"):
        await life.finish()
    acknowledged = life.controller.status().durable_seq
    with pytest.raises(LogWriteError):
        await life.controller.close(cleanly=False)
    assert len(fault.raised_at) == 1
    assert fault.after == [], "something was written to the log after it had failed"
    before = history(tmp_path / "run")
    assert len(before) >= acknowledged > 0
    resumed = await (await next_life(tmp_path / "run")).train()
    after = history(tmp_path / "run")
    assert after[: len(before)] == before
    assert resumed.p.train_step == resumed.config.trainer.max_steps
    assert_conserved(resumed.p)
    assert projection_digest(replayed(tmp_path / "run")) == projection_digest(resumed.p)


async def test_short_write_stops_the_run_and_what_it_left_is_kept_aside(tmp_path: Path):
    store = FaultyStore()
    life = Life(tmp_path / "run")
    life.controller._store = store
    await life.begin(resume=False)
    await life.train_until(lambda p: p.train_step == 1)
    store.short_write_bytes = 500
    with pytest.raises(LogWriteError, match="short write: 500 of"):
        await life.finish()
    with suppress(LogWriteError):
        await life.controller.close(cleanly=False)
    resumed = await (await next_life(tmp_path / "run")).train()
    torn = [record.event for record in history(tmp_path / "run") if isinstance(record.event, e.TailTruncated)]
    assert [(life.directory.log / event.quarantined_to).stat().st_size for event in torn] == [
        event.quarantined_bytes for event in torn
    ]
    assert len(torn) == 1
    assert_conserved(resumed.p)


async def test_disk_that_is_full_for_a_checkpoint_costs_the_checkpoint_and_not_the_run(tmp_path: Path):
    store = FaultyStore()
    life = Life(tmp_path / "run")
    life.controller._store = store
    await life.begin(resume=False)

    def full(operation: str, path: Path) -> None:
        if life.directory.checkpoints in path.parents and life.p.train_step == 2:
            raise OSError(errno.ENOSPC, "ENOSPC")

    store.before = full
    await life.train()
    kinds = [type(record.event) for record in history(tmp_path / "run")]
    assert kinds.count(e.CheckpointFailed) == 1
    assert kinds.count(e.CheckpointCommitted) == 1
    assert store.names(life.directory.checkpoints) == ["step_000004"]
    assert store.names(life.directory.trash) == []
