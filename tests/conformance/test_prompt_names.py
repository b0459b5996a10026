"""Names that cannot be recorded are refused at the reservation: sample ids, task names and agent names alike."""

import pytest
from kinlog_builders import prompt_ref
from kinlog_conformance import Given, reserving
from msgspec.structs import replace

from kinlog.schemas.errors import TransitionError
from kinlog.schemas.prompts import MAX_NAME_BYTES

NAMES = {"sample_id": "sample id", "task_name": "task name", "agent_name": "agent name"}


@pytest.mark.parametrize("field", NAMES)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "has 0 bytes"),
        ("\udcff", "is not valid text"),
        ("x" * (MAX_NAME_BYTES + 1), rf"has {MAX_NAME_BYTES + 1} bytes"),
        ("\u00e9" * MAX_NAME_BYTES, rf"has {2 * MAX_NAME_BYTES} bytes"),
    ],
)
def test_name_that_cannot_be_recorded_is_refused_at_the_reservation(field: str, name: str, problem: str):
    prompt = replace(prompt_ref(0), **{field: name})
    Given().when(reserving(prompt)).then(raises=(TransitionError, f"draw 0: the {NAMES[field]} .*{problem}"))


def test_names_of_the_greatest_length_fit_into_one_event_together():
    longest = dict.fromkeys(NAMES, "x" * MAX_NAME_BYTES)
    given = Given().when(reserving(replace(prompt_ref(0), **longest))).then()
    assert given.p.groups[0].prompt.agent_name == "x" * MAX_NAME_BYTES
