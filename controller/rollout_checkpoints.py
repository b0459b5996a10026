"""When rollout checkpoints are taken: at an interval, and whenever somebody asks for one."""

import asyncio

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.runtime import Runtime
from kinlog.schemas.errors import CheckpointError

__all__ = ["RolloutCheckpoints"]


class RolloutCheckpoints:
    """Takes rollout checkpoints for as long as it runs. Belongs to one event loop."""

    def __init__(self, runtime: Runtime, checkpointer: Checkpointer) -> None:
        self._runtime = runtime
        self._checkpointer = checkpointer
        self._asked: list[asyncio.Future[SavedCheckpoint]] = []
        self._asking = asyncio.Event()
        self._closed = False

    async def run(self) -> None:
        """Take them until cancelled.

        Raises
        ------
        CheckpointError
            Too many have failed in a row: the run must stop.
        LogWriteError
            The log failed.
        """
        every_s = self._runtime.config.checkpointing.rollout_every_s
        while True:
            await self._until_due(every_s)
            asked, self._asked = self._asked, []
            self._asking.clear()
            # Where nothing happens, a checkpoint would be the only thing that does, and the watchdog would never see that
            # the run is stuck.
            if not asked and not self._checkpointer.has_news:
                continue
            try:
                saved = await self._checkpointer.save_rollout()
            except BaseException as error:
                for future in asked:
                    if not future.done():
                        future.set_exception(CheckpointError(f"no checkpoint was taken: {error}"))
                raise
            for future in asked:
                if not future.done():
                    future.set_result(saved)

    async def take(self) -> SavedCheckpoint:
        """Have one taken as soon as possible, and return what it came to.

        Raises
        ------
        CheckpointError
            The run has ended, or ends, or takes no checkpoints.
        """
        if not self._runtime.config.checkpointing.enabled:
            raise CheckpointError("no checkpoint was taken: checkpointing.enabled is false")
        if self._closed:
            raise CheckpointError("no checkpoint was taken: the run has ended")
        future: asyncio.Future[SavedCheckpoint] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._asking.set()
        return await future

    def close(self) -> None:
        """Tell those who still wait that there will be none."""
        self._closed = True
        for future in self._asked:
            if not future.done():
                future.set_exception(CheckpointError("no checkpoint was taken: the run has ended"))

    async def _until_due(self, every_s: float | None) -> None:
        if every_s is None:
            await self._asking.wait()
            return
        pause = asyncio.ensure_future(self._runtime.sleep(every_s))
        asking = asyncio.ensure_future(self._asking.wait())
        try:
            await asyncio.wait({pause, asking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pause, asking):
                task.cancel()
            # Waited for, and not awaited: their cancellation could not be told from this task's own, which must end it.
            await asyncio.wait({pause, asking})
