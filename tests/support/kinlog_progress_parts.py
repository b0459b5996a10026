"""A progress journal on a real disk that writes when it is told to, and what comes back from it."""

from dataclasses import replace
from pathlib import Path

from kinlog.lineage.journal import PROGRESS, Attempt, Journal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.reasons import FinishReason
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.model_calls import EarlierCall, Turn
from kinlog.workers.progress_journal import ProgressJournal, RolloutProgress
from kinlog.workers.progress_reading import ProgressReader


class ToldProgressJournal(ProgressJournal):
    """Writes nothing by itself."""

    async def _write_for_ever(self) -> None:
        return


def progress_in(
    directory: Path,
    attempt: Attempt,
    *,
    keep_prefixes: bool = True,
    every_s: float = 1e9,
    every_tokens: int = 1_000_000,
    clock_us: int = 1,
) -> tuple[ProgressJournal, RolloutProgress]:
    """A process's journal, and an attempt in it."""
    journal = Journal(
        LocalStore(),
        directory,
        PROGRESS,
        writer_version="test",
        segment_bytes=1 << 20,
        clock_us=lambda: clock_us,
    )
    progress = ToldProgressJournal(
        journal, every_s=every_s, every_tokens=every_tokens, keep_prefixes=keep_prefixes
    )
    return progress, progress.begin(attempt)


async def read_back(directory: Path, attempt: Attempt) -> tuple[EarlierCall, ...]:
    return await ProgressReader(LocalStore(), directory).newest([attempt])


def told_tokens(tokens: GeneratedTokens) -> list[tuple[int, float, int]]:
    return list(tokens)


def earlier_call(
    length: int,
    *,
    turn: Turn | None = None,
    finish_reason: FinishReason | None = FinishReason.STOP,
    version: int = 0,
) -> EarlierCall:
    tokens = GeneratedTokens([1] * length, [-1.0] * length, [version] * length)
    return EarlierCall(b"p" * 16, tokens, finish_reason, turn)


class Kept:
    """Keeps what it is told of, as the progress journal does, and can forget the end of it."""

    def __init__(self) -> None:
        self.calls: list[EarlierCall] = []

    def begin_call(self, call: int, prompt_digest: bytes, tokens: GeneratedTokens) -> None:
        self.calls.append(EarlierCall(prompt_digest, tokens, None, None))

    def end_call(self, call: int, finish_reason: FinishReason) -> None:
        self.calls[call] = replace(self.calls[call], finish_reason=finish_reason)

    def end_turn(self, call: int, turn: Turn) -> None:
        self.calls[call] = replace(self.calls[call], turn=turn)

    def cut_in(self, call: int, tokens: int) -> list[EarlierCall]:
        """What is there when the process dies in a call, after so many tokens of it."""
        cut = replace(
            self.calls[call], tokens=self.calls[call].tokens.part(0, tokens), finish_reason=None, turn=None
        )
        return [*self.calls[:call], *([cut] if tokens else [])]
