"""What ``kinlog train`` refuses: one clear message, the documented exit code, nothing changed, no cluster started."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
from click.testing import CliRunner
from kinlog_e2e import COMMAND_TIMEOUT_S, digests_of, flip_byte, run_kinlog, segments_of, write_config
from kinlog_e2e_checkpoints import sign_again
from kinlog_e2e_lives import KilledRun

from kinlog.controller.cli import cli
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.segment import scan_segment
from kinlog.lineage.state import GroupPhase
from kinlog.replay.checkpoints import MANIFEST_NAME, TEMPORARY_PREFIX
from kinlog.schemas.errors import (
    ConfigError,
    KinlogError,
    LogDamagedError,
    RowsMissingError,
    RunExistsError,
    RunLockedError,
    RunNotFoundError,
)
from kinlog.schemas.reasons import Partition
from kinlog.schemas.receipts import staging_key

if TYPE_CHECKING:
    from kinlog.workers.data_plane import DataPlane

pytest_plugins = ["kinlog_data_plane"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("the run that is killed")]

#: What ``kinlog train`` says as soon as there is a cluster.
CLUSTER = "Ray started"

Refused = Callable[..., str]


def check_refusal(error: type[KinlogError], code: int, stdout: str, stderr: str) -> None:
    assert code == error.exit_code, stderr
    assert CLUSTER not in stdout
    assert stderr.startswith(f"kinlog: error [{error.code}]: ")
    assert stderr.count("\n") == 1
    assert "Traceback" not in stderr


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    """Run ``kinlog train`` in this process, check that it refuses and changes nothing, and return what it says."""

    def no_cluster(*arguments: object, **options: object) -> None:
        pytest.fail("a cluster was started before the refusal")

    monkeypatch.setattr(ray, "init", no_cluster)
    monkeypatch.chdir(tmp_path)

    def check(error: type[KinlogError], *arguments: str | Path) -> str:
        before = digests_of(tmp_path)
        result = CliRunner().invoke(cli, ["train", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        check_refusal(error, result.exit_code, result.stdout, result.stderr)
        assert digests_of(tmp_path) == before
        return result.stderr

    return check


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.yaml", max_steps=4, whole_task="gcd")


@pytest.fixture
def run(killed: KilledRun, tmp_path: Path) -> RunDirectory:
    """A copy of the killed run, to be spoiled."""
    return RunDirectory(Path(shutil.copytree(killed.copy, tmp_path / "run")))


def changed(config: Path, old: str, new: str) -> Path:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    return config


# ---- the configuration --------------------------------------------------------------------------------------------


def test_misspelt_key_is_refused_with_the_nearest_one(refused: Refused, config: Path):
    said = refused(ConfigError, changed(config, "num_generations", "num_generation"), "--run-dir", "run")
    assert "'rollout.num_generation'" in said
    assert "did you mean 'num_generations'?" in said


def test_dataset_that_does_not_exist_is_refused_by_name(refused: Refused, config: Path):
    said = refused(ConfigError, changed(config, "generator: gcd", "generator: gdc"), "--run-dir", "run")
    assert "'gdc'" in said
    assert "task 'gcd'" in said


@pytest.mark.parametrize("options", ["{min_valu: 1}", "{min_value: 9, max_value: 1}"])
def test_options_that_do_not_fit_the_dataset_are_refused(refused: Refused, config: Path, options: str):
    spoilt = changed(config, "{min_value: 1, max_value: 6}", options)
    said = refused(ConfigError, spoilt, "--run-dir", "run")
    assert "the options of task 'gcd' do not fit gcd" in said


def test_recovery_without_token_capture_is_refused(refused: Refused, config: Path):
    config.write_text(config.read_text() + "token_capture: {enabled: false}\n")
    said = refused(ConfigError, config, "--run-dir", "run")
    assert "token_capture.enabled: true; found false" in said


@pytest.mark.parametrize("key", ["enabled", "save_data_plane"])
def test_recovery_without_a_saved_data_plane_is_refused(refused: Refused, config: Path, key: str):
    spoilt = changed(config, "{every_steps: 2}", f"{{every_steps: 2, {key}: false}}")
    said = refused(ConfigError, spoilt, "--run-dir", "run")
    assert f"checkpointing.{key}: true; found false" in said


def test_configuration_that_is_not_there_is_refused(refused: Refused, tmp_path: Path):
    assert str(tmp_path / "absent.yaml") in refused(ConfigError, tmp_path / "absent.yaml")


# ---- the run ------------------------------------------------------------------------------------------------------


def test_existing_run_is_not_begun_again(refused: Refused, config: Path, run: RunDirectory):
    assert "--resume" in refused(RunExistsError, config, "--run-dir", run.path)


def test_resuming_an_empty_directory_is_refused(refused: Refused, config: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    said = refused(RunNotFoundError, config, "--run-dir", tmp_path / "empty", "--resume")
    assert str(tmp_path / "empty") in said


@contextmanager
def writing_process(log: Path) -> Iterator[None]:
    """Another process that holds the log's writer lock, as a running controller does."""
    code = (
        "import pathlib, sys\n"
        "from kinlog.lineage.log import lock_log\n"
        "lock = lock_log(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.stdin.close()
        assert process.wait(COMMAND_TIMEOUT_S) == 0


@pytest.mark.parametrize("resume", [("--resume",), ()])
def test_run_that_another_process_writes_is_refused(
    refused: Refused, config: Path, run: RunDirectory, resume: tuple[str, ...]
):
    with writing_process(run.log):
        said = refused(RunLockedError, config, "--run-dir", run.path, *resume)
    assert str(run.log) in said


def spoil_log(run: RunDirectory) -> tuple[Path, int]:
    """Flip a byte in what a restart reads of a log; returns where the damaged frame begins.

    Compacted segments are before the checkpoint, and verified when they are read.
    """
    segment = next(path for path in segments_of(run.log) if path.name.startswith("segment-"))
    frames = scan_segment(memoryview(segment.read_bytes())).frames
    frame = frames[len(frames) // 2]
    flip_byte(segment, (frame.offset + frame.end) // 2)
    return segment, frame.offset


def test_corrupt_log_is_refused_with_the_place(refused: Refused, config: Path, run: RunDirectory):
    segment, offset_bytes = spoil_log(run)
    said = refused(LogDamagedError, config, "--run-dir", run.path, "--resume")
    assert f"segment {segment.name}, byte {offset_bytes}, " in said
    assert "Nothing was changed" in said


def test_refusal_of_a_real_process_is_the_same(config: Path, run: RunDirectory, tmp_path: Path):
    segment, _ = spoil_log(run)
    before = digests_of(tmp_path)
    result = run_kinlog("train", str(config), "--run-dir", str(run.path), "--resume")
    check_refusal(LogDamagedError, result.returncode, result.stdout, result.stderr)
    assert segment.name in result.stderr
    assert digests_of(tmp_path) == before


# ---- checkpoints --------------------------------------------------------------------------------------------------


def newest_checkpoint(killed: KilledRun, run: RunDirectory) -> Path:
    return run.checkpoints / killed.moment.checkpoint


def plan_of(run: RunDirectory) -> dict[str, Any]:
    """What ``kinlog plan`` says, and that it changes nothing."""
    before = digests_of(run.path)
    result = CliRunner().invoke(cli, ["plan", str(run.path), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert digests_of(run.path) == before
    report: dict[str, Any] = json.loads(result.stdout)["report"]
    return report


def committed_and_skipped(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """The checkpoints that are not used, without what the kill left half-written: it may have struck in a save."""
    return [skip for skip in report["skipped"] if not skip["name"].startswith(TEMPORARY_PREFIX)]


@pytest.mark.parametrize(
    "file", ["trainer/weights.safetensors", "data_plane/controller_state.pkl", "projection.zst"]
)
def test_checkpoint_with_a_flipped_byte_is_skipped_with_the_reason(
    killed: KilledRun, run: RunDirectory, file: str
):
    spoilt = newest_checkpoint(killed, run) / file
    flip_byte(spoilt, spoilt.stat().st_size // 2)
    report = plan_of(run)
    [skipped] = committed_and_skipped(report)
    assert skipped["name"] == killed.moment.checkpoint
    assert file in skipped["reason"]
    assert report["checkpoint"] == f"step_{killed.manifest.train_step - 2:06d}"


def test_half_written_newest_checkpoint_is_skipped_with_the_reason(killed: KilledRun, run: RunDirectory):
    (newest_checkpoint(killed, run) / MANIFEST_NAME).unlink()
    report = plan_of(run)
    [skipped] = committed_and_skipped(report)
    assert (skipped["name"], MANIFEST_NAME in skipped["reason"]) == (killed.moment.checkpoint, True)
    assert report["checkpoint"] == f"step_{killed.manifest.train_step - 2:06d}"


def promised_row(killed: KilledRun) -> str:
    """The key of a row that the checkpoint promises: of a finished sibling whose group was unfinished."""
    return next(
        staging_key(group.group_id, sibling.generation, sibling.attempt, 0)
        for group in killed.at_checkpoint.live_groups()
        if group.phase is GroupPhase.GENERATING
        for sibling in group.siblings.values()
        if sibling.sealed is not None
    )


def test_row_that_the_checkpoint_promised_and_the_data_plane_lacks_is_named_and_nothing_is_changed(
    killed: KilledRun, run: RunDirectory, config: Path, tmp_path: Path, data_plane: "DataPlane"
):
    checkpoint, key = newest_checkpoint(killed, run), promised_row(killed)

    async def save_without_the_row() -> None:
        await data_plane.load(checkpoint / "data_plane", timeout_s=COMMAND_TIMEOUT_S)
        assert await data_plane.clear(Partition.STAGING, [key], cut=None) == 1
        shutil.rmtree(checkpoint / "data_plane")
        await data_plane.save(checkpoint / "data_plane", {}, timeout_s=COMMAND_TIMEOUT_S)

    asyncio.run(save_without_the_row())
    sign_again(checkpoint)
    shutil.rmtree(run.journal)  # it would give the row back
    before = digests_of(tmp_path)

    result = run_kinlog("train", str(config), "--run-dir", str(run.path), "--resume")
    assert result.returncode == RowsMissingError.exit_code == 14, result.stdout + result.stderr
    assert CLUSTER in result.stdout
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("kinlog: error [rows_missing]: ")
    assert f"{key} (rows_missing)" in last
    assert killed.moment.checkpoint in last
    assert digests_of(tmp_path) == before
