"""docs/guarantees.md names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENT = (TESTS.parent / "docs" / "guarantees.md").read_text(encoding="utf-8")
PROMISES = re.findall(
    r"^\| (?!promise)(.+?) \| `([\w/]+\.py)(?:::(\w+))?` \|$",
    DOCUMENT,
    re.MULTILINE,
)


def test_every_row_of_the_document_names_one_test():
    rows = re.findall(r"^\| (?!promise)(?=.*\.py).*$", DOCUMENT, re.MULTILINE)
    assert len(rows) == len(PROMISES) > 40


@pytest.mark.parametrize(("promise", "file", "name"), PROMISES, ids=[promise for promise, _, _ in PROMISES])
def test_promise_has_its_test(promise: str, file: str, name: str):
    source = (TESTS / file).read_text(encoding="utf-8")
    assert not name or re.search(rf"^(async )?def {name}\(|^{name} = ", source, re.MULTILINE), promise


def test_every_test_of_the_conformance_suite_is_listed():
    listed = {(file, name) for _, file, name in PROMISES}
    for path in sorted((TESTS / "conformance").glob("test_*.py")):
        file = path.relative_to(TESTS).as_posix()
        names = re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not [name for name in names if (file, name) not in listed and (file, "") not in listed], file
