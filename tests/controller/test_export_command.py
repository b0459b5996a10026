"""``kinlog export`` writes files that other tools read, says how much, and overwrites nothing."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from kinlog_run_fixtures import small_run

from kinlog.controller.cli import cli
from kinlog.replay.views.catalogue import VIEWS


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = small_run(tmp_path / "run")
    made.kill()
    return made.directory.path


def _export(run: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["export", str(run), *options])


def test_every_view_is_written_and_listed(run: Path, tmp_path: Path):
    result = _export(run, "-o", str(tmp_path / "out"))
    assert result.exit_code == 0
    for name in VIEWS:
        assert pq.read_metadata(tmp_path / "out" / f"{name}.parquet").num_rows
        assert f"{name}.parquet" in result.stdout


def test_chosen_views_are_written_and_told_as_json(run: Path, tmp_path: Path):
    options = ("--format", "jsonl", "--view", "steps", "--view", "lives", "--view", "steps", "--json")
    told = json.loads(_export(run, "-o", str(tmp_path / "out"), *options).stdout)
    assert [(one["view"], one["rows"]) for one in told] == [("steps", 1), ("lives", 2)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["lives.jsonl", "steps.jsonl"]
    assert all(Path(one["path"]).stat().st_size == one["size_bytes"] for one in told)


def test_second_export_to_the_same_place_is_refused(run: Path, tmp_path: Path):
    _export(run, "-o", str(tmp_path / "out"), "--view", "steps")
    result = _export(run, "-o", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "steps.parquet" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["steps.parquet"]


def test_unknown_view_is_refused_with_the_ones_that_there_are(run: Path, tmp_path: Path):
    result = _export(run, "-o", str(tmp_path / "out"), "--view", "rewards")
    assert result.exit_code == 2
    assert "step_groups" in result.stderr
    assert not (tmp_path / "out").exists()
