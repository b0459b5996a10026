"""Calls that always come back: an event loop in a daemon thread, and blocking calls in daemon threads.

A thread cannot be killed. What a time-out gives is control for the caller, not an end to the work: the thread of a
hung call stays, so it must be a daemon. A thread pool's threads are joined at interpreter exit, and one hung call
would keep the process for ever.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

__all__ = ["LoopThread", "start_blocking"]

T = TypeVar("T")


def start_blocking(name: str, call: Callable[[], T]) -> "concurrent.futures.Future[T]":
    """Start ``call`` in a new daemon thread, and return its future, which tells when the thread is really done."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    # Marked as running at once: a caller who gives up cancels only its own wait, and the future goes on telling the
    # truth about the thread.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised again in whoever waits for the future
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


class LoopThread:
    """An event loop of its own, in a daemon thread, for coroutines that must not run on the caller's loop.

    Decoding a listing of 10,000 rows, or encoding a batch of 16 MB, takes tens of milliseconds: on the caller's loop
    every rollout would wait for it.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(
        self, body: Callable[[], Coroutine[object, object, T]], *, timeout_s: float, grace_s: float
    ) -> T:
        """Run ``body()`` on this thread's loop, and return or raise what it does.

        Parameters
        ----------
        body:
            Makes the coroutine. When it is given up it is cancelled, may clean up, and is waited for.
        timeout_s:
            Seconds until it is given up.
        grace_s:
            Seconds that it then has to clean up. A caller who is cancelled also waits for the cleaning up, and no
            longer than this.

        Raises
        ------
        TimeoutError
            When ``body`` took longer than ``timeout_s``, or the thread's loop did not answer.
        """
        handed: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await body()

        def launch() -> None:
            task = self._loop.create_task(bounded())
            tasks.append(task)
            task.add_done_callback(lambda done: _hand_over(done, handed))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(launch)
        # Not `run_coroutine_threadsafe`: its future calls itself cancelled as soon as that is asked for, while the
        # coroutine is still cleaning up.
        waiter = asyncio.wrap_future(handed)
        try:
            async with asyncio.timeout(timeout_s + grace_s):
                return await asyncio.shield(waiter)
        except (TimeoutError, asyncio.CancelledError):
            if not waiter.done():
                self._loop.call_soon_threadsafe(cancel)
                await asyncio.wait({waiter}, timeout=grace_s)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # the caller gets its own; this one would be reported as never retrieved
            raise

    def stop(self, timeout_s: float) -> bool:
        """Cancel what runs, stop the loop, and return whether its thread ended within ``timeout_s`` seconds. Blocks."""
        if not self._thread.is_alive():
            return True

        def wind_down() -> None:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            gathered = asyncio.gather(*tasks, return_exceptions=True) if tasks else None
            if gathered is None:
                self._loop.stop()
            else:
                gathered.add_done_callback(lambda _: self._loop.stop())

        self._loop.call_soon_threadsafe(wind_down)
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def _hand_over(task: "asyncio.Task[T]", handed: "concurrent.futures.Future[T]") -> None:
    if not handed.set_running_or_notify_cancel():
        return  # the caller's loop is gone
    if task.cancelled():
        handed.set_exception(asyncio.CancelledError())
        return
    error = task.exception()
    if error is not None:
        handed.set_exception(error)
    else:
        handed.set_result(task.result())
