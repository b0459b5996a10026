"""Staging in groups: rows that finish while a put is under way go together in the next one.

One put costs about as much for one row as for thirty-two: a sibling that finishes alone must not pay for it alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kinlog.workers.rows import StagedRow

__all__ = ["StagingQueue"]


class StagingQueue:
    """Groups the puts of one process. Belongs to one event loop.

    Parameters
    ----------
    put:
        Puts rows, and returns once all of them are visible.
    """

    def __init__(self, put: Callable[[Sequence[StagedRow]], Awaitable[None]]) -> None:
        self._put = put
        self._waiting: list[tuple[Sequence[StagedRow], asyncio.Future[None]]] = []
        self._putting: asyncio.Task[None] | None = None

    async def stage(self, rows: Sequence[StagedRow]) -> None:
        """Put rows, and return once they are visible.

        Raises
        ------
        DataPlaneError
            The put that they were part of failed: nothing may be built on any of its rows.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, future))
        if self._putting is None:
            self._putting = asyncio.create_task(self._put_waiting())
        await future

    async def _put_waiting(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    await self._put([row for rows, _ in batch for row in rows])
                except Exception as error:  # noqa: BLE001 - everybody whose rows were in it is told
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                else:
                    for _, future in batch:
                        if not future.done():
                            future.set_result(None)
        finally:
            self._putting = None
