"""The progress journal, read: what earlier attempts of a sibling generated before they were cut off."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.journal import PROGRESS, Attempt, journal_batches, scan_journal
from kinlog.lineage.store import Store
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.settings import RolloutRecoverySettings
from kinlog.workers.model_calls import EarlierCall
from kinlog.workers.progress_rows import CallPart, parts_from_batch

__all__ = ["ProgressReader", "calls_of_parts", "usable_calls"]

_logger = logging.getLogger(__name__)


class ProgressReader:
    """Reads a run's progress journal, of all its workers. A segment is read and verified again only when it has grown.

    Parameters
    ----------
    directory:
        The run's progress directory. It may not exist.
    """

    def __init__(self, store: Store, directory: Path) -> None:
        self._store = store
        self._directory = directory
        self._read: dict[str, tuple[int, list[pa.RecordBatch]]] = {}
        """Segment -> how long it was, and its batches."""

    def newest(self, attempts: Sequence[Attempt]) -> tuple[EarlierCall, ...]:
        """Return the calls of the last of ``attempts`` that left any. Blocks on the disk.

        A segment that is damaged has none: nothing depends on it but how much is generated again.
        """
        self._refresh()
        for attempt in reversed(attempts):
            if calls := calls_of_parts(self._parts_of(attempt)):
                return calls
        return ()

    def _refresh(self) -> None:
        names = set(filter(PROGRESS.owns, self._store.names(self._directory)))
        self._read = {name: read for name, read in self._read.items() if name in names}
        for name in names:
            path = self._directory / name
            try:
                size = path.stat().st_size
                if name not in self._read or self._read[name][0] != size:
                    self._read[name] = size, list(journal_batches(scan_journal(self._store, path)))
            except FileNotFoundError:
                continue  # it was let go of meanwhile
            except LogDamagedError as error:
                _logger.warning("what unfinished rollouts had generated is not read: %s", error)
                self._read[name] = size, []

    def _parts_of(self, attempt: Attempt) -> list[CallPart]:
        parts: list[CallPart] = []
        for name in sorted(self._read):
            for batch in self._read[name][1]:
                of_attempt = pc.and_(
                    pc.equal(batch.column("group_id"), attempt[0]),
                    pc.and_(
                        pc.equal(batch.column("generation"), attempt[1]),
                        pc.equal(batch.column("attempt"), attempt[2]),
                    ),
                )
                parts += parts_from_batch(batch.filter(of_attempt))
        return parts


def calls_of_parts(parts: Iterable[CallPart]) -> tuple[EarlierCall, ...]:
    """Put the calls of one attempt together again, in order, up to the first of which something is missing."""
    calls: list[EarlierCall] = []
    for part in parts:
        if part.call == len(calls) and part.position == 0:
            calls.append(EarlierCall(part.prompt_digest, part.tokens.part(), part.finish_reason, part.turn))
            continue
        call = calls[part.call] if part.call < len(calls) else None
        if call is None or call.prompt_digest != part.prompt_digest or len(call.tokens) != part.position:
            break
        for token in part.tokens:
            call.tokens.append(*token)
        calls[part.call] = replace(
            call,
            finish_reason=part.finish_reason if call.finish_reason is None else call.finish_reason,
            turn=part.turn if call.turn is None else call.turn,
        )
    return tuple(calls)


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
