"""Prompts: kept apart by typed identity or refused at reservation, and none handed out is ever lost."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import prompt_ref
from kinlog_conformance import (
    Given,
    Like,
    admitted,
    dispatched,
    living,
    reserved,
    reserving,
    restarted,
    sealed,
)
from kinlog_fake_parts import FakeDataset
from msgspec.structs import replace

from kinlog.lineage.state import GroupPhase
from kinlog.replay.recovery.inventory import expected_inventory
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.prompts import PromptRef

AWKWARD = [
    ("a:b", "a_b"),
    ("a/b", "a:b"),
    ("a_b/c", "a/b_c"),
    ("g0.s0.a1", "g0.s0.a1.c0"),
    ("x" * 300, "x" * 299 + "y"),
    ("\u00e9", "e\u0301"),
    ("a", "a\u200b"),
    ("0", "00"),
    (" ", "\n"),
    ("\0", "\0\0"),
]


def prompt(draw: int, sample_id: str) -> PromptRef:
    return replace(prompt_ref(draw), sample_id=sample_id)


@pytest.mark.parametrize(("first", "second"), AWKWARD, ids=[repr(pair)[:40] for pair in AWKWARD])
def test_awkward_sample_ids_are_kept_apart_through_the_log(first: str, second: str):
    Given().when(reserving(prompt(0, first)), reserving(prompt(1, second))).then(
        events=[
            Like(e.GroupReserved, group_id=0, prompt=prompt(0, first)),
            Like(e.GroupReserved, group_id=1, prompt=prompt(1, second)),
        ]
    )


@pytest.mark.parametrize(("first", "second"), AWKWARD, ids=[repr(pair)[:40] for pair in AWKWARD])
def test_rows_of_awkward_sample_ids_never_share_a_key(first: str, second: str):
    done = Given(reserving(prompt(0, first)), reserving(prompt(1, second))).when(
        *itertools.chain.from_iterable((admitted(g), dispatched(g), sealed(g)) for g in (0, 1))
    )
    staged = expected_inventory(done.then().p).staging
    assert sorted(tag.group_id for tag in staged.values()) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("sample_id", ["", "\ud800", "a\udfffb", "x" * 1025, "\u00e9" * 513])
def test_sample_id_that_cannot_be_recorded_is_refused_at_the_reservation(sample_id: str):
    Given(reserved()).when(reserving(prompt(1, sample_id))).then(
        raises=(TransitionError, "draw 1: .*sample id")
    )


def test_same_sample_id_in_two_draws_is_two_groups():
    Given().when(reserving(prompt(0, "same")), reserving(prompt(1, "same"))).then(
        state={0: GroupPhase.RESERVED, 1: GroupPhase.RESERVED, "draw_cursor": 2}
    )


@pytest.mark.parametrize("draw", [0, 2, 7])
def test_prompt_other_than_the_next_draw_is_refused(draw: int):
    Given(reserved()).when(reserving(prompt_ref(draw))).then(raises=(TransitionError, "expected draw 1"))


@settings(max_examples=20)
@given(kills=st.lists(st.integers(1, 6), min_size=1, max_size=4), tail_rows=st.booleans())
def test_every_prompt_handed_out_before_any_kill_is_accounted_for(kills: list[int], tail_rows: bool):
    now = Given(trainer__max_steps=9).when()
    for seals in kills:
        target = now.p.sealed_total + seals
        now = now.when(living(until=lambda p, target=target: p.sealed_total >= target))
        now = now.when(restarted(tail_rows=tail_rows))  # that none is lost is checked by every ``then``
    now.when(living()).then(state={"train_step": 9})


def test_draw_cursor_never_runs_ahead_of_the_reservations():
    done = Given().when(living()).then(state={"train_step": 4})
    for event in done.of(e.GroupReserved):
        assert event.draw_cursor == event.prompt.draw_index + 1 == event.group_id + 1


def test_epoch_boundary_draws_every_row_once_more():
    done = (
        Given(dataset=FakeDataset(size=5), trainer__max_steps=5).when(living()).then(state={"train_step": 5})
    )
    by_epoch: dict[int, list[str]] = {}
    for event in done.of(e.GroupReserved):
        by_epoch.setdefault(event.prompt.dataset_epoch, []).append(event.prompt.sample_id)
    assert sorted(by_epoch[0]) == sorted(by_epoch[1]) == [f"row-{n}" for n in range(5)]


@pytest.mark.parametrize("size", [1, 4, 7])
def test_exhausted_dataset_trains_what_is_left_and_ends(size: int):
    done = Given(dataset=FakeDataset(size=size), dataset__max_epochs=1, trainer__max_steps=50).when(living())
    done.then(
        events=[e.DatasetExhausted(draw_cursor=size)],
        only=(e.DatasetExhausted,),
        state={"applied_total": size, "alive_total": 0, "exhausted": True},
    )


def test_exhausted_dataset_with_work_left_is_trained_to_its_end_by_the_next_life():
    Given(dataset=FakeDataset(size=7), dataset__max_epochs=1, trainer__max_steps=50).when(
        living(until=lambda p: p.exhausted), restarted()
    ).when(living()).then(state={"applied_total": 7, "alive_total": 0})


def test_exhausted_run_that_has_nothing_left_ends_at_once_and_again():
    done = Given(dataset=FakeDataset(size=4), dataset__max_epochs=1, trainer__max_steps=50).when(living())
    for _ in range(3):
        done = done.when(restarted(), living())
        done.then(events=[], only=(e.GroupReserved, e.GroupClaimed, e.DatasetExhausted))


@pytest.mark.parametrize("last", [4, 3, 1])
def test_resume_at_and_past_the_last_step_ends_and_does_nothing(last: int):
    done = Given().when(living()).then(state={"train_step": 4})
    done.when(restarted(trainer__max_steps=last), living()).then(
        events=[], only=(e.GroupReserved, e.SiblingDispatched, e.GroupClaimed), state={"train_step": 4}
    )


def test_more_steps_than_before_go_on_where_the_run_had_ended():
    Given().when(living(), restarted(trainer__max_steps=6), living()).then(state={"train_step": 6})
