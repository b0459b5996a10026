"""The progress journal, written: the tokens of rollouts that have not ended, for other attempts to go on from."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path

from kinlog.lineage.journal import PROGRESS, Attempt, Journal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import LogWriteError
from kinlog.schemas.reasons import FinishReason
from kinlog.schemas.settings import RolloutRecoverySettings, RowJournalSettings
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.model_calls import Turn
from kinlog.workers.progress_rows import CallPart, parts_to_batch

__all__ = ["ProgressJournal", "RolloutProgress", "open_progress_journal"]

_logger = logging.getLogger(__name__)

#: How often it is looked whether there is enough to write. Nothing is written before a limit is reached.
_LOOK_EVERY_S = 0.1

#: A frame takes no further part beyond so much.
_BYTES_PER_FRAME = 64 * 1024 * 1024
_BYTES_PER_TOKEN = 12


@dataclass(slots=True)
class _Call:
    """A model call, and how much of it has been written."""

    prompt_digest: bytes
    tokens: GeneratedTokens
    written: int = 0
    finish_reason: FinishReason | None = None
    turn: Turn | None = None
    end_written: bool = False
    turn_written: bool = False


class RolloutProgress:
    """What one attempt has generated and is not written yet. Implements :class:`kinlog.workers.model_calls.CallProgress`.

    Parameters
    ----------
    attempt:
        Whose it is.
    keep_prefixes:
        Whether calls that have not been judged are wanted.
    """

    def __init__(self, attempt: Attempt, *, keep_prefixes: bool) -> None:
        self._attempt = attempt
        self._keep_prefixes = keep_prefixes
        self._begun = 0
        self._calls: dict[int, _Call] = {}
        """Those of which something may still have to be written: of a long rollout, the last few."""

    def begin_call(self, call: int, prompt_digest: bytes, tokens: GeneratedTokens) -> None:
        assert call == self._begun, "calls whose progress is kept are numbered as they are begun"
        self._begun += 1
        self._calls[call] = _Call(prompt_digest, tokens)

    def end_call(self, call: int, finish_reason: FinishReason) -> None:
        self._calls[call].finish_reason = finish_reason

    def end_turn(self, call: int, turn: Turn) -> None:
        self._calls[call].turn = turn

    def unwritten_tokens(self) -> int:
        """Return how many tokens of one call wait to be written, at most."""
        waiting = (
            len(call.tokens) - call.written
            for call in self._calls.values()
            if self._keep_prefixes or call.turn is not None
        )
        return max(waiting, default=0)

    def ended_turn_waits(self) -> bool:
        """Whether a turn has ended that another one follows: what there is to lose has just become more."""
        return any(
            call.turn is not None and call.turn.verdict.feedback is not None and not call.turn_written
            for call in self._calls.values()
        )

    def take(self) -> list[CallPart]:
        """Return what has come since the last time, and count it as written."""
        parts = []
        for number, call in list(self._calls.items()):
            if (part := self._part_of(number, call)) is not None:
                parts.append(part)
            # It is judged before the next one is begun, if at all. What is kept beyond that is kept for nothing: a state a
            # turn, of every rollout under way, is more than a process has room for.
            if call.finish_reason is not None and (call.turn_written or number < self._begun - 1):
                del self._calls[number]
        return parts

    def _part_of(self, number: int, call: _Call) -> CallPart | None:
        if not self._keep_prefixes and call.turn is None:
            return None
        tokens = call.tokens.part(call.written)
        ended = call.finish_reason if not call.end_written else None
        turn = call.turn if not call.turn_written else None
        if not len(tokens) and ended is None and turn is None:
            return None
        part = CallPart(self._attempt, number, call.written, call.prompt_digest, tokens, ended, turn)
        call.written += len(tokens)
        call.end_written |= ended is not None
        call.turn_written |= turn is not None
        return part


class ProgressJournal:
    """Writes the progress of a process's rollouts: every ``every_s`` seconds, and sooner when much has come.

    A rollout that ends before that costs nothing, and one that goes on costs each of its tokens once. A journal that
    cannot be written is given up: nothing is lost by it but time, after a crash.

    Parameters
    ----------
    journal:
        Where to, used from one thread at a time.
    every_s, every_tokens:
        What is written at the latest: after so long, and when one call has so many tokens more.
    """

    def __init__(
        self, journal: Journal, *, every_s: float, every_tokens: int, keep_prefixes: bool = True
    ) -> None:
        self._journal = journal
        self._every_s = every_s
        self._every_tokens = every_tokens
        self._keep_prefixes = keep_prefixes
        self._rollouts: dict[Attempt, RolloutProgress] = {}
        self._written_s = time.monotonic()
        self._writing: asyncio.Task[None] | None = None

    def begin(self, attempt: Attempt) -> RolloutProgress:
        """Return where an attempt's calls are to be reported. Call :meth:`end` when they are of no use any more."""
        rollout = self._rollouts[attempt] = RolloutProgress(attempt, keep_prefixes=self._keep_prefixes)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_for_ever(), name="progress-journal")
        return rollout

    def end(self, attempt: Attempt) -> None:
        """Forget an attempt: it is sealed, or was given up."""
        self._rollouts.pop(attempt, None)

    async def write(self) -> None:
        """Write what has come since the last time. Durable when this returns.

        Raises
        ------
        LogWriteError
            It could not be written.
        """
        parts = [part for rollout in self._rollouts.values() for part in rollout.take()]
        self._written_s = time.monotonic()
        if parts:
            await asyncio.to_thread(self._append, parts)

    def _append(self, parts: Sequence[CallPart]) -> None:
        for frame in _frames(parts):
            self._journal.append(parts_to_batch(frame))

    async def _write_for_ever(self) -> None:
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                if self.is_due():
                    await self.write()
        except LogWriteError as error:
            _logger.error("what unfinished rollouts generate is not kept any more: %s", error)
        except Exception:
            # Nobody waits for this task: it would end without a word.
            _logger.exception("what unfinished rollouts generate is not kept any more")

    def is_due(self) -> bool:
        """Whether it is time to write, or there is enough to."""
        if time.monotonic() - self._written_s >= self._every_s:
            return True
        return any(
            rollout.ended_turn_waits() or rollout.unwritten_tokens() >= self._every_tokens
            for rollout in self._rollouts.values()
        )


def _frames(parts: Sequence[CallPart]) -> Iterator[list[CallPart]]:
    """Cut parts into frames of bounded size: one write takes no more than 2 GiB. Rollouts of many turns that are resumed
    together bring all their states at once."""
    frame: list[CallPart] = []
    size = 0
    for part in parts:
        more = len(part.tokens) * _BYTES_PER_TOKEN + (len(part.turn.state) if part.turn is not None else 0)
        if frame and size + more > _BYTES_PER_FRAME:
            yield frame
            frame, size = [], 0
        frame.append(part)
        size += more
    if frame:
        yield frame


def open_progress_journal(
    directory: Path, settings: RowJournalSettings, recovery: RolloutRecoverySettings
) -> ProgressJournal:
    """Return the progress journal of this process. Nothing is written before the first token is worth it."""
    journal = Journal(
        LocalStore(),
        directory,
        PROGRESS,
        writer_version=package_version("kinlog"),
        segment_bytes=settings.segment_bytes,
        clock_us=lambda: time.time_ns() // 1000,
    )
    return ProgressJournal(
        journal,
        every_s=settings.progress_every_s,
        every_tokens=settings.progress_every_tokens,
        keep_prefixes=recovery.prefix == "resume",
    )
