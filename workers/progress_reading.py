"""The progress journal, read: what earlier attempts of a sibling generated before they were cut off."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from kinlog.lineage.journal import (
    PROGRESS,
    UNREADABLE,
    Attempt,
    journal_attempts,
    journal_batches,
    scan_journal,
)
from kinlog.lineage.store import Store
from kinlog.schemas.settings import RolloutRecoverySettings
from kinlog.workers.model_calls import EarlierCall
from kinlog.workers.progress_rows import CallPart, parts_from_batch

__all__ = ["ProgressReader", "calls_of_parts", "usable_calls"]

_logger = logging.getLogger(__name__)


class ProgressReader:
    """Reads a run's progress journal, of all its workers. Belongs to one event loop, which it does not hold up.

    Orders that come together are read for together, and nothing is kept but whose tokens are in which segment: what a
    restart goes on from may be far more than one process has room for.

    Parameters
    ----------
    directory:
        The run's progress directory. It may not exist.
    """

    def __init__(self, store: Store, directory: Path) -> None:
        self._store = store
        self._directory = directory
        self._one_at_a_time = asyncio.Lock()
        self._wanted: set[Attempt] = set()
        """By those who wait for their turn."""
        self._found: dict[Attempt, tuple[EarlierCall, ...]] = {}
        """What was read for those who still wait."""
        self._attempts: dict[str, tuple[int, frozenset[Attempt]]] = {}
        """Segment -> how long it was, and whose tokens were in it."""

    async def newest(self, attempts: Sequence[Attempt]) -> tuple[EarlierCall, ...]:
        """Return the calls of the last of ``attempts`` that left any.

        A segment that cannot be read has none: nothing depends on it but how much is generated again.
        """
        self._wanted.update(attempts)
        async with self._one_at_a_time:
            if not self._found.keys() >= set(attempts):
                wanted, self._wanted = self._wanted.union(attempts), set()
                self._found = await asyncio.to_thread(self._read, wanted)
            found = [self._found.pop(attempt) for attempt in attempts]
        return next((calls for calls in reversed(found) if calls), ())

    def _read(self, wanted: Set[Attempt]) -> dict[Attempt, tuple[EarlierCall, ...]]:
        """Read every segment that has something of these attempts. A segment without is read again only when it has
        grown."""
        parts: dict[Attempt, list[CallPart]] = {attempt: [] for attempt in wanted}
        names = list(filter(PROGRESS.owns, self._store.names(self._directory)))
        self._attempts = {name: self._attempts[name] for name in names if name in self._attempts}
        for name in names:
            for part in self._parts_in(name, wanted):
                parts[part.attempt].append(part)
        return {attempt: calls_of_parts(of_attempt) for attempt, of_attempt in parts.items()}

    def _parts_in(self, name: str, wanted: Set[Attempt]) -> list[CallPart]:
        path = self._directory / name
        try:
            size = path.stat().st_size
            known = self._attempts.get(name)
            if known is not None and known[0] == size and known[1].isdisjoint(wanted):
                return []
            journal = scan_journal(self._store, path)
            self._attempts[name] = size, journal_attempts(journal)
            return [part for batch in journal_batches(journal) for part in parts_from_batch(batch, wanted)]
        except FileNotFoundError:
            return []  # it was let go of meanwhile
        except UNREADABLE as error:
            _logger.warning("what unfinished rollouts had generated is not read: %s: %s", name, error)
            return []


def calls_of_parts(parts: Iterable[CallPart]) -> tuple[EarlierCall, ...]:
    """Put the calls of one attempt together again, in order, up to the first that is missing.

    Parts of calls that were made side by side are mixed. Those of one call follow each other.
    """
    calls: list[EarlierCall] = []
    in_order = sorted(parts, key=lambda part: part.call)
    for number, of_call in groupby(in_order, key=lambda part: part.call):
        call = _call_of_parts(of_call) if number == len(calls) else None
        if call is None:
            break
        calls.append(call)
    return tuple(calls)


def _call_of_parts(parts: Iterator[CallPart]) -> EarlierCall | None:
    """Put a call together, up to the first part that is missing; ``None`` when that is the first of all."""
    first = next(parts)
    if first.position != 0:
        return None
    call = EarlierCall(first.prompt_digest, first.tokens.part(), first.finish_reason, first.turn)
    for part in parts:
        if call.prompt_digest != part.prompt_digest or len(call.tokens) != part.position:
            break
        for token in part.tokens:
            call.tokens.append(*token)
        call = replace(
            call,
            finish_reason=part.finish_reason if call.finish_reason is None else call.finish_reason,
            turn=part.turn if call.turn is None else call.turn,
        )
    return call


def usable_calls(
    calls: Sequence[EarlierCall],
    recovery: RolloutRecoverySettings,
    *,
    newest_weight_version: int | None = None,
) -> tuple[EarlierCall, ...]:
    """Return what of an earlier attempt's calls may be used again.

    Parameters
    ----------
    recovery:
        ``turn: discard`` forgets what was judged; ``prefix: discard`` ends before the first call that was not.
    newest_weight_version:
        Tokens that newer weights sampled are left out, and all that was generated after them.
    """
    usable: list[EarlierCall] = []
    for call in calls:
        tokens = call.tokens
        if newest_weight_version is not None:
            tokens = tokens.up_to_version(newest_weight_version)
        if len(tokens) < len(call.tokens):
            call = replace(call, tokens=tokens, finish_reason=None, turn=None)
        if recovery.turn == "discard":
            call = replace(call, turn=None)
        if call.turn is None and (recovery.prefix == "discard" or not len(tokens)):
            break
        usable.append(call)
        if call.finish_reason is None:
            break
    return tuple(usable)
