"""``kinlog why``, ``kinlog at`` and ``kinlog log show --follow``: what they print, and their exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kinlog_builders import directory_bytes
from kinlog_run_fixtures import DiskRun, small_run

from kinlog.controller.cli import cli
from kinlog.lineage.scan import scan_log
from kinlog.replay.projection import replay
from kinlog.replay.rendering import to_json_value


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    """The small run; its second life goes on."""
    made = small_run(tmp_path / "run")
    made.position()
    return made


def _kinlog(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def _words(result: Result) -> str:
    return " ".join(result.stdout.split())


@pytest.mark.parametrize(
    "command",
    [
        ("why", "{run}", "4"),
        ("why", "{run}", "4/1", "--json"),
        ("at", "{run}", "--seq", "20", "--groups"),
        ("at", "{run}", "--step", "1", "--json"),
        ("examples", "{run}", "--step", "1"),
        ("log", "show", "{run}", "--sample", "x"),
        ("log", "stats", "{run}"),
    ],
)
def test_a_live_run_is_read_without_a_lock_and_unchanged(run: DiskRun, command: tuple[str, ...]):
    before = directory_bytes(run.directory.path)
    result = _kinlog(*(word.format(run=run.directory.path) for word in command))
    assert (result.exit_code, result.stderr) == (0, "")
    assert directory_bytes(run.directory.path) == before
    run.close()


def test_why_tells_the_story_and_how_the_group_stands(run: DiskRun):
    path = str(run.directory.path)
    told = _words(_kinlog("why", path, "4"))
    assert "its rows were not in the data plane any more, nor in the row journal (rows_missing" in told
    assert "The run was started again" in told
    assert told.endswith("Alive: 0 of 2 siblings sealed, 2 to be dispatched.")
    story = json.loads(_kinlog("why", path, "4/1", "--json").stdout)
    assert (story["group_id"], story["generation"], story["phase"]) == (4, 1, "generating")
    assert [line["seq"] for line in story["lines"]] == sorted(line["seq"] for line in story["lines"])
    run.close()


@pytest.mark.parametrize(
    ("sibling", "code", "words"),
    [
        ("99", 27, "group 99 was never drawn: the run has drawn 6 groups"),
        ("4/9", 27, "group 4 has no sibling 9: it has 0 to 1"),
        ("4/", 2, "neither a group, such as 17"),
        ("x", 2, "neither a group, such as 17"),
    ],
)
def test_why_says_what_is_wrong_with_a_group(run: DiskRun, sibling: str, code: int, words: str):
    result = _kinlog("why", str(run.directory.path), sibling)
    assert result.exit_code == code
    assert words in " ".join(result.stderr.split())
    run.close()


def test_at_shows_the_state_and_as_json_the_whole_projection(run: DiskRun):
    path, scan = str(run.directory.path), scan_log(run.directory.log)
    for seq in (5, 30, scan.end.seq):
        found = json.loads(_kinlog("at", path, "--seq", str(seq), "--json").stdout)
        assert found["at"]["seq"] == seq
        assert found["projection"] == to_json_value(replay(scan.events(through_seq=seq)))
    listed = _kinlog("at", path, "--seq", "30", "--groups").stdout
    assert "siblings of live groups" in listed
    assert "granularity" in listed
    run.close()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--seq", "99999"), 27, "the log ends at seq"),
        (("--step", "7"), 27, "no step 7 on its surviving history"),
        (("--time", "1999-12-31"), 27, "nothing was recorded by then"),
        (("--time", "yesterday"), 2, "no time such as 2026-01-31T23:59:59"),
        ((), 2, "say one of --seq, --step and --time"),
        (("--seq", "1", "--step", "1"), 2, "say one of --seq, --step and --time"),
    ],
)
def test_at_says_what_is_wrong_with_a_point(run: DiskRun, options: tuple[str, ...], code: int, words: str):
    result = _kinlog("at", str(run.directory.path), *options)
    assert result.exit_code == code
    assert words in " ".join(result.stderr.split())
    run.close()


def test_show_selects_by_time_and_by_sample(run: DiskRun):
    path = str(run.directory.path)
    events = [json.loads(line) for line in _kinlog("log", "show", path, "--json").stdout.splitlines()]
    since, until = events[10]["time"], events[20]["time"]
    shown = _kinlog("log", "show", path, "--json", "--since", since, "--until", until).stdout.splitlines()
    assert [json.loads(line) for line in shown] == [e for e in events if since <= e["time"] <= until]
    sample_id = next(e["prompt"]["sample_id"] for e in events if e["kind"] == "group_reserved")
    shown = _kinlog("log", "show", path, "--json", "--sample", sample_id).stdout.splitlines()
    assert json.loads(shown[0])["kind"] == "group_reserved"
    run.close()


def test_show_follows_a_live_log_until_ctrl_c_and_ends_with_0(run: DiskRun):
    code = "from kinlog.controller.cli import main; main()"
    arguments = ["log", "show", str(run.directory.path), "--follow", "--json", "--kind", "weights_published"]
    followed = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert followed.stdout is not None
    first = json.loads(followed.stdout.readline())
    assert first["kind"] == "weights_published"
    run.story.train(3)
    run.position()
    second = json.loads(followed.stdout.readline())
    assert (second["weight_version"], second["seq"]) == (2, run.p.last_seq)
    followed.send_signal(signal.SIGINT)
    _, stderr = followed.communicate(timeout=600)
    assert (followed.returncode, stderr) == (0, "")
    run.close()


def test_plan_of_a_live_run_says_what_a_kill_would_cost(run: DiskRun):
    run.story.dispatch(2)
    run.position()
    path = str(run.directory.path)
    assert "1 sibling in flight would be cut off." in _words(_kinlog("plan", path))
    assert json.loads(_kinlog("plan", path, "--json").stdout)["loss"]["siblings_in_flight"] == 1
    run.close()
