"""What is installed is listed by hand: nothing is forgotten there."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_every_folder_of_modules_is_installed():
    listed = set(BUILD["packages"])
    folders = {"kinlog.docs"} | {
        ".".join(("kinlog", *path.parent.relative_to(ROOT).parts))
        for name, top in BUILD["package-dir"].items()
        if name != "kinlog.docs"
        for path in (ROOT / top).rglob("*.py")
    }
    assert listed == folders


def test_each_part_of_the_timelines_page_is_installed():
    page = ROOT / "replay" / "timeline" / "page"
    patterns = BUILD["package-data"]["*"]
    assert list(page.iterdir())
    assert all(
        any(path.relative_to(page.parent).match(pattern) for pattern in patterns) for path in page.iterdir()
    )
