"""``kinlog watch``: one frame, one document, or a view that is refreshed until Ctrl-C."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner
from kinlog_run_fixtures import DiskRun, small_run

from kinlog.controller import watch_command as module
from kinlog.controller.cli import cli
from kinlog.controller.watch_text import render_view
from kinlog.lineage.segment import scan_segment, segment_name
from kinlog.replay.watch.run import WatchedRun

_CONFIG = """\
dataset: {tasks: [{name: sums, generator: basic_arithmetic, agent: single}]}
trainer: {max_steps: 4, groups_per_step: 2}
rollout: {max_live_groups: 8}
"""


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    made = small_run(tmp_path / "run")
    made.story.generating()
    made.position()
    made.directory.config.write_text(_CONFIG)
    return made


def _text(run: DiskRun, *, alive: bool | None, later_us: int = 0) -> str:
    watched = WatchedRun(
        run.directory.path, is_alive=lambda host, pid: alive, now_us=lambda: run._clock.now_us + later_us
    )
    return render_view(watched.look())


def test_frame_says_everything_that_there_is_to_know(run: DiskRun):
    text = _text(run, alive=True, later_us=4_000_000)
    for words in (
        "run-1: running, pid 2 on here",
        "2, for ",
        "1 restart",
        "1 of 4  [########----------------------] 25%; weights 1",
        "4 live of 8 permits: 3 generating, 1 finalized",
        "7 drawn, 2 applied, 0 parked; dropped: evicted 1",
        "2 in flight",
        "group 6/0 attempt 1, in flight for 4.0 s on worker-0",
        "controller_restart 2, rows_missing 1",
        "0 to 1 versions behind",
        "durable to seq",
        "step_000001, ",
        "goes back to step_000001; 2 siblings in flight, 8.0 s of generation, cut off",
        "with journal (on)",
    ):
        assert words in text, (words, text)
    run.close()


def test_a_run_that_died_is_said_to_have(run: DiskRun):
    assert "DIED: pid 2 on here is gone" in _text(run, alive=False, later_us=3_000_000)
    run.close()
    assert "closed in order" in _text(run, alive=False)


def test_once_is_one_frame_and_so_is_an_output_that_is_no_terminal(run: DiskRun):
    for options in (["--once"], []):
        result = CliRunner().invoke(cli, ["watch", str(run.directory.path), *options])
        assert result.exit_code == 0
        assert result.stdout.startswith("run ")
        assert "\x1b" not in result.stdout
    run.close()


def test_json_is_one_document(run: DiskRun):
    result = CliRunner().invoke(cli, ["watch", str(run.directory.path), "--json"])
    document = json.loads(result.stdout)
    assert (document["train_step"], document["max_steps"], document["kill"]["siblings_in_flight"]) == (
        1,
        4,
        2,
    )
    run.close()


class Screen:
    """Stands for the terminal: every text that it was given."""

    shown: ClassVar[list[str]] = []

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, text: object, *, refresh: bool) -> None:
        self.shown.append(str(text))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Screen, "shown", [])
    monkeypatch.setattr(module, "Live", Screen)
    return Screen.shown


def test_view_is_refreshed_until_ctrl_c_from_before_the_run_begins(tmp_path: Path, shown: list[str]):
    made: list[DiskRun] = []

    def live_on(seconds: float) -> None:
        if len(shown) == 1:
            made.append(small_run(tmp_path / "run"))
        elif len(shown) == 2:
            made[0].story.generating()
        else:
            raise KeyboardInterrupt
        made[0].position()

    with pytest.raises(KeyboardInterrupt):
        module._watch(tmp_path / "run", live_on)
    made[0].close()
    assert shown[0].startswith("no run yet: ")
    assert ["0 in flight" in text for text in shown[1:]] == [True, False]


class _Terminal:
    class stdout:  # noqa: N801
        @staticmethod
        def isatty() -> bool:
            return True


def test_ctrl_c_ends_the_view_in_order(run: DiskRun, monkeypatch):
    looked: list[Path] = []

    def interrupted(path: Path, sleep: object) -> None:
        looked.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_watch", interrupted)
    monkeypatch.setattr(module, "sys", _Terminal)
    result = CliRunner().invoke(cli, ["watch", str(run.directory.path)])
    assert (result.exit_code, result.output, looked) == (0, "", [run.directory.path])
    run.close()


def test_what_cannot_be_watched_is_one_clear_line(tmp_path: Path):
    absent = CliRunner().invoke(cli, ["watch", str(tmp_path / "absent"), "--once"])
    assert (absent.exit_code, absent.stdout) == (3, "")
    assert absent.stderr.startswith("kinlog: error [run_not_found]: ")
    run = small_run(tmp_path / "run")
    run.kill()
    path = run.directory.log / segment_name(1, 0)
    data = bytearray(path.read_bytes())
    data[scan_segment(memoryview(data)).frames[1].offset + 100] ^= 1
    path.write_bytes(data)
    damaged = CliRunner().invoke(cli, ["watch", str(run.directory.path), "--json"])
    assert (damaged.exit_code, damaged.stdout) == (6, "")
    assert "kinlog: error [log_damaged]: " in damaged.stderr
