"""The interpreter of the generation workers: found before a cluster is started, or refused."""

import sys
from pathlib import Path

import pytest

from kinlog.controller.worker_interpreter import worker_interpreter
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import GenerationSettings


def test_without_a_setting_it_is_the_runs_own():
    assert worker_interpreter(GenerationSettings()) is None


def test_link_of_an_environment_is_kept_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    found = worker_interpreter(GenerationSettings(python="bin/python"))
    assert found == str(tmp_path / "bin" / "python")


@pytest.mark.parametrize("name", ["missing/python", "directory", "text"])
def test_what_is_no_program_is_refused(tmp_path: Path, name: str):
    (tmp_path / "directory").mkdir()
    (tmp_path / "text").touch()
    with pytest.raises(ConfigError, match=rf"generation.python: .*no program at {tmp_path / name}"):
        worker_interpreter(GenerationSettings(python=str(tmp_path / name)))
