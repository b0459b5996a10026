"""Whatever is wrong with what is kept of unfinished rollouts, or with an environment's state, costs what is generated again,
and nothing else."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from kinlog_progress_parts import Kept, progress_in, read_back
from kinlog_stateful_environment import TallyEpisode

from kinlog.lineage.journal import PROGRESS, Journal, JournalKind
from kinlog.lineage.store import LocalStore
from kinlog.replay.recovery.progress import written_tokens
from kinlog.schemas.reasons import FinishReason
from kinlog.schemas.settings import GenerationSettings, RolloutSettings
from kinlog.workers import progress_journal
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.environments import Episode, Verdict
from kinlog.workers.model_calls import EarlierCall, ModelCalls, Turn
from kinlog.workers.progress_journal import ProgressJournal
from kinlog.workers.progress_reading import ProgressReader
from kinlog.workers.rollout import Rollout, run_rollout
from kinlog.workers.tasks import Item

pytest_plugins = ["kinlog_policy_fixtures"]

ATTEMPT = (3, 1, 2)
TURN = Turn(Verdict(reward=0.25, well_formed=True, feedback="?"), b"x" * 1000, 7)


async def write_attempts(directory: Path, count: int) -> list[tuple[int, int, int]]:
    attempts = [(group_id, 0, 1) for group_id in range(count)]
    for attempt in attempts:
        journal, rollout = progress_in(directory, attempt, clock_us=1 + attempt[0])
        rollout.begin_call(0, b"p" * 16, GeneratedTokens([attempt[0]], [-1.0], [0]))
        await journal.write()
    return attempts


# ---- reading ----------------------------------------------------------------------------------------------------------


class CountingStore(LocalStore):
    """Lets go of segments while they are read, and counts who reads at the same time."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.before_read: Callable[[Path], None] = lambda path: None

    def read(self, path: Path) -> memoryview:
        self.reads.append(path.name)
        self.before_read(path)
        return super().read(path)


async def test_orders_that_come_together_each_get_their_own_tokens_from_two_readings(tmp_path: Path):
    attempts = await write_attempts(tmp_path, 20)
    store = CountingStore()
    reader = ProgressReader(store, tmp_path)
    found = await asyncio.gather(*(reader.newest([attempt]) for attempt in attempts))
    assert [list(call.tokens.token_ids) for (call,) in found] == [[group_id] for group_id in range(20)]
    # One for the order that came first, one for all that came meanwhile.
    assert max(Counter(store.reads).values()) <= 2


async def test_tokens_that_were_handed_out_are_not_kept_in_memory(tmp_path: Path):
    attempts = await write_attempts(tmp_path, 3)
    reader = ProgressReader(LocalStore(), tmp_path)
    for attempt in attempts:
        await reader.newest([attempt])
    assert reader._found == {}


async def test_segment_without_anything_of_an_attempt_is_read_once(tmp_path: Path):
    attempts = await write_attempts(tmp_path, 3)
    store = CountingStore()
    reader = ProgressReader(store, tmp_path)
    await reader.newest([attempts[0]])
    store.reads.clear()
    await reader.newest([attempts[0]])
    assert len(store.reads) == 1


async def test_order_that_is_given_up_while_it_waits_holds_up_nobody(tmp_path: Path):
    attempts = await write_attempts(tmp_path, 3)
    reader = ProgressReader(LocalStore(), tmp_path)
    reading = [asyncio.create_task(reader.newest([attempt])) for attempt in attempts]
    await asyncio.sleep(0)
    reading[0].cancel()
    reading[1].cancel()
    (call,) = await reading[2]
    assert list(call.tokens.token_ids) == [2]


def other_columns(metadata: dict[str, str] | None) -> pa.Schema:
    return pa.schema([pa.field("group_id", pa.int64()), pa.field("parts", pa.utf8())], metadata=metadata)


