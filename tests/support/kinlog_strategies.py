"""Hypothesis strategies for events, derived from the types of their own fields."""

import types
import typing
from enum import Enum
from typing import Any, Union

import msgspec
from hypothesis import strategies as st

from kinlog.schemas.events import EVENT_TYPES, Event
from kinlog.schemas.prompts import DIGEST_BYTES

_INT32 = st.integers(-(2**31), 2**31 - 1)
_INT64 = st.integers(-(2**63), 2**63 - 1)
#: Columns of 32 bits; every other integer of an event takes 64.
_NARROW = {"generation", "attempt"}


def _of(annotation: Any, name: str = "") -> st.SearchStrategy[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
    if origin is tuple:
        return st.lists(_of(typing.get_args(annotation)[0]), max_size=4).map(tuple)
    if origin in (types.UnionType, Union):
        return st.one_of(
            *(st.none() if a is type(None) else _of(a, name) for a in typing.get_args(annotation))
        )
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _struct(annotation)
    if annotation is bool:
        return st.booleans()
    if annotation is float:
        return st.floats(allow_nan=False)
    if annotation is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    if annotation is int:
        return _INT32 if name in _NARROW else _INT64
    raise TypeError(f"no strategy for {annotation!r}: teach it to kinlog_strategies")


def _struct(struct: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = {name: _of(hints[name], name) for name in struct.__struct_fields__}
    return st.builds(lambda **values: struct(**values), **fields)


def events_of(event_type: type[Event]) -> st.SearchStrategy[Event]:
    """Any event of one type, within what its columns can hold."""
    return _struct(event_type)


def any_events() -> st.SearchStrategy[Event]:
    return st.one_of(*(events_of(event_type) for event_type in EVENT_TYPES.values()))
