"""Types of fields in words: what a person writes into a file, or finds in one."""

from typing import Any

import msgspec
import yaml
from msgspec import inspect as types

__all__ = ["bounds_text", "default_text", "type_text", "unit_text"]

#: Ends of names, or beginnings, that say the unit: it comes last in a name, or it is what is counted.
_UNITS = (
    ("_us", "µs"),
    ("_ms", "ms"),
    ("_s", "s"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("tokens_", "tokens"),
    ("_steps", "steps"),
    ("_versions", "weight versions"),
)
_END_OF_SCALAR = "...\n"
_SIMPLE = {
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "text",
    types.BoolType: "`true` or `false`",
}


def unit_text(name: str) -> str:
    """Return the unit that the name of a field says, or nothing."""
    for mark, unit in _UNITS:
        if name.startswith(mark) if mark.endswith("_") else name.endswith(mark):
            return unit
    return ""


def type_text(found: types.Type) -> str:
    """Return a type in words. A structure, or a closed set of names, is a link to its section, by its name."""
    match found:
        case types.Metadata(type=inner):
            return type_text(inner)
        case types.UnionType(types=members):
            return " or ".join("`null`" if isinstance(m, types.NoneType) else type_text(m) for m in members)
        case types.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case types.EnumType(cls=described) | types.StructType(cls=described):
            return f"[{section_name(described)}](#{section_name(described).replace(' ', '-')})"
        case types.BytesType(min_length=16, max_length=16):
            return "digest, 16 bytes"
        case types.VarTupleType(item_type=item):
            return f"list of {type_text(item)}"
        case types.DictType(value_type=value):
            return f"mapping of text to {type_text(value)}"
    return _SIMPLE[type(found)]


def section_name(described: type) -> str:
    """Return a class's name in words, as its section is called: ``RetryBudget`` is ``retry budget``."""
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in described.__name__)
    return words.strip().removesuffix(" settings").removesuffix(" ref")


def bounds_text(found: types.Type) -> str:
    """Return what a value must keep to, or nothing."""
    match found:
        case types.Metadata(type=inner):
            return bounds_text(inner)
        case types.UnionType(types=members):
            return ", ".join(filter(None, map(bounds_text, members)))
        case types.IntType() | types.FloatType():
            limits = (("≥", found.ge), (">", found.gt), ("≤", found.le), ("<", found.lt))
            return ", ".join(f"{sign} {limit:,}" for sign, limit in limits if limit is not None)
        case types.StrType(min_length=int(fewest)) | types.VarTupleType(min_length=int(fewest)):
            return f"not empty{'' if fewest == 1 else f', at least {fewest}'}"
    return ""


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default as it would be written in YAML."""
    if field.required:
        return "*required*"
    default: Any = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if isinstance(default, msgspec.Struct):
        return "its own defaults"
    text = yaml.safe_dump(msgspec.to_builtins(default), default_flow_style=True)
    return f"`{text.removesuffix(_END_OF_SCALAR).strip()}`"
