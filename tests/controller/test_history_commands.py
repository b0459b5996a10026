"""``kinlog examples`` and ``kinlog diff`` say what was trained on, and their exit codes can be built on."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kinlog_run_fixtures import Chance, DiskRun

from kinlog.controller.cli import cli


def _kinlog(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def _trained(path: Path, seed: int) -> str:
    run = DiskRun(path)
    Chance(run, seed, permits=8).live(through_step=3, groups_per_step=2, checkpoint_every=2)
    run.kill()
    return str(path)


def test_examples_shows_every_sibling_of_a_step_in_order(tmp_path: Path):
    run = _trained(tmp_path / "run", 1)
    result = _kinlog("examples", run, "--step", "2")
    assert result.exit_code == 0
    assert result.stdout.startswith("step 2, applied at seq ")
    found = json.loads(_kinlog("examples", run, "--step", "2", "--json").stdout)
    siblings = [sibling for group in found["groups"] for sibling in group["siblings"]]
    assert len(result.stdout.splitlines()) == len(siblings) + 3


def test_step_that_was_never_applied_is_said_to_be_missing(tmp_path: Path):
    result = _kinlog("examples", _trained(tmp_path / "run", 1), "--step", "9")
    assert result.exit_code == 27
    assert "no step 9" in result.stderr


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_diff_of_a_run_with_itself_is_nothing_and_exits_with_0(tmp_path: Path, extra: tuple[str, ...]):
    run = _trained(tmp_path / "run", 1)
    result = _kinlog("diff", run, run, *extra)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["same"] if extra else "SAME" in result.stdout


def test_diff_of_two_runs_names_where_they_part_and_exits_with_1(tmp_path: Path):
    runs = _trained(tmp_path / "one", 1), _trained(tmp_path / "other", 2)
    result = _kinlog("diff", *runs)
    assert result.exit_code == 1
    assert "DIFFERENT" in result.stdout
