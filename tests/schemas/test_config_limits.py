"""Waits that the watchdog would take for a stall, and rollouts that no event could hold, are refused at configuration."""

import pytest
import yaml

from kinlog.schemas.codec import encode_event
from kinlog.schemas.config import RunConfig, parse_config
from kinlog.schemas.errors import ConfigError, EventTooLargeError
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.reasons import FinishReason, Validity
from kinlog.schemas.receipts import MAX_MODEL_CALLS, ModelCall, Receipt

TASKS = {"dataset": {"tasks": [{"name": "sums", "generator": "chain_sum", "agent": "single"}]}}
LARGEST = 2**32 - 1


def parsed(**sections: object) -> RunConfig:
    return parse_config(yaml.safe_dump({**TASKS, **sections}))


@pytest.mark.parametrize(
    ("section", "key", "refused_s"),
    [
        ("checkpointing", "timeout_s", 150.0),
        ("rollout", "sibling_timeout_s", 300.0),
        ("supervision", "max_retry_backoff_s", 300.0),
        ("supervision", "restart_timeout_s", 300.0),
    ],
)
def test_wait_that_the_watchdog_would_take_for_a_stall_is_refused(section: str, key: str, refused_s: float):
    with pytest.raises(ConfigError, match=rf"stall_timeout_s is 300, not above .*{section}\.{key}"):
        parsed(**{section: {key: refused_s}})
    parsed(**{section: {key: refused_s - 1}})


def largest_seal(calls: int) -> SiblingSealed:
    receipt = Receipt(
        tuple(
            ModelCall(call, call - 1, LARGEST, LARGEST, LARGEST, LARGEST, b"sixteen bytes   ")
            for call in range(calls)
        )
    )
    return SiblingSealed(
        group_id=LARGEST,
        generation=127,
        attempt=LARGEST,
        weight_version=LARGEST,
        max_weight_version=LARGEST,
        receipt=receipt,
        raw_reward=0.1,
        shaped_reward=0.1,
        prompt_tokens=LARGEST,
        completion_tokens=LARGEST,
        finish_reason=FinishReason.ABORTED,
        validity=Validity.POISONED,
    )


def test_seal_of_as_many_model_calls_as_are_allowed_fits_into_an_event_whatever_their_numbers():
    encode_event(largest_seal(MAX_MODEL_CALLS))
    with pytest.raises(EventTooLargeError):
        encode_event(largest_seal(MAX_MODEL_CALLS + 8))


def test_more_model_calls_than_an_event_can_hold_are_refused():
    assert parsed(rollout={"max_turns": MAX_MODEL_CALLS}).rollout.max_turns == MAX_MODEL_CALLS
    with pytest.raises(ConfigError, match="max_turns"):
        parsed(rollout={"max_turns": MAX_MODEL_CALLS + 1})
