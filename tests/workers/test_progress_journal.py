"""What unfinished rollouts generate is written down in bounded portions, and read back for another attempt."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinlog_progress_parts import earlier_call, progress_in, read_back, told_tokens

from kinlog.lineage.journal import PROGRESS, scan_journal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.reasons import FinishReason
from kinlog.schemas.settings import RolloutRecoverySettings
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.environments import Verdict
from kinlog.workers.model_calls import EarlierCall, Turn
from kinlog.workers.progress_reading import ProgressReader, calls_of_parts, usable_calls
from kinlog.workers.progress_rows import CallPart, parts_from_batch, parts_to_batch

ATTEMPT = (3, 1, 2)
GOES_ON = Turn(Verdict(reward=0.25, well_formed=True, feedback="?"), b"\x00state", 7)
ENDED = Turn(Verdict(reward=1.0, well_formed=False, feedback=None), b"", 1)


async def test_tokens_come_back_as_they_were_generated_in_portions(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT)
    tokens = GeneratedTokens()
    rollout.begin_call(0, b"p" * 16, tokens)
    for portion in (3, 1, 4):
        for _ in range(portion):
            tokens.append(len(tokens), -0.5 * len(tokens), 9)
        await journal.write()
    (call,) = await read_back(tmp_path, ATTEMPT)
    assert told_tokens(call.tokens) == told_tokens(tokens)
    assert (call.prompt_digest, call.finish_reason, call.turn) == (b"p" * 16, None, None)


async def test_every_token_is_written_once(tmp_path: Path):
    _journal, rollout = progress_in(tmp_path, ATTEMPT)
    tokens = GeneratedTokens()
    rollout.begin_call(0, b"p" * 16, tokens)
    parts = []
    for count in (5, 0, 0, 2):
        for _ in range(count):
            tokens.append(1, -1.0, 0)
        parts += rollout.take()
    assert [(part.position, len(part.tokens)) for part in parts] == [(0, 5), (5, 2)]


async def test_calls_that_ended_and_were_judged_come_back_with_the_state_of_their_environment(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT)
    for call, (turn, version) in enumerate(((GOES_ON, 4), (ENDED, 5))):
        tokens = GeneratedTokens([1, 2], [-1.0, -2.0], [version, version])
        rollout.begin_call(call, bytes([call]) * 16, tokens)
        await journal.write()  # in two parts: the tokens, then how they ended
        rollout.end_call(call, FinishReason.STOP)
        rollout.end_turn(call, turn)
        await journal.write()
    first, second = await read_back(tmp_path, ATTEMPT)
    assert (first.finish_reason, first.turn, second.turn) == (FinishReason.STOP, GOES_ON, ENDED)


async def test_rollouts_that_ended_leave_nothing(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT)
    rollout.begin_call(0, b"p" * 16, GeneratedTokens([1], [-1.0], [0]))
    journal.end(ATTEMPT)
    await journal.write()
    assert list(tmp_path.iterdir()) == []


async def test_prefixes_that_are_not_wanted_are_not_written(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT, keep_prefixes=False)
    rollout.begin_call(0, b"p" * 16, GeneratedTokens([1], [-1.0], [0]))
    await journal.write()
    assert list(tmp_path.iterdir()) == []
    rollout.end_call(0, FinishReason.STOP)
    rollout.end_turn(0, GOES_ON)
    await journal.write()
    assert [call.turn for call in await read_back(tmp_path, ATTEMPT)] == [GOES_ON]


async def test_newest_attempt_that_left_anything_counts(tmp_path: Path):
    for attempt, count in ((1, 4), (2, 2)):
        journal, rollout = progress_in(tmp_path, (3, 1, attempt))
        rollout.begin_call(0, b"p" * 16, GeneratedTokens([attempt] * count, [-1.0] * count, [0] * count))
        await journal.write()
    reader = ProgressReader(LocalStore(), tmp_path)
    (call,) = await reader.newest([(3, 1, 1), (3, 1, 2), (3, 1, 3)])
    assert list(call.tokens.token_ids) == [2, 2]
    assert await reader.newest([(3, 1, 3)]) == ()


async def test_segment_that_is_still_written_to_is_read_as_far_as_it_is_there(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT)
    tokens = GeneratedTokens([1], [-1.0], [0])
    rollout.begin_call(0, b"p" * 16, tokens)
    await journal.write()
    reader = ProgressReader(LocalStore(), tmp_path)
    assert [len(call.tokens) for call in await reader.newest([ATTEMPT])] == [1]
    tokens.append(2, -1.0, 0)
    await journal.write()
    assert [len(call.tokens) for call in await reader.newest([ATTEMPT])] == [2]


async def test_damaged_segment_costs_what_is_in_it_and_nothing_else(tmp_path: Path, caplog):
    for attempt in (1, 2):
        journal, rollout = progress_in(tmp_path, (3, 1, attempt), clock_us=attempt)
        for call in range(2):
            rollout.begin_call(call, b"p" * 16, GeneratedTokens([attempt], [-1.0], [0]))
            rollout.end_call(call, FinishReason.STOP)
            await journal.write()
    damaged = sorted(tmp_path.iterdir())[1]
    data = bytearray(damaged.read_bytes())
    frame = scan_journal(LocalStore(), damaged).scan.frames[1]
    data[frame.end - 9] ^= 1
    damaged.write_bytes(data)
    (first, second) = await ProgressReader(LocalStore(), tmp_path).newest([(3, 1, 1), (3, 1, 2)])
    assert list(first.tokens.token_ids) == list(second.tokens.token_ids) == [1]
    assert damaged.name in caplog.text


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 3), min_size=30, max_size=30),
    lost=st.integers(0, 40),
)
def test_parts_are_put_together_up_to_the_first_that_is_missing(lengths, cuts, lost):
    """Whichever part is lost, what is before it in its call stays, and nothing after it is made up."""
    parts, sizes = [], iter(cuts)
    for call, length in enumerate(lengths):
        written, position = 0, 0
        while position < length or written == 0:
            size = min(next(sizes), length - position)
            ended = FinishReason.STOP if position + size == length else None
            part_tokens = GeneratedTokens(range(position, position + size), [-1.0] * size, [0] * size)
            parts.append(CallPart(ATTEMPT, call, position, bytes([call]) * 16, part_tokens, ended, None))
            position, written = position + size, written + 1
    kept = [part for place, part in enumerate(parts) if place != lost]
    again = list(parts_from_batch(parts_to_batch(kept), {ATTEMPT})) if kept else []
    calls = calls_of_parts(again)
    before = parts[:lost]
    expected = [
        [i for part in before if part.call == call for i in part.tokens.token_ids]
        for call in sorted({part.call for part in before})
    ]
    assert [list(call.tokens.token_ids) for call in calls[: len(expected)]] == expected
    # Calls may be made side by side, so there may be others behind one that lacks its end: nobody goes on past that.
    assert len(calls) == len(expected) or calls[len(expected) - 1].finish_reason is None


async def test_nothing_is_written_before_it_is_time_or_enough(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT, every_s=1e9, every_tokens=3)
    tokens = GeneratedTokens([1, 1], [-1.0] * 2, [0] * 2)
    rollout.begin_call(0, b"p" * 16, tokens)
    assert not journal.is_due()
    tokens.append(1, -1.0, 0)
    assert journal.is_due()


async def test_turn_that_another_follows_is_written_at_once_and_the_last_one_is_not(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT, every_s=1e9, every_tokens=1000)
    rollout.begin_call(0, b"p" * 16, GeneratedTokens([1], [-1.0], [0]))
    rollout.end_call(0, FinishReason.STOP)
    rollout.end_turn(0, ENDED)
    assert not journal.is_due()
    rollout.begin_call(1, b"p" * 16, GeneratedTokens([1], [-1.0], [0]))
    rollout.end_turn(1, GOES_ON)
    assert journal.is_due()


async def test_progress_that_is_due_after_a_while_is_due_without_many_tokens(tmp_path: Path):
    journal, _rollout = progress_in(tmp_path, ATTEMPT, every_s=1e-9, every_tokens=1000)
    assert journal.is_due()


# ---- what may be used again ---------------------------------------------------------------------------------------------

BOTH = RolloutRecoverySettings()
NO_PREFIX = RolloutRecoverySettings(prefix="discard")
NO_TURN = RolloutRecoverySettings(turn="discard")


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [(BOTH, [GOES_ON, None, None]), (NO_PREFIX, [GOES_ON]), (NO_TURN, [None, None, None])],
)
def test_policy_says_which_calls_are_used_again(recovery, expected):
    calls = (
        earlier_call(4, turn=GOES_ON),
        earlier_call(4),
        earlier_call(4, finish_reason=None),
        earlier_call(4, turn=GOES_ON),
    )
    assert [call.turn for call in usable_calls(calls, recovery)] == expected


def test_tokens_of_newer_weights_are_left_out_with_all_that_follows():
    mixed = EarlierCall(
        b"p" * 16, GeneratedTokens([1, 2, 3], [-1.0] * 3, [4, 5, 6]), FinishReason.STOP, GOES_ON
    )
    (call,) = usable_calls((mixed, earlier_call(2, version=4)), BOTH, newest_weight_version=5)
    assert (list(call.tokens.token_ids), call.finish_reason, call.turn) == ([1, 2], None, None)
    assert usable_calls((mixed,), NO_PREFIX, newest_weight_version=5) == ()
    assert usable_calls((mixed,), BOTH, newest_weight_version=3) == ()


def test_segments_of_the_two_journals_are_told_apart_by_name(tmp_path: Path):
    assert PROGRESS.owns("progress-1-000000.arrows")
    assert not PROGRESS.owns("rows-1-000000.arrows")
