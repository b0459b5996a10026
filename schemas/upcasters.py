"""Reading events of past versions: each upcaster is a pure function from the fields of version n to those of n + 1.

A chain of them brings any past version to the present one. None is ever removed: logs of every version stay readable.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

__all__ = ["Fields", "Upcaster", "PastVersion", "PAST_VERSIONS", "upcast"]

Fields: TypeAlias = dict[str, object]
Upcaster: TypeAlias = Callable[[Fields], Fields]


class PastVersion:
    """A version of an event that is no longer written: its payload's field names, and the step to the next version."""

    __slots__ = ("payload_fields", "step")

    def __init__(self, payload_fields: tuple[str, ...], step: Upcaster) -> None:
        self.payload_fields = payload_fields
        self.step = step


def _finalize_failed_1(fields: Fields) -> Fields:
    """Version 1 counted no failed finalize against any budget."""
    return {**fields, "charged": False}


#: (kind, version) -> how to read it.
PAST_VERSIONS: Mapping[tuple[str, int], PastVersion] = {
    ("finalize_failed", 1): PastVersion(("detail",), _finalize_failed_1),
}


def upcast(
    kind: str,
    version: int,
    current: int,
    fields: Fields,
    past: Mapping[tuple[str, int], PastVersion] = PAST_VERSIONS,
) -> Fields:
    """Bring an event's fields from ``version`` to ``current``, one step at a time."""
    for step_version in range(version, current):
        fields = past[kind, step_version].step(fields)
    return fields
