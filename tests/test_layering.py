"""Dependencies point one way, and a log can be inspected where there is no training stack."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kinlog.lineage
import kinlog.replay
import kinlog.schemas

TRAINING_STACK = ("ray", "torch", "vllm", "tensordict", "transfer_queue", "transformers")
CONTRACTS = Path(__file__).parent.parent / ".importlinter"

IMPORT_WITHOUT = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not here")

sys.meta_path.insert(0, Blocked())
for name in {blocked!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"{{name}} was not blocked")
for name in {modules!r}:
    importlib.import_module(name)
"""


def modules_of(package) -> list[str]:
    found = [package.__name__]
    return found + [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


def test_schemas_lineage_and_replay_import_without_the_training_stack():
    modules = [name for p in (kinlog.schemas, kinlog.lineage, kinlog.replay) for name in modules_of(p)]
    assert {"kinlog.schemas.events", "kinlog.lineage.log", "kinlog.replay.recovery.planning"} <= set(modules)
    code = IMPORT_WITHOUT.format(blocked=TRAINING_STACK, modules=modules)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert child.returncode == 0, child.stderr


def test_every_import_keeps_the_contracts_of_the_layers():
    pytest.importorskip("importlinter.cli", reason="import-linter is a development dependency")
    # In a process of its own: it disables every logger that there is.
    code = f"import sys; from importlinter.cli import lint_imports as lint; sys.exit(lint({str(CONTRACTS)!r}, no_cache=True))"
    checked = subprocess.run(
        [sys.executable, "-c", code], cwd=CONTRACTS.parent, capture_output=True, check=False, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
