"""The finalizer worker: verifies a group's staged rows against its receipts, and publishes its canonical rows."""

import asyncio
from collections.abc import Mapping
from functools import cached_property

from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import DataPlaneError, NotAttachedError, RowCorruptError, RowsMissingError
from kinlog.schemas.events import CanonicalRowRef, SiblingSealed
from kinlog.schemas.orders import FinalizeOrder, FinalizeRejected
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import staging_key
from kinlog.workers.data_plane import DataPlane
from kinlog.workers.finalizer import build_canonical_row
from kinlog.workers.model import load_tokenizer
from kinlog.workers.rows import CanonicalRow, StagedRow, row_digest
from kinlog.workers.tasks import TaskMixture

__all__ = ["FinalizerWorker"]


class FinalizerWorker:
    """Made a Ray actor by ``kinlog.controller.ray_parts``."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.model)
        self._data_plane: DataPlane | None = None
        self._running: dict[FinalizeOrder, asyncio.Task[tuple[CanonicalRowRef, ...] | FinalizeRejected]] = {}

    @cached_property
    def _tasks(self) -> TaskMixture:
        """Made when the first placeholder needs its prompt, which is rare."""
        return TaskMixture(self._config.dataset)

    async def attach(self) -> None:
        """Join the data plane. Called once in each life of the process."""
        if self._data_plane is None:
            self._data_plane = await DataPlane.attach(self._config.data_plane)

    async def probe(self) -> None:
        """Answer: the event loop turns, and this life is attached."""
        self._attached()

    async def finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        """Publish a group's canonical rows: all of them, or none and the reason.

        Keys and contents follow from the order, and putting the same row again does nothing: driving a finalize again
        whose answer was lost gives the same N rows. One that is asked for while it is still under way is joined.
        """
        running = self._running.get(order)
        if running is None:
            running = asyncio.create_task(self._finalize(order))
            self._running[order] = running
            running.add_done_callback(lambda _: self._running.pop(order))
        return await asyncio.shield(running)

    async def _finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        data_plane = self._attached()
        keys = {result.generation: _staging_keys(result) for result in order.siblings}
        try:
            # All at once; which sibling a failure is about is found out one by one, which is rare.
            found = await data_plane.get_staged([key for of_sibling in keys.values() for key in of_sibling])
        except (RowsMissingError, RowCorruptError):
            for result in order.siblings:
                try:
                    await data_plane.get_staged(keys[result.generation])
                except RowsMissingError as error:
                    return _rejected(result, Reason.ROWS_MISSING, error)
                except RowCorruptError as error:
                    return _rejected(result, Reason.DIGEST_MISMATCH, error)
            raise
        rows: list[CanonicalRow] = []
        for result in order.siblings:
            staged = {found[key].call: found[key] for key in keys[result.generation]}
            try:
                rows.append(self._canonical_row(order, result, staged))
            except DataPlaneError as error:
                return _rejected(result, Reason.DIGEST_MISMATCH, error)
        await data_plane.put_canonical(rows)
        return tuple(
            CanonicalRowRef(row.generation, row.attempt, len(row.token_ids), row_digest(row)) for row in rows
        )

    def _attached(self) -> DataPlane:
        if self._data_plane is None:
            raise NotAttachedError("the finalizer was restarted, and is not attached yet")
        return self._data_plane

    def _canonical_row(
        self, order: FinalizeOrder, result: SiblingSealed, staged: Mapping[int, StagedRow]
    ) -> CanonicalRow:
        prompt_token_ids: list[int] = []
        if result.receipt is None:  # a placeholder has no tokens of its own
            prompt_token_ids = self._tokenizer.encode(self._tasks.resolve(order.prompt.sample_id).prompt)
        return build_canonical_row(
            group_id=result.group_id,
            generation=result.generation,
            attempt=result.attempt,
            draw_index=order.prompt.draw_index,
            receipt=result.receipt,
            staged=staged,
            prompt_token_ids=prompt_token_ids,
            validity=result.validity,
            raw_reward=result.raw_reward,
            shaped_reward=result.shaped_reward,
        )


def _staging_keys(result: SiblingSealed) -> list[str]:
    calls = result.receipt.calls if result.receipt is not None else ()
    return [staging_key(result.group_id, result.generation, result.attempt, call.call) for call in calls]


def _rejected(result: SiblingSealed, reason: Reason, error: Exception) -> FinalizeRejected:
    return FinalizeRejected(
        group_id=result.group_id, generation=result.generation, reason=reason, detail=str(error)
    )
