"""``kinlog log salvage`` and the story that ``kinlog log verify`` tells of a damaged log: text, JSON, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kinlog_builders import append_now, directory_bytes, reopened
from kinlog_damage import damageable_run, flip, frame_of, segments_of
from kinlog_golden import log_path

from kinlog.controller.cli import cli
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.schemas.events import StepApplied

_WITHOUT_TRAINING_STACK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "torch", "transfer_queue", "tensordict", "transformers"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Blocked())
from kinlog.controller.cli import cli
cli(prog_name="kinlog")
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return damageable_run(tmp_path / "run").directory


@pytest.fixture
def damaged(run: RunDirectory) -> RunDirectory:
    """The run with one flipped bit, in its second segment's second frame."""
    path = segments_of(run.log)[1]
    flip(path, frame_of(path, 1).start + 300)
    return run


def _kinlog(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_salvage_writes_a_sound_log_and_says_what_it_left_out(damaged: RunDirectory, tmp_path: Path):
    before = directory_bytes(damaged.path)
    result = _kinlog("log", "salvage", damaged.path, "-o", tmp_path / "saved")
    assert (result.exit_code, result.stderr) == (0, "")
    assert directory_bytes(damaged.path) == before
    saved = scan_log(tmp_path / "saved" / "log").end.seq
    for words in (
        f"SAVED: {saved} events in 2 segments, up to seq {saved}",
        "trust ended here: damaged frame: segment-00000001-00000001.arrows",
        "nothing is left to read of seq 9",
        "events in it: sibling_dispatched ",
        "groups in it: 0, 1, 2",
        "checkpoints whose place is not in the copy: step_000001",
    ):
        assert words in result.stdout
    verified = _kinlog("log", "verify", tmp_path / "saved")
    assert (verified.exit_code, "SOUND" in verified.stdout) == (0, True)


def test_salvage_as_json_lists_segments_offsets_seqs_kinds_and_groups(damaged: RunDirectory, tmp_path: Path):
    result = _kinlog("log", "salvage", damaged.path, "-o", tmp_path / "saved", "--export", "--json")
    document = json.loads(result.stdout)
    assert document["last_seq"] == scan_log(tmp_path / "saved" / "log").end.seq
    first = document["left_out"][0]
    assert (first["segment"], first["why"], first["seqs"]) == (
        "segment-00000001-00000001.arrows",
        "damaged",
        [[10, 12]],
    )
    assert sum(first["kinds"].values()) == first["events"] == 3
    assert document["missing"] == [[9, 9]]
    assert all((tmp_path / "saved" / name).is_file() for name in document["exported"])


@pytest.mark.parametrize(
    ("what", "code"),
    [("occupied", 4), ("no log", 3), ("nothing to save", 6), ("newer", 7), ("file in the way", 8)],
)
def test_salvage_exit_codes_are_those_of_its_help(
    damaged: RunDirectory, tmp_path: Path, what: str, code: int
):
    source, target = damaged.path, tmp_path / "saved"
    if what == "occupied":
        target = damaged.path
    elif what == "no log":
        source = tmp_path / "nothing"
    elif what == "nothing to save":
        segments_of(damaged.log)[0].unlink()
    elif what == "newer":
        source = log_path("v1/unknown_kind").parent
    else:
        (tmp_path / "file").touch()
        target = tmp_path / "file" / "saved"
    result = _kinlog("log", "salvage", source, "-o", target)
    assert result.exit_code == code, result.output
    shown = _kinlog("log", "salvage", "--help").stdout
    assert code == 3 or f"\n     {code}  " in shown


def test_salvage_help_has_an_example_and_fits_a_terminal():
    shown = _kinlog("log", "salvage", "--help").stdout
    assert "Example\n    kinlog log salvage " in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_salvage_works_without_the_training_stack(damaged: RunDirectory, tmp_path: Path):
    command = [sys.executable, "-c", _WITHOUT_TRAINING_STACK, "log", "salvage"]
    done = subprocess.run(
        [*command, str(damaged.path), "-o", str(tmp_path / "saved"), "--export"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "SAVED" in done.stdout


def test_verify_says_what_was_checked_what_is_wrong_where_and_what_to_do(damaged: RunDirectory):
    result = _kinlog("log", "verify", damaged.path)
    assert result.exit_code == 6
    where = frame_of(segments_of(damaged.log)[1], 0).stop
    for words in (
        "checked: 15 files, ",
        "; 1 checkpoint with 1 file",
        f"segment-00000001-00000001.arrows, at byte {where}; every event up to seq 8 verified",
        "expected a frame with first seq 9",
        "nothing is left to read of seq 9",
        f"kinlog restore {damaged.path}/checkpoints/step_000001 NEW_RUN",
        f"kinlog log salvage {damaged.path} -o NEW_DIRECTORY",
    ):
        assert words in result.stdout


def test_verify_of_a_sound_log_advises_nothing(run: RunDirectory):
    result = _kinlog("log", "verify", run.path)
    assert result.exit_code == 0
    assert "checked: 15 files, " in result.stdout
    assert "what to do" not in result.stdout
    assert "left out" not in result.stdout


def test_verify_of_an_impossible_story_says_how_far_it_can_be_replayed(run: RunDirectory):
    log = reopened(run.log)
    seq = append_now(log, StepApplied(train_step=99, group_ids=()))
    log.close()
    result = _kinlog("log", "verify", run.path)
    assert result.exit_code == 11
    assert f"the events up to seq {seq - 1}" in " ".join(result.stdout.split())
    document = json.loads(_kinlog("log", "verify", run.path, "--json").stdout)
    assert document["salvageable_seq"] == seq - 1
    assert document["left_out"][0]["why"] == "does not fit"


def test_verify_says_what_to_do_about_a_broken_checkpoint(run: RunDirectory):
    (run.checkpoints / "step_000001" / "projection.zst").write_bytes(b"")
    result = _kinlog("log", "verify", run.path)
    assert result.exit_code == 13
    assert "A restart passes over step_000001" in result.stdout
