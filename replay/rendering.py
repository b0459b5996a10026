"""Showing what kinlog records: as JSON with every field named, or as one line of text."""

from enum import Enum
from pathlib import PurePath
from typing import TypeAlias

import msgspec

from kinlog.replay.plain_text import format_clock, utc_time
from kinlog.schemas.events import Event, RecordedEvent, kind_of
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.receipts import Receipt

__all__ = ["JsonValue", "to_json_value", "event_object", "event_line", "LINE_COLUMNS"]

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

#: The fields that say which sibling an event is about: shown in one column.
_IDENTITY = ("group_id", "generation", "attempt")

#: The titles of what :func:`event_line` returns.
LINE_COLUMNS = f"{'seq':>8}  {'epoch':>5}  {'time (UTC)':<12}  {'kind':<20}  {'sibling':<14}  fields"


def to_json_value(value: object) -> JsonValue:
    """Return a value as JSON can hold it: structs as objects with their fields named, digests and bytes as hex.

    Raises
    ------
    TypeError
        The value has a type that kinlog does not record.
    """
    if value is None or isinstance(value, bool | int | float) or type(value) is str:
        return value
    if isinstance(value, Enum):
        return to_json_value(value.value)
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, msgspec.Struct):
        return {name: to_json_value(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(to_json_value(key)): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    raise TypeError(f"cannot show a {type(value).__name__} as JSON")


def event_object(record: RecordedEvent) -> dict[str, JsonValue]:
    """Return an event as a JSON object: ``seq``, ``epoch``, ``time`` (ISO 8601, UTC), ``kind``, then its own fields."""
    event = record.event
    return {
        "seq": record.seq,
        "epoch": record.epoch,
        "time": utc_time(record.time_us).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "kind": kind_of(type(event)),
        **{name: to_json_value(getattr(event, name)) for name in event.__struct_fields__},
    }


def event_line(record: RecordedEvent) -> str:
    """Return an event as one line of text, under ``LINE_COLUMNS``. Long fields are abbreviated: JSON has them whole."""
    event = record.event
    fields = "  ".join(
        f"{name}={_brief(getattr(event, name))}"
        for name in event.__struct_fields__
        if name not in _IDENTITY and getattr(event, name) not in (None, "")
    )
    return (
        f"{record.seq:>8}  {record.epoch:>5}  {format_clock(record.time_us):<12}  "
        f"{kind_of(type(event)):<20}  {_identity(event):<14}  {fields}"
    ).rstrip()


def _identity(event: Event) -> str:
    parts = [
        f"{letter}{getattr(event, name)}"
        for letter, name in zip("gsa", _IDENTITY, strict=True)
        if name in event.__struct_fields__
    ]
    return ".".join(parts)


def _brief(value: object) -> str:
    """Abbreviate one field's value to a few words."""
    if isinstance(value, Receipt):
        return f"{len(value.calls)} call{'' if len(value.calls) == 1 else 's'}"
    if isinstance(value, bytes):
        return value.hex()[:8]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, PromptRef):
        return f'("{value.sample_id}" of {value.task_name}, for {value.agent_name}, draw {value.draw_index})'
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        return "(" + " ".join(f"{name}={_brief(getattr(value, name))}" for name in names) + ")"
    if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        return f"{len(value)} entries"
    if isinstance(value, tuple):
        shown = ",".join(str(item) for item in value[:8])
        return f"[{shown}{f',+{len(value) - 8} more' if len(value) > 8 else ''}]"
    text = str(value)
    return f'"{text}"' if " " in text else text
