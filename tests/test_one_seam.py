"""Everything that kinlog writes goes through ``lineage/store.py``: what is tested there, with faults and crashes, is all there is.

Payload files that the trainer writes with its own library are the exception: whoever commits the checkpoint makes them
durable through the store. The data plane's are written by TransferQueue itself, out of sight here. What vLLM is handed, a
model to start with and weights in memory, is gone as soon as it has been read.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "lineage", "replay", "controller", "workers")
SEAM = "lineage/store.py"

PAYLOAD = {
    "workers/trainer.py": {"mkdir", "save_file", "write_bytes"},
    "workers/vllm_start.py": {"tempfile.TemporaryDirectory"},
    "workers/vllm_weights.py": {"os.memfd_create", "os.close", "open"},
}
"""Files that write payload, and the calls that they do it with."""

#: Modules whose functions change files, and what of them only looks.
MODULES = {
    "os": {
        "_exit",
        "access",
        "pidfd_open",
        "getpid",
        "listdir",
        "path",
        "environ",
        "cpu_count",
        "kill",
        "stat",
        "fspath",
        "getenv",
        "killpg",
    },
    "shutil": {"get_terminal_size", "disk_usage", "which"},
    "tempfile": set(),
    "fcntl": set(),
}
METHODS = {"write_text", "write_bytes", "touch", "mkdir", "unlink", "rmdir", "symlink_to", "hardlink_to"}
LIBRARIES = {
    "save_file",
    "OSFile",
    "write_table",
    "write_feather",
    "write_dataset",
    "write_csv",
    "memory_map",
}


def breaches(source: str) -> list[tuple[int, str]]:
    """Line and name of each call that writes, renames, removes or syncs files."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [(call.lineno, name) for call in calls if (name := _breach(call)) is not None]


def _breach(call: ast.Call) -> str | None:
    function = call.func
    if isinstance(function, ast.Name):
        writes = function.id in LIBRARIES or (function.id == "open" and _writes(call, place=1))
        return function.id if writes else None
    if not isinstance(function, ast.Attribute):
        return None
    owner, name = ast.unparse(function.value), function.attr
    if owner.partition(".")[0] in MODULES:
        return None if owner != owner.partition(".")[0] or name in MODULES[owner] else f"{owner}.{name}"
    if owner.rpartition(".")[2].removeprefix("_") == "store":
        return None
    path_like = name == "rename" or (name == "replace" and len(call.args) == 1 and not call.keywords)
    opened = name == "open" and _writes(call, place=0)
    return (
        name
        if name in METHODS | LIBRARIES or path_like or opened or ast.unparse(function) == "torch.save"
        else None
    )


def _writes(call: ast.Call, *, place: int) -> bool:
    """Whether an ``open`` is for writing: its mode is the argument at ``place``, or by name."""
    modes = [*call.args[place : place + 1], *(k.value for k in call.keywords if k.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)


def product_files() -> list[str]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


@pytest.mark.parametrize("file", [file for file in product_files() if file != SEAM])
def test_no_file_is_written_renamed_removed_or_synced_but_through_the_store(file: str):
    found = breaches((ROOT / file).read_text(encoding="utf-8"))
    assert [(line, name) for line, name in found if name not in PAYLOAD.get(file, ())] == []


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "path.open('x')",
        "path.write_text('x')",
        "path.rename(other)",
        "path.replace(other)",
        "os.replace(a, b)",
        "os.fsync(1)",
        "shutil.rmtree(path)",
        "tempfile.mkdtemp()",
        "torch.save(state, path)",
        "save_file(tensors, path)",
        "pa.OSFile(path)",
    ],
)
def test_each_way_around_the_store_is_seen(source: str):
    assert breaches(source)


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'rb')",
        "text.replace('a', 'b')",
        "store.rename(a, b)",
        "self._store.rename(a, b)",
        "os.getpid()",
        "os.environ.get('x')",
        "msgspec.structs.replace(settings, name=1)",
    ],
)
def test_what_only_reads_is_not_taken_for_writing(source: str):
    assert breaches(source) == []


def test_payload_exceptions_are_still_needed():
    for file, names in PAYLOAD.items():
        assert {name for _, name in breaches((ROOT / file).read_text(encoding="utf-8"))} == names
