"""Every command that the documents show is executed, as it is written there.

Commands on runs are executed on small prepared ones, under the names that the documents use, and print what is shown but
for the figures. Of ``kinlog train`` and ``kinlog demo`` the training itself is left out, since it takes minutes and a
cluster: options and configuration are read for real, and ``ELSEWHERE`` says what executes the rest.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import kinlog_documented_runs
import pytest
from click.testing import CliRunner

import kinlog.controller.cli
from kinlog.controller import ctrl_c
from kinlog.controller.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: A command may go on in the next lines, inside of quotes. What follows it is its output.
_COMMAND = re.compile(r'^\$ ((?:[^"\n]|"[^"]*")*)\n((?:(?!\$ ).*\n)*)', re.MULTILINE)
#: What is left of the figures in a line of output.
_LABEL = re.compile(r"^ *([A-Za-z=+][A-Za-z=+() ]*?) {2,}\S", re.MULTILINE)
#: Page -> blocks of commands, each with the output that is shown.
COMMANDS = {
    page.relative_to(ROOT).as_posix(): [
        _COMMAND.findall(block) for block in _CONSOLE.findall(page.read_text(encoding="utf-8"))
    ]
    for page in PAGES
}
#: Commands whose exit code says something: two runs that were not trained on the same.
EXIT_CODES = {"kinlog diff runs/first runs/second": 1}
#: Commands whose work is left out, and options of theirs: where it is done.
ELSEWHERE = {
    "train": "tests/e2e/test_crash_and_resume.py",
    "--run-dir": "tests/e2e/test_crash_and_resume.py",
    "--resume": "tests/e2e/test_crash_and_resume.py",
    "--checkpoint": "tests/controller/test_restarts.py",
    "--discard-rollouts": "tests/conformance/test_reasons.py",
    "--engine": "tests/vllm/test_vllm_run.py",
    "demo": ".ci/run",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("documented")
    # In a process of its own, which is gone when the commands look for it.
    subprocess.run([sys.executable, kinlog_documented_runs.__file__, str(directory)], check=True)
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    configuration = re.findall(r"^```yaml\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)[0]
    (directory / "run.yaml").write_text(configuration, encoding="utf-8")
    return directory


class TrainingLeftOut:
    """Stands for the runtime's modules, whose work takes minutes."""

    def train(self, config: Path, **choices: object) -> int:
        return 0

    def run_demo(self, run_dir: Path, **choices: object) -> None:
        return None


def words_of(line: str) -> list[str]:
    """The words of a command, up to a pipe or a redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>;")
    lexer.whitespace_split = True
    words = list(lexer)
    ends = [place for place, word in enumerate(words) if word in ("|", ">", ";")]
    return words[: ends[0]] if ends else words


def execute(line: str, shown: str) -> None:
    program, *arguments = words_of(line)
    if program == "make":
        assert re.search(rf"^{arguments[-1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif program == "pip":
        extras = re.findall(r"\[(.*)\]", arguments[-1])
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(",".join(extras).split(",")) - {""} <= set(project["optional-dependencies"])
    elif program == "kinlog":
        result = CliRunner().invoke(cli, arguments)
        wanted = EXIT_CODES.get(" ".join(words_of(line)), 0)
        assert result.exit_code == wanted, (line, result.output, result.exception)
        if arguments[0] not in ELSEWHERE:
            assert result.stdout, line
            assert {label for label in _LABEL.findall(shown) if label not in result.stdout} == set(), line
    else:
        raise AssertionError(f"nobody executes: {line}")


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("page", [page for page, blocks in COMMANDS.items() if blocks])
def test_commands_of_a_page_do_what_they_are_shown_for(
    page: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kinlog.controller.cli, "_runtime", lambda module: TrainingLeftOut())
    monkeypatch.setattr(ctrl_c.time, "sleep", interrupt)  # what follows a log is ended as by Ctrl-C
    for number, block in enumerate(COMMANDS[page]):
        directory = tmp_path / str(number)
        shutil.copytree(prepared, directory)
        monkeypatch.chdir(directory)
        for line, shown in block:
            execute(line, shown)


def test_work_that_is_left_out_is_done_elsewhere():
    lines = [words_of(line) for blocks in COMMANDS.values() for block in blocks for line, _ in block]
    left_out = [words[1:] for words in lines if words[0] == "kinlog" and words[1] in ELSEWHERE]
    options = {word for words in left_out for word in words if word.startswith("-")}
    assert {words[0] for words in left_out} | options == set(ELSEWHERE)
    for name, file in ELSEWHERE.items():
        assert name.removeprefix("--").partition("-")[0] in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", COMMANDS)
def test_no_command_of_a_page_is_passed_over(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = [line for block in _CONSOLE.findall(text) for line in block.splitlines() if line.startswith("$ ")]
    assert len(shown) == sum(len(block) for block in COMMANDS[page])
    assert re.findall(r"^(?:\$| {4})\s*(?:kinlog|make|pip) .*$", _CONSOLE.sub("", text), re.MULTILINE) == []


def test_documents_show_every_command_there_is():
    lines = [words_of(line) for blocks in COMMANDS.values() for block in blocks for line, _ in block]
    shown = {tuple(words[1:3]) for words in lines if words[0] == "kinlog"}
    missing = [
        (name, sub)
        for name, command in cli.commands.items()
        for sub in (command.commands if isinstance(command, click.Group) else [None])
        if not any(words[:1] == (name,) and (sub is None or words[1:] == (sub,)) for words in shown)
    ]
    assert missing == []