def write_other_columns(directory: Path) -> None:
    kind = JournalKind("progress-", other_columns)
    journal = Journal(
        LocalStore(), directory, kind, writer_version="9", segment_bytes=1 << 20, clock_us=lambda: 0
    )
    journal.append(
        pa.RecordBatch.from_pydict({"group_id": [0], "parts": ["new"]}, schema=other_columns(None))
    )


async def test_segment_whose_columns_are_of_another_version_has_nothing(tmp_path: Path, caplog):
    (attempt,) = await write_attempts(tmp_path, 1)
    write_other_columns(tmp_path)
    assert len(await read_back(tmp_path, attempt)) == 1
    assert "is not read" in caplog.text
    assert written_tokens(LocalStore(), tmp_path, {attempt}) == {attempt: 1}


async def test_segment_that_the_disk_does_not_give_has_nothing(tmp_path: Path, caplog):
    attempts = await write_attempts(tmp_path, 2)
    store = CountingStore()

    def fail_first(path: Path) -> None:
        if path.name.startswith("progress-0000000000000001"):
            raise OSError(5, "Input/output error")

    store.before_read = fail_first
    reader = ProgressReader(store, tmp_path)
    assert [len(await reader.newest([attempt])) for attempt in attempts] == [0, 1]
    assert "Input/output error" in caplog.text
    assert written_tokens(store, tmp_path, set(attempts)) == {attempts[1]: 1}


# ---- writing ----------------------------------------------------------------------------------------------------------


async def test_turns_that_are_written_are_let_go_of(tmp_path: Path):
    """A state a turn, of every rollout under way, would be more than a process has room for."""
    journal, rollout = progress_in(tmp_path, ATTEMPT)
    for call in range(50):
        rollout.begin_call(call, b"p" * 16, GeneratedTokens([call], [-1.0], [0]))
        rollout.end_call(call, FinishReason.STOP)
        rollout.end_turn(call, TURN)
        await journal.write()
    assert not rollout._calls
    assert [call.turn for call in await read_back(tmp_path, ATTEMPT)] == [TURN] * 50


@pytest.mark.parametrize("keep_prefixes", [True, False])
async def test_calls_that_nobody_will_judge_any_more_are_let_go_of(tmp_path: Path, keep_prefixes: bool):
    journal, rollout = progress_in(tmp_path, ATTEMPT, keep_prefixes=keep_prefixes)
    for call in range(5):
        rollout.begin_call(call, b"p" * 16, GeneratedTokens([call], [-1.0], [0]))
        rollout.end_call(call, FinishReason.STOP)
        await journal.write()
    assert list(rollout._calls) == [4]


async def test_calls_side_by_side_come_back_whichever_is_written_first(tmp_path: Path):
    journal, rollout = progress_in(tmp_path, ATTEMPT)
    tokens = [GeneratedTokens() for _ in range(2)]
    for call in range(2):
        rollout.begin_call(call, b"p" * 16, tokens[call])
    tokens[1].append(5, -1.0, 0)
    rollout.end_call(1, FinishReason.STOP)
    await journal.write()
    tokens[0].append(4, -1.0, 0)
    rollout.end_call(0, FinishReason.LENGTH)
    await journal.write()
    assert [list(call.tokens.token_ids) for call in await read_back(tmp_path, ATTEMPT)] == [[4], [5]]


