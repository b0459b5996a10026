"""Every error can be told apart by scripts, and crosses process borders whole."""

import pickle

import pytest

from kinlog.schemas import errors
from kinlog.schemas.errors import KinlogError, LogDamagedError

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_every_error_has_a_code_and_an_exit_code_of_its_own():
    assert len({c.code for c in CLASSES}) == len(CLASSES)
    assert len({c.exit_code for c in CLASSES}) == len(CLASSES)
    assert all(0 < c.exit_code < 126 for c in CLASSES)


def test_every_error_class_of_the_module_is_public():
    defined = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KinlogError)
    }
    assert defined == set(CLASSES)


def test_damage_names_file_offset_seq_expected_and_found():
    error = LogDamagedError(
        "bad frame", segment="segment-1", offset_bytes=512, seq=9, expected="this", found="that"
    )
    for part in ("bad frame", "segment-1", "byte 512", "seq 9", "expected this", "found that"):
        assert part in str(error)


@pytest.mark.parametrize("error_class", CLASSES)
def test_every_error_survives_pickling(error_class):
    if error_class is LogDamagedError:
        error = LogDamagedError("bad", segment="s", offset_bytes=1, seq=2, expected="a", found="b")
    else:
        error = error_class("what happened")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_class
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
