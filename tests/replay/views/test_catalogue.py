"""What is documented of the views is what they are."""

import re

import pyarrow as pa
import pytest

from kinlog.lineage.state import GroupPhase
from kinlog.replay.lives import LifeEnd
from kinlog.replay.views.catalogue import VIEWS, View, describe_views
from kinlog.schemas.reasons import CheckpointKind, FinishReason, Granularity, Validity

COLUMNS = [(view, column) for view in VIEWS.values() for column in view.columns]


def test_every_column_is_described_once():
    described = describe_views()
    assert [(view, column) for view, column, _, _ in described] == [(v.name, c.name) for v, c in COLUMNS]
    assert len(set(described)) == len(described)
    for view, column, type_name, meaning in described:
        assert type_name, (view, column)
        assert re.fullmatch(r"[^\s].*[^\s.]", meaning), (view, column)


def test_schema_carries_types_and_meanings():
    for view, column in COLUMNS:
        field = view.schema((column.name,)).field(0)
        assert field.type == column.type
        assert field.metadata == {b"meaning": column.meaning.encode()}


def test_names_say_what_values_are():
    for view, column in COLUMNS:
        where = f"{view.name}.{column.name}"
        assert pa.types.is_timestamp(column.type) == column.name.endswith("_at"), where
        if (
            column.name.endswith(("_seq", "_id", "_bytes", "_tokens", "_step", "_version"))
            and column.name != "sample_id"
        ):
            assert column.type == pa.int64(), where


def test_column_of_one_name_has_one_type():
    types: dict[str, set[pa.DataType]] = {}
    for _, column in COLUMNS:
        types.setdefault(column.name, set()).add(column.type)
    assert {name for name, of in types.items() if len(of) > 1} == set()


@pytest.mark.parametrize(
    ("view", "column", "values"),
    [
        ("groups", "phase", [*GroupPhase, "dropped"]),
        ("groups", "granularity", Granularity),
        ("siblings", "validity", Validity),
        ("attempts", "finish_reason", FinishReason),
        ("checkpoints", "kind", CheckpointKind),
        ("lives", "ending", LifeEnd),
    ],
)
def test_closed_set_is_listed_whole(view: str, column: str, values: list[str]):
    (meaning,) = [c.meaning for c in VIEWS[view].columns if c.name == column]
    for value in values:
        assert re.search(rf"\b{value}\b", meaning), value


def test_view_knows_no_column_of_another():
    with pytest.raises(KeyError):
        View("x", "y", ()).schema(("seq",))
