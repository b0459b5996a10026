"""The base install, as on a login node: without the training stack, everything that reads a run works."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from kinlog_e2e import COMMAND_TIMEOUT_S, digests_of, run_kinlog
from kinlog_run_fixtures import small_run

_PYTHON = Path(os.environ.get("KINLOG_BASE_PYTHON", ".venv-base/bin/python"))
_ROOT = Path(__file__).parents[2]
_TRAINING_STACK = (
    "ray",
    "torch",
    "transfer_queue",
    "tensordict",
    "transformers",
    "safetensors",
    "reasoning_gym",
    "vllm",
)
_CONFIG = """\
dataset:
  tasks:
    - {name: sums, generator: basic_arithmetic, agent: single}
"""

INSPECTION = [
    ("log", "ls"),
    ("log", "stats"),
    ("log", "show"),
    ("log", "verify"),
    ("plan",),
    ("audit",),
    ("at", "--step", "1"),
    ("examples", "--step", "1", "--text"),
]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment that has kinlog without extras."""
    # Not resolved: the link is what makes it this environment's interpreter.
    python = _ROOT / _PYTHON
    if not python.exists():
        reason = f"{python} does not exist: run `make unit`, or set KINLOG_BASE_PYTHON"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, killed in its second life."""
    made = small_run(tmp_path_factory.mktemp("base") / "run")
    made.kill()
    made.directory.config.write_text(_CONFIG)
    return made.directory.path


def evaluated(python: Path, code: str, cwd: Path) -> str:
    """Run code by that interpreter, and return what it prints."""
    done = subprocess.run(
        [str(python), "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_base_install_has_no_training_stack(python: Path, tmp_path: Path):
    code = (
        "import importlib.util\n"
        f"print([name for name in {_TRAINING_STACK!r} if importlib.util.find_spec(name) is not None])"
    )
    assert evaluated(python, code, tmp_path) == "[]\n"


@pytest.mark.parametrize("package", ["kinlog.schemas", "kinlog.lineage", "kinlog.replay"])
def test_package_is_imported_without_the_training_stack(python: Path, tmp_path: Path, package: str):
    code = (
        "import importlib, pkgutil\n"
        f"package = importlib.import_module({package!r})\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        f"    importlib.import_module({package!r} + '.' + module.name)\n"
        "print(package.__name__)"
    )
    assert evaluated(python, code, tmp_path) == f"{package}\n"


@pytest.mark.parametrize("command", INSPECTION, ids=" ".join)
def test_inspection_command_works_and_changes_nothing(python: Path, run: Path, command: tuple[str, ...]):
    before = digests_of(run)
    text = run_kinlog(*command, str(run), python=python)
    assert (text.returncode, text.stderr) == (0, "")
    assert len(text.stdout.splitlines()) > 3
    as_json = run_kinlog(*command, str(run), "--json", python=python)
    assert (as_json.returncode, as_json.stderr) == (0, "")
    lines = as_json.stdout.splitlines() if command == ("log", "show") else [as_json.stdout]
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert digests_of(run) == before


def test_base_install_says_the_same_as_a_full_one(python: Path, run: Path):
    for command in (("log", "stats"), ("log", "show"), ("audit",)):
        by_base, by_full = run_kinlog(*command, str(run), python=python), run_kinlog(*command, str(run))
        assert by_base.stdout == by_full.stdout


def test_training_says_which_extra_to_install(python: Path, tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(_CONFIG)
    before = digests_of(tmp_path)
    result = run_kinlog("train", str(config), "--run-dir", str(tmp_path / "run"), python=python)
    assert result.returncode == 20
    assert result.stderr.startswith("kinlog: error [missing_extra]: ")
    assert 'pip install "kinlog[train]"' in result.stderr
    assert result.stderr.count("\n") == 1
    assert digests_of(tmp_path) == before
