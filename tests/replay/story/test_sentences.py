"""Nothing that a log can say is without words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import story
from kinlog_strategies import events_of

from kinlog.replay.story.sentences import BECAUSE, SENTENCES, sentence
from kinlog.schemas.events import EVENT_TYPES, AttemptSuperseded, GroupDropped
from kinlog.schemas.reasons import Reason


def test_every_kind_and_every_reason_has_its_words():
    assert set(SENTENCES) == set(EVENT_TYPES.values())
    assert set(BECAUSE) == set(Reason)
    assert len(set(BECAUSE.values())) == len(Reason)


@pytest.mark.parametrize("kind", EVENT_TYPES)
@settings(max_examples=10)
@given(data=st.data())
def test_any_event_is_told_in_one_line_that_is_no_sentence_yet(kind, data):
    text = sentence(data.draw(events_of(EVENT_TYPES[kind])))
    assert text
    assert not text.endswith(".")


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_told_in_words_and_by_its_name_with_the_detail(reason: Reason):
    dropped = sentence(GroupDropped(group_id=3, reason=reason, detail="told so"))
    given_up = sentence(AttemptSuperseded(group_id=3, generation=1, attempt=2, reason=reason))
    for text in (dropped, given_up):
        assert f"because {BECAUSE[reason]} ({reason.value}" in text
    assert "told so)" in dropped


def test_what_happens_in_a_run_is_told_with_its_numbers():
    told = [sentence(event) for event in story(1).events]
    assert any("sample " in text and "granularity prompt_group" in text for text in told)
    assert any(text.startswith("sibling 2, attempt 1: sent to worker-2, under weights ") for text in told)
