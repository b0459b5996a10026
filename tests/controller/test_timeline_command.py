"""``kinlog timeline`` writes what it is asked for, prints the figures, and changes nothing of the run."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kinlog_builders import directory_bytes
from kinlog_run_fixtures import small_run

from kinlog.controller.cli import cli


def _kinlog(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The small run, killed in its second life."""
    made = small_run(tmp_path / "run")
    made.kill()
    return made.directory.path


def test_every_output_is_written_and_the_run_is_as_it_was(run: Path, tmp_path: Path):
    before = directory_bytes(run)
    page, png, trace = tmp_path / "run.html", tmp_path / "run.png", tmp_path / "run.json.gz"
    result = _kinlog("timeline", run, "-o", page, "--png", png, "--perfetto", trace)
    assert result.exit_code == 0
    assert result.stdout.count("wrote ") == 3
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert trace.read_bytes().startswith(b"\x1f\x8b")
    assert png.read_bytes().startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    assert (width, height) == (1600, 1000)
    assert directory_bytes(run) == before


def test_json_is_the_summary_also_of_a_log_directory(run: Path):
    by_run, by_log = _kinlog("timeline", run, "--json"), _kinlog("timeline", run / "log", "--json")
    assert (by_run.exit_code, by_run.stdout) == (0, by_log.stdout)
    summary = json.loads(by_run.stdout)
    assert summary["groups"] == {"drawn": 6, "applied": 2, "dropped": 1, "parked": 0, "alive": 3}
    assert summary["attempts"]["superseded"] == {"rows_missing": 1, "controller_restart": 2}


def test_without_an_output_the_figures_are_printed(run: Path):
    result = _kinlog("timeline", run)
    assert result.exit_code == 0
    assert "attempts dispatched" in result.stdout
    assert "wrote" not in result.stdout


def test_missing_run_ends_with_its_exit_code_and_writes_nothing(tmp_path: Path):
    result = _kinlog("timeline", tmp_path / "nowhere", "-o", tmp_path / "run.html")
    assert result.exit_code != 0
    assert not (tmp_path / "run.html").exists()


def test_picture_without_pillow_names_the_extra_and_all_else_works(run: Path, tmp_path: Path):
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from kinlog.controller.cli import cli\n"
        "cli(sys.argv[1:], prog_name='kinlog')\n"
    )

    def without_pillow(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", code, "timeline", str(run), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = without_pillow("--png", tmp_path / "run.png")
    assert refused.returncode == 20
    assert 'pip install "kinlog[plot]"' in refused.stderr
    assert without_pillow("-o", tmp_path / "run.html", "--json").returncode == 0
    assert (tmp_path / "run.html").exists()
