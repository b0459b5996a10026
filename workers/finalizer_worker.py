"""The finalizer worker: verifies a group's staged rows against its receipts, and publishes its canonical rows."""

from collections.abc import Mapping

from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import DataPlaneError, RowsMissingError
from kinlog.schemas.events import CanonicalRowRef, SiblingSealed
from kinlog.schemas.orders import FinalizeOrder, FinalizeRejected
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import staging_key
from kinlog.workers.data_plane import DataPlane
from kinlog.workers.finalizer import build_canonical_row
from kinlog.workers.rows import CanonicalRow, StagedRow, row_digest

__all__ = ["FinalizerWorker"]


class FinalizerWorker:
    """Made a Ray actor by ``kinlog.controller.launch``."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._data_plane: DataPlane | None = None

    async def attach(self) -> None:
        """Join the data plane. Called once in each life of the process."""
        if self._data_plane is None:
            self._data_plane = await DataPlane.attach(self._config.data_plane)

    async def probe(self) -> None:
        """Answer: the event loop turns."""

    async def finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        """Publish a group's canonical rows: all of them, or none and the reason.

        Keys and contents follow from the order, and putting the same row again does nothing: driving a finalize again
        whose answer was lost gives the same N rows.
        """
        assert self._data_plane is not None, "attach() comes first"
        owners = {
            staging_key(result.group_id, result.generation, result.attempt, call.call): (result, call.call)
            for result in order.siblings
            for call in (result.receipt.calls if result.receipt is not None else ())
        }
        staged: dict[int, dict[int, StagedRow]] = {result.generation: {} for result in order.siblings}
        try:
            for key, row in (await self._data_plane.get_staged(list(owners))).items():
                result, call = owners[key]
                staged[result.generation][call] = row
        except RowsMissingError:
            # Which sibling it is that lacks rows is found out one by one: this is rare.
            for result in order.siblings:
                keys = [key for key, (owner, _) in owners.items() if owner is result]
                try:
                    await self._data_plane.get_staged(keys)
                except RowsMissingError as error:
                    return _rejected(result, Reason.ROWS_MISSING, error)
            raise
        rows: list[CanonicalRow] = []
        for result in order.siblings:
            try:
                rows.append(_canonical_row(order, result, staged[result.generation]))
            except RowsMissingError as error:
                return _rejected(result, Reason.ROWS_MISSING, error)
            except DataPlaneError as error:
                return _rejected(result, Reason.DIGEST_MISMATCH, error)
        await self._data_plane.put_canonical(rows)
        return tuple(
            CanonicalRowRef(row.generation, row.attempt, len(row.token_ids), row_digest(row)) for row in rows
        )


def _canonical_row(
    order: FinalizeOrder, result: SiblingSealed, staged: Mapping[int, StagedRow]
) -> CanonicalRow:
    return build_canonical_row(
        group_id=result.group_id,
        generation=result.generation,
        attempt=result.attempt,
        draw_index=order.prompt.draw_index,
        receipt=result.receipt,
        staged=staged,
        prompt_token_ids=(),
        raw_reward=result.raw_reward,
        shaped_reward=result.shaped_reward,
    )


def _rejected(result: SiblingSealed, reason: Reason, error: Exception) -> FinalizeRejected:
    return FinalizeRejected(
        group_id=result.group_id, generation=result.generation, reason=reason, detail=str(error)
    )
