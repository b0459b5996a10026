"""docs/reference is what the schemas say, and says something about everything in them."""

import re
from pathlib import Path

import pytest
from reference_pages import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_committed_reference_is_current(name: str):
    committed = (DOCS / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), "the schemas have changed: run `make reference`"


@pytest.mark.parametrize("name", PAGES)
def test_every_row_of_a_reference_has_a_meaning(name: str):
    rows = re.findall(r"^\| .*\|$", PAGES[name](), re.MULTILINE)
    assert [row for row in rows if row.endswith("|  |")] == []
    assert len(rows) > 20
