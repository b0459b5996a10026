"""The page about tables: every block of Python on it runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kinlog_run_fixtures import small_run

from kinlog.replay.views.catalogue import VIEWS

PAGE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the run that the page is about."""
    place = tmp_path_factory.mktemp("page")
    small_run(place / "runs" / "first").kill()
    return place


def test_page_names_every_view_and_every_library():
    assert all(f"`{name}`" in PAGE for name in VIEWS)
    for library in ("pyarrow", "duckdb", "polars"):
        assert any(f"import {library}" in block for block in BLOCKS)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_of_python_runs_and_prints_something(number: int, place: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[number]],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 10
