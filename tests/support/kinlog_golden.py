"""Golden logs: where they are, what they must amount to, and the reader that knows nothing of kinlog."""

import importlib.util
import json
import sys
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

GOLDEN = Path(__file__).parents[1] / "golden"
READER_PATH = GOLDEN / "independent_reader.py"

#: Every golden log, as ``v1/whole_run``. What must be refused has a refusal instead of events and a projection.
ALL = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*/log"))
READABLE = [name for name in ALL if (GOLDEN / name / "events.jsonl").exists()]
REFUSED = [name for name in ALL if (GOLDEN / name / "refusal.json").exists()]

#: What fields that a later version added hold for a log that was written before them: the one way in which what is read
#: today may differ from what was committed with a golden log. Numbers in a path are ``*``.
LATER_FIELDS: dict[str, object] = {
    "checkpoint_committed.duration_us": None,
    "checkpoint_committed.held_us": None,
    "finalize_failed.charged": False,
    "group_reserved.retry_budget.*": None,
    "projection.groups.*.finalize_failures": 0,
    "projection.groups.*.retry_budget.*": None,
    "projection.groups.*.rolled_back": False,
    "projection.groups.*.siblings.*.restarts": 0,
    "projection.groups.*.siblings.*.resumed_from": 0,
    "projection.groups.*.siblings.*.rolled_back_to": None,
    "projection.groups.*.siblings.*.sealed.resumed_tokens": 0,
    "projection.resumed_tokens_total": 0,
    "sibling_dispatched.resumes_attempt": None,
    "sibling_sealed.resumed_tokens": 0,
}

#: The same for single places, where the new field counts something that had happened.
LATER_VALUES: dict[tuple[str, str], object] = {
    ("v1/whole_run", "projection.groups.6.siblings.0.restarts"): 1,
    ("v1/whole_run", "projection.groups.6.siblings.1.restarts"): 1,
    **{
        (name, f"projection.groups.{sibling}.rolled_back_to"): version
        for name, version, siblings in (
            ("v1/extremes", 2**63 - 1, "0.siblings.0 1.siblings.0 1.siblings.1 2.siblings.0"),
            ("v1/whole_run", 1, "2.siblings.0 2.siblings.1 2.siblings.2 5.siblings.0 5.siblings.1"),
        )
        for sibling in siblings.split()
    },
}


def _load_reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("independent_reader", READER_PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reader = _load_reader()


def log_path(name: str) -> Path:
    return GOLDEN / name / "log"


def expected_events(name: str) -> list[dict[str, Any]]:
    lines = (GOLDEN / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def expected_story(name: str) -> dict[str, Any]:
    """The end of the log, what is torn or fenced, and the projection."""
    story: dict[str, Any] = json.loads((GOLDEN / name / "projection.json").read_text(encoding="utf-8"))
    return story


def expected_refusal(name: str) -> dict[str, Any]:
    refusal: dict[str, Any] = json.loads((GOLDEN / name / "refusal.json").read_text(encoding="utf-8"))
    return refusal


def as_data(value: object) -> Any:
    """A struct, or what the independent reader gives, as JSON has it: bytes as ``{"hex": ...}``."""
    return _hexed(msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=True))


def _hexed(value: object) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: _hexed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hexed(item) for item in value]
    return value


def differences(name: str, path: str, expected: Any, found: Any) -> list[str]:
    """Every place where what is read of a golden log differs from what was committed, beyond the later fields."""
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = [(key, expected.get(key, _ABSENT), found.get(key, _ABSENT)) for key in {**expected, **found}]
    elif isinstance(expected, list) and isinstance(found, list):
        both = zip_longest(expected, found, fillvalue=_ABSENT)
        pairs = [(str(place), then, now) for place, (then, now) in enumerate(both)]
    else:
        # repr: -0.0 is not 0.0, and True is not 1.
        same = repr(expected) == repr(found)
        return [] if same else [f"{path}: expected {expected!r:.200}, found {found!r:.200}"]
    told = []
    for key, then, now in pairs:
        inner = f"{path}.{key}"
        if now is _ABSENT:
            told.append(f"{inner} is gone")
        elif then is _ABSENT:
            told += _added(name, inner, now)
        else:
            told += differences(name, inner, then, now)
    return told


_ABSENT = object()


def _added(name: str, path: str, value: object) -> list[str]:
    general = ".".join("*" if part.lstrip("-").isdigit() else part for part in path.split("."))
    known = LATER_VALUES.get((name, path), LATER_FIELDS.get(general, _ABSENT))
    if repr(known) == repr(value):
        return []
    return [f"{path} was added, and is {value!r:.200}: neither LATER_FIELDS nor LATER_VALUES says so"]
