"""The runbook has a section for every error, every message leads to its section, and ``kinlog explain`` prints it."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kinlog.controller.cli import cli
from kinlog.controller.explain_command import RUNBOOK, runbook_sections
from kinlog.schemas import errors
from kinlog.schemas.errors import KinlogError

ROOT = Path(__file__).parents[2]
TEXT = RUNBOOK.read_text(encoding="utf-8")
SECTIONS = runbook_sections(TEXT)
SYMPTOMS = runbook_sections(TEXT.partition("\n## Codes\n")[0])
#: Of every error class, and of the errors of the operating system.
CODES = {
    getattr(errors, name).code: getattr(errors, name) for name in errors.__all__ if name != "KinlogError"
}


def _kinlog(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_every_code_has_a_section_and_every_section_is_a_code_or_a_symptom():
    assert set(SECTIONS) - set(SYMPTOMS) == set(CODES) | {"io"}
    assert len(SYMPTOMS) >= 10


@pytest.mark.parametrize("code", [*CODES, "io"])
def test_section_of_a_code_says_what_why_what_to_check_what_to_do_and_what_is_never_lost(code: str):
    said = re.findall(r"^\*\*(.+?)\.\*\*", SECTIONS[code], re.MULTILINE)
    assert said == ["Means", "Why", "Check", "Do", "Never lost"]
    exit_code = CODES[code].exit_code if code in CODES else 1
    assert f"Exit code {exit_code}." in SECTIONS[code]


@pytest.mark.parametrize("error", CODES.values(), ids=CODES)
def test_message_on_the_command_line_leads_to_the_section(
    error: type[KinlogError], monkeypatch: pytest.MonkeyPatch
):
    def fail(path: Path) -> None:
        raised = error.__new__(error)  # some take what they name, and the message is not what is tried
        raised.args = ("what went wrong",)
        raise raised

    monkeypatch.setattr("kinlog.controller.inspection_commands.locate_run", fail)
    result = _kinlog("log", "stats", "runs/first")
    assert result.exit_code == error.exit_code
    assert result.stderr == f"kinlog: error [{error.code}]: what went wrong (kinlog explain {error.code})\n"
    explained = _kinlog("explain", error.code)
    assert (explained.exit_code, explained.stdout) == (0, SECTIONS[error.code])


def test_explain_lists_what_there_is_and_names_it_when_asked_for_something_else():
    assert _kinlog("explain").stdout.split() == list(SECTIONS)
    assert json.loads(_kinlog("explain", "--json").stdout) == list(SECTIONS)
    refused = _kinlog("explain", "nothing_such")
    assert refused.exit_code == 2
    assert "log_damaged" in refused.stderr


def test_explain_takes_a_code_with_its_brackets_and_a_symptom_and_prints_json():
    assert _kinlog("explain", "[io]").stdout == SECTIONS["io"]
    found = json.loads(_kinlog("explain", "disk-is-full", "--json").stdout)
    assert found == {"code": "disk-is-full", "text": SECTIONS["disk-is-full"]}


def test_runbook_is_installed_with_kinlog():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "kinlog.docs" in setuptools["packages"]
    assert setuptools["package-dir"]["kinlog.docs"] == RUNBOOK.parent.relative_to(ROOT).as_posix()
    assert RUNBOOK.name in setuptools["package-data"]["kinlog.docs"]
