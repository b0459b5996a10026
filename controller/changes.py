"""Waiting for a condition over the projection, outside of any cut."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Changes"]

T = TypeVar("T")


class Changes:
    """Wakes those who wait for the projection to change. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # in the order of asking

    def notify(self) -> None:
        """Something was recorded: let everybody look again."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait_for(self, condition: Callable[[], T | None]) -> T:
        """Return the condition's value as soon as it is not ``None``. What it says must be checked again in a cut."""
        while (value := condition()) is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[future] = None
            try:
                await future
            finally:
                self._waiting.pop(future, None)
        return value