async def test_states_that_come_together_are_written_in_frames_of_bounded_size(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(progress_journal, "_BYTES_PER_FRAME", 2500)
    journal, rollout = progress_in(tmp_path, ATTEMPT)
    for call in range(7):
        rollout.begin_call(call, b"p" * 16, GeneratedTokens([call], [-1.0], [0]))
        rollout.end_call(call, FinishReason.STOP)
        rollout.end_turn(call, TURN)
    frames: list[int] = []
    append = journal._journal.append
    monkeypatch.setattr(
        journal._journal, "append", lambda batch: (frames.append(batch.num_rows), append(batch))
    )
    await journal.write()
    assert frames == [2, 2, 2, 1]
    assert len(await read_back(tmp_path, ATTEMPT)) == 7


async def test_writing_that_ends_for_whatever_reason_says_so(tmp_path: Path, caplog):
    journal = ProgressJournal(
        Journal(
            LocalStore(), tmp_path, PROGRESS, writer_version="t", segment_bytes=1 << 20, clock_us=lambda: 1
        ),
        every_s=1e-9,
        every_tokens=1,
    )
    rollout = journal.begin(ATTEMPT)
    rollout.begin_call(0, b"p" * 16, GeneratedTokens([2**40], [-1.0], [0]))
    assert journal._writing is not None
    await asyncio.wait_for(asyncio.shield(journal._writing), 600)
    assert "is not kept any more" in caplog.text


# ---- environments -----------------------------------------------------------------------------------------------------


class Begins:
    def __init__(self, begin: Callable[[], Episode]) -> None:
        self._begin = begin

    def begin(self, item: Item) -> Episode:
        return self._begin()


@pytest.fixture
def roll_out(tokenizer, mixture, scripted_engine):
    async def roll_out(episode: Callable[[], Episode], kept: Kept, *earlier: EarlierCall) -> Rollout:
        engine = scripted_engine(["1", "2", "3"])
        calls = ModelCalls(engine, GenerationSettings(), seed=1, progress=kept, earlier=earlier)
        settings = RolloutSettings(max_turns=3)
        return await run_rollout(calls, tokenizer, Begins(episode), mixture[0], settings=settings)

    return roll_out


class CannotSave(TallyEpisode):
    def save_state(self) -> bytes:
        raise RuntimeError("no state just now")


class SavesText(TallyEpisode):
    def save_state(self) -> bytes:
        return "text"  # type: ignore[return-value]


class SavesHugeVersion(TallyEpisode):
    state_version = 2**31


class SaysNoText(TallyEpisode):
    async def judge(self, answer: str, *, call: int) -> Verdict:
        return replace(await super().judge(answer, call=call), feedback=None if call else "\ud800")


@pytest.mark.parametrize("episode", [CannotSave, SavesText, SavesHugeVersion])
async def test_state_that_cannot_be_kept_costs_the_turn_and_not_the_rollout(roll_out, caplog, episode):
    kept = Kept()
    rollout = await roll_out(episode, kept)
    assert len(rollout.calls) == 3
    assert [call.turn for call in kept.calls] == [None] * 3
    assert "this turn cannot be resumed" in caplog.text


async def test_feedback_that_is_no_text_is_not_passed_on_to_be_written(roll_out):
    """It would end the writing of all rollouts of the process."""
    kept = Kept()
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the tokenizer says to it
        await roll_out(SaysNoText, kept)
    assert [call.turn for call in kept.calls] == [None]


async def test_environment_that_fails_over_its_old_state_begins_anew(roll_out, caplog):
    """By whatever exception: the sibling is not to pay for it with its budget, nor with another seed."""
    kept, again = Kept(), Kept()
    whole = await roll_out(TallyEpisode, kept)
    first = kept.calls[0]
    assert first.turn is not None
    damaged = replace(first, turn=replace(first.turn, state=b"\xff"))
    resumed = await roll_out(TallyEpisode, again, damaged)
    assert resumed.raw_reward == whole.raw_reward
    assert len(resumed.calls) == 3
    assert "begun anew" in caplog.text


async def test_reward_that_is_a_whole_number_is_the_same_after_a_turn_is_resumed(roll_out):
    class Counts(TallyEpisode):
        async def judge(self, answer: str, *, call: int) -> Verdict:
            return replace(await super().judge(answer, call=call), reward=1)

    kept = Kept()
    await roll_out(Counts, kept)
    (turn, *_) = [call.turn for call in kept.calls]
    assert turn is not None
    assert isinstance(turn.verdict.reward, float)
