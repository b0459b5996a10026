"""The tokens behind the examples of a step, as far as a row journal still has them."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.journal import ROWS, journal_batches, scan_journal
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.store import LocalStore
from kinlog.replay.checkpoints import JOURNAL_NAME
from kinlog.replay.examples.steps import StepExamples
from kinlog.schemas.errors import LogDamagedError

__all__ = ["CallTokens", "SiblingTokens", "tokens_of_step"]


class CallTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One model call of a sibling."""

    call: int
    prompt_token_ids: tuple[int, ...]
    """All that the policy was given, what it had generated before included."""
    completion_token_ids: tuple[int, ...]


class SiblingTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The model calls of a sibling as it was trained on: all of them."""

    group_id: int
    generation: int
    attempt: int
    calls: tuple[CallTokens, ...]


def tokens_of_step(run: RunDirectory, step: StepExamples) -> tuple[SiblingTokens, ...]:
    """Return the tokens of those siblings whose rows are all in a row journal, the run's own or a checkpoint's.

    A row counts that has the digest which the log has of it. A journal keeps rows until they are durable elsewhere, so
    those of the newest steps are there, and of older ones none.
    """
    wanted = {
        (group.group_id, sibling.generation, sibling.attempt, call): bytes.fromhex(digest)
        for group in step.groups
        for sibling in group.siblings
        for call, digest in enumerate(sibling.call_digests)
    }
    found: dict[tuple[int, int, int, int], CallTokens] = {}
    for directory in (run.journal, *sorted(run.checkpoints.glob(f"*/{JOURNAL_NAME}"))):
        if len(found) < len(wanted):
            found |= _rows_in(directory, wanted)
    siblings = []
    for group in step.groups:
        for sibling in group.siblings:
            identity = (group.group_id, sibling.generation, sibling.attempt)
            calls = [found.get((*identity, call)) for call in range(sibling.model_calls)]
            there = tuple(call for call in calls if call is not None)
            if there and len(there) == len(calls):
                siblings.append(
                    SiblingTokens(
                        group_id=group.group_id,
                        generation=sibling.generation,
                        attempt=sibling.attempt,
                        calls=there,
                    )
                )
    return tuple(siblings)


def _rows_in(
    directory: Path, wanted: dict[tuple[int, int, int, int], bytes]
) -> dict[tuple[int, int, int, int], CallTokens]:
    store, found = LocalStore(), {}
    group_ids = pa.array(sorted({group_id for group_id, *_ in wanted}), pa.int64())
    for batch in _batches(store, directory):
        for row in batch.filter(pc.is_in(batch.column("group_id"), group_ids)).to_pylist():
            identity = (row["group_id"], row["generation"], row["attempt"], row["call"])
            if wanted.get(identity) == row["row_digest"]:
                token_ids, prompt_tokens = row["token_ids"], row["prompt_tokens"]
                found[identity] = CallTokens(
                    call=row["call"],
                    prompt_token_ids=tuple(token_ids[:prompt_tokens]),
                    completion_token_ids=tuple(token_ids[prompt_tokens:]),
                )
    return found


def _batches(store: LocalStore, directory: Path) -> Iterable[pa.RecordBatch]:
    for name in filter(ROWS.owns, store.names(directory)):
        try:
            yield from journal_batches(scan_journal(store, directory / name))
        except (LogDamagedError, FileNotFoundError):
            continue  # it has no rows that one could believe, or its rows became durable elsewhere this moment
