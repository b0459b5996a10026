"""The command line: what it prints, where, and the exit code, in a base install as well."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result
from kinlog_builders import append_now, directory_bytes, reopened
from kinlog_run_fixtures import DiskRun, small_run

from kinlog.controller.cli import cli
from kinlog.lineage.segment import scan_segment, segment_name
from kinlog.schemas import errors
from kinlog.schemas.errors import LogDamagedError, RunExistsError
from kinlog.schemas.events import StepApplied

_TRAINING_STACK = ("ray", "torch", "transfer_queue", "tensordict", "transformers", "reasoning_gym")
_CONFIG = """\
dataset:
  tasks:
    - {name: sums, generator: basic_arithmetic, agent: single}
"""


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    """The small run, killed in its second life."""
    made = small_run(tmp_path / "run")
    made.kill()
    return made


@pytest.fixture
def run_path(run: DiskRun) -> str:
    return str(run.directory.path)


def _kinlog(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def _damage(run: DiskRun) -> int:
    path = run.directory.log / segment_name(1, 0)
    data = bytearray(path.read_bytes())
    frame = scan_segment(memoryview(data)).frames[1]
    data[frame.offset + 100] ^= 1
    path.write_bytes(data)
    return frame.offset


INSPECTION = [
    ("log", "ls"),
    ("log", "stats"),
    ("log", "show"),
    ("log", "verify"),
    ("plan",),
    ("plan", "--siblings"),
    ("audit",),
    ("audit", "--list"),
]


@pytest.mark.parametrize("command", INSPECTION)
def test_every_inspection_command_works_on_a_run_and_on_its_log_and_changes_nothing(
    run: DiskRun, run_path: str, command: tuple[str, ...]
):
    before = directory_bytes(run.directory.path)
    by_run, by_log = _kinlog(*command, run_path), _kinlog(*command, f"{run_path}/log")
    assert (by_run.exit_code, by_log.exit_code) == (0, 0)
    assert by_run.stderr == ""
    assert "\x1b" not in by_run.stdout
    assert by_run.stdout.split("\n")[-4:-3] == by_log.stdout.split("\n")[-4:-3]
    assert directory_bytes(run.directory.path) == before


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("log", "ls"), "segments"),
        (("log", "stats"), "groups"),
        (("log", "verify"), "sound"),
        (("plan",), "report"),
        (("audit",), "holds"),
    ],
)
def test_json_is_one_document(run_path: str, command: tuple[str, ...], key: str):
    result = _kinlog(*command, run_path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)[key]


def test_audit_lists_everything_redone_when_asked(run_path: str):
    assert "rows_missing" in _kinlog("audit", run_path, "--list").stdout.split("HOLDS")[0]
    listed = json.loads(_kinlog("audit", run_path, "--list", "--json").stdout)
    assert {(one["reason"], one["with_group"]) for one in listed["given_up"]} == {
        ("rows_missing", False),
        ("controller_restart", False),
        ("evicted", True),
    }
    assert "given_up" not in json.loads(_kinlog("audit", run_path, "--json").stdout)


def test_show_as_json_is_one_object_a_line(run_path: str):
    shown = [json.loads(line) for line in _kinlog("log", "show", run_path, "--json").stdout.splitlines()]
    assert [event["seq"] for event in shown] == list(range(1, len(shown) + 1))
    assert shown[0]["kind"] == "run_opened"


def test_show_selects_by_every_option(run_path: str):
    def seqs(*options: str) -> list[int]:
        lines = _kinlog("log", "show", run_path, "--json", *options).stdout.splitlines()
        return [json.loads(line)["seq"] for line in lines]

    everything = seqs()
    assert seqs("--from", "5", "--to", "9") == [5, 6, 7, 8, 9]
    assert seqs("--epoch", "1") + seqs("--epoch", "2") == everything
    assert len(seqs("--kind", "sibling_sealed")) == 8
    assert len(seqs("--reason", "controller_restart", "--kind", "attempt_superseded")) == 2
    assert len(seqs("--step", "1", "--kind", "group_claimed")) == 2
    assert set(seqs("--group", "2", "--generation", "0")) < set(seqs("--group", "2"))


@pytest.mark.parametrize(("option", "known"), [("--kind", "sibling_sealed"), ("--reason", "timeout")])
def test_an_unknown_name_is_refused_with_those_there_are(run_path: str, option: str, known: str):
    result = _kinlog("log", "show", run_path, option, "nothing_such")
    assert result.exit_code == 2
    assert "nothing_such" in result.stderr
    assert known in result.stderr


@pytest.mark.parametrize("command", INSPECTION)
def test_a_path_without_a_run_is_one_clear_line(tmp_path: Path, command: tuple[str, ...]):
    result = _kinlog(*command, str(tmp_path / "absent"))
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("kinlog: error [run_not_found]: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", INSPECTION)
def test_a_damaged_log_is_refused_with_the_place(run: DiskRun, run_path: str, command: tuple[str, ...]):
    offset_bytes = _damage(run)
    result = _kinlog(*command, run_path)
    assert result.exit_code == LogDamagedError.exit_code == 6
    assert "kinlog: error [log_damaged]: " in result.stderr
    for words in (segment_name(1, 0), f"byte {offset_bytes}", "expected", "found"):
        assert words in result.stderr


def test_verify_tells_the_story_of_a_damaged_log_too(run: DiskRun, run_path: str):
    offset_bytes = _damage(run)
    text = _kinlog("log", "verify", run_path).stdout
    assert "DAMAGED" in text
    assert f"at byte {offset_bytes}" in text
    assert segment_name(2, 0) in text
    assert "step_000001" in text
    document = json.loads(_kinlog("log", "verify", run_path, "--json").stdout)
    assert document["sound"] is False
    assert document["damage"]["offset_bytes"] == offset_bytes


def test_verify_and_audit_refuse_an_impossible_story(run: DiskRun, run_path: str):
    opened = reopened(run.directory.log)
    append_now(opened, StepApplied(train_step=2, group_ids=(0,)))
    opened.close()
    verified, audited = _kinlog("log", "verify", run_path), _kinlog("audit", run_path)
    assert verified.exit_code == 11
    assert "IMPOSSIBLE" in verified.stdout
    assert audited.exit_code == 1
    assert "DOES NOT HOLD: " in audited.stdout
    assert "1 group trained on twice" in audited.stdout


def test_verify_says_when_a_committed_checkpoint_cannot_be_used(run: DiskRun, run_path: str):
    (run.directory.checkpoints / "step_000001" / "projection.zst").write_bytes(b"other")
    result = _kinlog("log", "verify", run_path)
    assert result.exit_code == 13
    assert "projection.zst: expected" in result.stdout


def test_plan_uses_the_choices_and_the_sampler_of_the_runs_configuration(run: DiskRun, run_path: str):
    without = _kinlog("plan", run_path).stdout
    assert "staleness was not judged" in without
    run.directory.config.write_text(_CONFIG)
    assert "staleness was not judged" not in _kinlog("plan", run_path).stdout
    discarding = json.loads(_kinlog("plan", run_path, "--future-weights", "discard", "--json").stdout)
    assert discarding["report"]["checkpoint"] == "step_000001"
    run.directory.config.write_text(_CONFIG + "rollout_recovry: {}\n")
    misspelt = _kinlog("plan", run_path)
    assert misspelt.exit_code == 2
    assert "did you mean 'rollout_recovery'" in misspelt.stderr


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("log",),
        ("log", "ls"),
        ("log", "stats"),
        ("log", "show"),
        ("log", "verify"),
        ("plan",),
        ("audit",),
        ("train",),
    ],
)
def test_help_has_an_example(command: tuple[str, ...]):
    result = _kinlog(*command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout or command in ((), ("log",))
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_help_states_every_exit_code_once():
    codes = [
        int(line.split()[0])
        for line in _kinlog("--help").stdout.split("Exit codes")[1].splitlines()
        if line.strip()
    ]
    raised = {getattr(errors, name).exit_code for name in errors.__all__}
    assert codes == sorted(set(codes))
    assert raised <= set(codes)


# ---- train ------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(_CONFIG)
    return path


def _launch(monkeypatch: pytest.MonkeyPatch, train: object) -> None:
    module = ModuleType("kinlog.controller.launch")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_train_passes_its_arguments_on_and_returns_the_status(monkeypatch: pytest.MonkeyPatch, config: Path):
    calls: list[object] = []

    def train(path: Path, **choices: object) -> int:
        calls.append((path, choices))
        return 21

    _launch(monkeypatch, train)
    assert _kinlog("train", str(config)).exit_code == 21
    assert _kinlog("train", str(config), "--resume", "--run-dir", "here").exit_code == 21
    assert _kinlog("train", str(config), "--resume", "--checkpoint", "start").exit_code == 21
    assert _kinlog("train", str(config), "--resume", "--discard-rollouts").exit_code == 21
    assert _kinlog("train", str(config), "--engine", "vllm").exit_code == 21
    assert _kinlog("train", str(config), "--quiet").exit_code == 21
    nothing = {
        "resume": False,
        "run_dir": None,
        "checkpoint": None,
        "discard_rollouts": False,
        "engine": None,
        "quiet": False,
    }
    assert calls == [
        (config, nothing),
        (config, nothing | {"resume": True, "run_dir": Path("here")}),
        (config, nothing | {"resume": True, "checkpoint": "start"}),
        (config, nothing | {"resume": True, "discard_rollouts": True}),
        (config, nothing | {"engine": "vllm"}),
        (config, nothing | {"quiet": True}),
    ]


@pytest.mark.parametrize("choice", [("--checkpoint", "step_000001"), ("--discard-rollouts",)])
def test_choices_about_a_restart_are_wrong_usage_for_a_new_run(config: Path, choice: tuple[str, ...]):
    result = _kinlog("train", str(config), *choice)
    assert result.exit_code == 2
    assert "goes with --resume" in result.stderr


def test_an_error_of_the_run_ends_with_its_exit_code(monkeypatch: pytest.MonkeyPatch, config: Path):
    def train(path: Path, **choices: object) -> int:
        raise RunExistsError("there is one already")

    _launch(monkeypatch, train)
    result = _kinlog("train", str(config))
    assert result.exit_code == 4
    assert result.stderr == "kinlog: error [run_exists]: there is one already (kinlog explain run_exists)\n"


def test_a_bug_is_not_dressed_up_as_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch, config: Path):
    def train(path: Path, **choices: object) -> int:
        raise KeyError("bug")

    _launch(monkeypatch, train)
    assert isinstance(_kinlog("train", str(config)).exception, KeyError)


def test_a_file_that_cannot_be_read_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, config: Path):
    def train(path: Path, **choices: object) -> int:
        raise PermissionError(13, "Permission denied", "/somewhere/segment")

    _launch(monkeypatch, train)
    result = _kinlog("train", str(config))
    assert (result.exit_code, result.stderr) == (
        1,
        "kinlog: error [io]: /somewhere/segment: Permission denied (kinlog explain io)\n",
    )


def test_a_misspelt_key_is_told_before_the_training_stack_is_imported(
    monkeypatch: pytest.MonkeyPatch, config: Path
):
    monkeypatch.setitem(sys.modules, "kinlog.controller.launch", None)
    config.write_text(_CONFIG + "trainr: {}\n")
    result = _kinlog("train", str(config))
    assert result.exit_code == 2
    assert "did you mean 'trainer'" in result.stderr


# ---- real processes ---------------------------------------------------------------------------------------------


def _process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{code}\nfrom kinlog.controller.cli import main\nmain()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


_WITHOUT_TRAINING_STACK = f"import sys\nsys.modules.update(dict.fromkeys({_TRAINING_STACK!r}))"


@pytest.mark.parametrize("command", [("log", "ls"), ("log", "verify"), ("plan",), ("audit",)])
def test_inspection_works_without_the_training_stack(run_path: str, command: tuple[str, ...]):
    result = _process(_WITHOUT_TRAINING_STACK, *command, run_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_training_without_the_training_stack_names_the_extra(config: Path):
    result = _process(_WITHOUT_TRAINING_STACK, "train", str(config))
    assert result.returncode == 20
    assert 'pip install "kinlog[train]"' in result.stderr
    assert "Traceback" not in result.stderr


def test_process_that_starts_a_run_imports_neither_torch_nor_the_data_plane():
    # It would be seconds of every start, on the way to everything else.
    code = "import sys, kinlog.controller.launch; print(sorted({'torch', 'tensordict', 'transformers'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_reader_that_goes_away_is_no_traceback(run_path: str):
    code = "from kinlog.controller.cli import main; main()"
    shown = subprocess.Popen(
        [sys.executable, "-c", code, "log", "show", run_path, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert shown.stdout is not None
    assert shown.stderr is not None
    shown.stdout.close()
    with shown.stderr:
        assert shown.stderr.read() == ""
    shown.wait(60)
