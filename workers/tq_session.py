"""One process's connection to TransferQueue: starting, attaching, timed calls, native checkpoints, ending.

It knows nothing of rows. What it makes safe:

- TransferQueue has few time-outs of its own: after its controller's death most calls wait for ever. Every call here
  has one, and an error that names the call.
- There is one TransferQueue in a Ray cluster. It lives as long as the process that started it: let that be the
  longest-lived one, and the others attach. Closing it in *any* process ends it for all: only its owner may.
- Starting it with too few logical CPUs waits for ever: they are counted first.
- A failed load leaves live keys with other rows' data: a session whose load failed refuses everything but ``close``.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import ray

from kinlog.schemas.errors import ConfigError, DataPlaneError, DataPlaneTimeoutError, KinlogError
from kinlog.schemas.settings import DataPlaneSettings
from kinlog.workers import tq_native
from kinlog.workers.loop_thread import LoopThread, start_blocking
from kinlog.workers.tq_native import TqClient

__all__ = ["TqSession", "TqCall", "required_cpus"]

T = TypeVar("T")

_START_TIMEOUT_S = 240.0
"""Whoever starts it may give up sooner (``supervision.start_timeout_s``): on busy machines its imports alone take minutes."""
_SETTLE_TIMEOUT_S = 15.0
"""How long Ray may take to give back the name and the CPUs of a TransferQueue that was closed."""
_CLOSE_TIMEOUT_S = 30.0
_GRACE_S = 3.0
"""How long a call that was given up may take to clean up after itself."""
_POLL_INTERVAL_S = 0.05
_SHOWN_KEYS = 4
_CLOSED = "this process has closed its connection to TransferQueue"


@dataclass(frozen=True, slots=True)
class TqCall:
    """Which call an error is about."""

    name: str
    partition: str | None = None
    keys: Sequence[str] = ()

    def __str__(self) -> str:
        parts = [self.name]
        if self.partition is not None:
            parts.append(f"in partition {self.partition!r}")
        if self.keys:
            shown = ", ".join(self.keys[:_SHOWN_KEYS])
            more = len(self.keys) - _SHOWN_KEYS
            parts.append(f"of {len(self.keys)} keys ({shown}{f' and {more} more' if more > 0 else ''})")
        return " ".join(parts)


def required_cpus(settings: DataPlaneSettings) -> int:
    """Return the logical CPUs that TransferQueue's actors reserve: one for its controller, one for each unit."""
    return 1 + settings.num_storage_units


class TqSession:
    """This process's connection to the cluster's TransferQueue. Make one with :meth:`start` or :meth:`attach`."""

    def __init__(self, settings: DataPlaneSettings, client: TqClient, *, owner: bool) -> None:
        self._settings = settings
        self._client = client
        self._owner = owner
        self._refusal: str | None = None
        self._last_save: concurrent.futures.Future[None] | None = None
        self._loop_thread = LoopThread("kinlog-transfer-queue")

    @property
    def num_storage_units(self) -> int:
        """Storage units of this TransferQueue; a checkpoint loads only into as many as it was saved from."""
        return len(self._client.storage_manager.storage_unit_infos)

    @classmethod
    async def start(cls, settings: DataPlaneSettings) -> Self:
        """Start the cluster's TransferQueue, owned by this process: it ends when this process does.

        Raises
        ------
        DataPlaneError
            When Ray is not running here, another TransferQueue is, too few logical CPUs are free, or it does not start
            in time.
        """
        call = TqCall("start")
        _check_settings(settings)
        _check_ray(call)
        await _until(
            lambda: not tq_native.controller_exists(),
            f"{call}: a TransferQueue is already running in this Ray cluster, and there can be only one. Close it, or "
            "attach to it.",
        )
        needed = required_cpus(settings)
        cluster_cpus = ray.cluster_resources().get("CPU", 0.0)
        if cluster_cpus < needed:
            raise DataPlaneError(
                f"{call}: a controller and {settings.num_storage_units} storage units need {needed} logical CPUs, and the "
                f"Ray cluster has {cluster_cpus:g}. Start Ray with a larger num_cpus, or use fewer units."
            )
        await _until(
            lambda: ray.available_resources().get("CPU", 0.0) >= needed,
            f"{call}: a controller and {settings.num_storage_units} storage units need {needed} logical CPUs, and the Ray "
            f"cluster has {cluster_cpus:g}, but fewer are free. Start Ray with a larger num_cpus, or use fewer units.",
        )
        units = settings.num_storage_units
        try:
            client = await _blocking(call, lambda: tq_native.start(units), timeout_s=_START_TIMEOUT_S)
        except DataPlaneError:
            # Actors that were never scheduled hold their names, and the hung thread waits for them: without them it
            # fails and ends, and a later start does not attach to a ruin.
            await _blocking(call, lambda: tq_native.kill_actors(units), timeout_s=_CLOSE_TIMEOUT_S)
            raise
        session = cls(settings, client, owner=True)
        if session.num_storage_units != units:
            raise DataPlaneError(f"{call}: expected {units} storage units, found {session.num_storage_units}")
        return session

    @classmethod
    async def attach(cls, settings: DataPlaneSettings) -> Self:
        """Attach this process to the TransferQueue that another process of this Ray cluster started.

        Raises
        ------
        DataPlaneError
            When Ray is not running here, no TransferQueue is, or it does not answer in time.
        """
        call = TqCall("attach")
        _check_settings(settings)
        _check_ray(call)
        if not await _blocking(call, tq_native.controller_exists, timeout_s=settings.call_timeout_s):
            raise DataPlaneError(f"{call}: no TransferQueue is running in this Ray cluster. Start it first.")
        client = await _blocking(call, tq_native.attach, timeout_s=settings.call_timeout_s)
        return cls(settings, client, owner=False)

    async def run(self, call: TqCall, body: Callable[[TqClient], Coroutine[object, object, T]]) -> T:
        """Run one call on the session's own event loop, and return what it does.

        Raises
        ------
        DataPlaneError
            When the call failed, took longer than ``call_timeout_s``, or the session can no longer be used.
        """
        self._check_usable(call)
        timeout_s = self._settings.call_timeout_s
        try:
            return await self._loop_thread.run(
                lambda: body(self._client), timeout_s=timeout_s, grace_s=_GRACE_S
            )
        except KinlogError:
            raise
        except TimeoutError as error:
            raise _timed_out(call, timeout_s) from error
        except Exception as error:
            raise DataPlaneError(f"{call}: failed: {type(error).__name__}: {error}") from error

    async def ping(self) -> None:
        """Ask the controller, and every storage unit, for an answer.

        Raises
        ------
        DataPlaneError
            When one of them does not answer within ``call_timeout_s``.
        """

        async def body(client: TqClient) -> None:
            await client.async_get_partition_list()
            storage = client.storage_manager
            # Private, and the only question that a unit answers without touching data. Its worker thread answers, so
            # a unit whose process lives but no longer serves is noticed as well.
            probes = (
                storage._probe_storage_unit(target_storage_unit=unit) for unit in storage.storage_unit_infos
            )
            await asyncio.gather(*probes)

        await self.run(TqCall("ping"), body)

    async def save(self, directory: Path, metadata: Mapping[str, str | int], *, timeout_s: float) -> None:
        """Write TransferQueue's whole state to a new directory. Its files are not fsynced.

        Not a consistent cut: the controller is saved before the units. No clear, rewrite or tag change of visible rows
        may happen meanwhile, in any process. Puts of fresh keys may.

        A save that is given up goes on in its thread, and may write to ``directory`` at any later time. Until the
        thread ends further saves are refused; everything else works, as far as TransferQueue does.

        Parameters
        ----------
        directory:
            Absolute, not existing, and visible from every node of the cluster.
        metadata:
            Kept in the checkpoint's ``metadata.json``.
        timeout_s:
            Seconds until the save is given up.

        Raises
        ------
        DataPlaneError
            When it failed or took too long, or an earlier one is still running.
        """
        call = TqCall(f"save to {directory}")
        self._check_usable(call)
        if self._last_save is not None and not self._last_save.done():
            raise DataPlaneError(
                f"{call}: an earlier save was given up and is still running. If it never ends, a storage unit or the "
                "controller is dead: close, start again and load."
            )
        content = {**metadata, "num_storage_units": self.num_storage_units}
        self._last_save = start_blocking(
            "kinlog-transfer-queue-save", lambda: tq_native.save_checkpoint(directory, content)
        )
        await _result(call, self._last_save, timeout_s=timeout_s)

    async def load(self, directory: Path, *, timeout_s: float) -> None:
        """Replace the state of this TransferQueue, which must hold no keys, by a checkpoint's.

        Checkpoints are pickles: load only files whose digests a manifest vouches for.

        Raises
        ------
        DataPlaneError
            When this process is not the owner, keys exist, files are missing, or the number of units differs: nothing
            was changed then. Also when loading itself fails or takes too long: the state is then undefined, and the
            session refuses everything but :meth:`close`. Close, start again, and take an older checkpoint.
        """
        call = TqCall(f"load from {directory}")
        self._check_usable(call)
        if not self._owner:
            raise DataPlaneError(
                f"{call}: only the process that started TransferQueue loads, before others attach"
            )
        saved = await _blocking(
            call, lambda: tq_native.saved_unit_count(directory), timeout_s=self._settings.call_timeout_s
        )
        if saved != self.num_storage_units:
            raise DataPlaneError(
                f"{call}: it was saved from {saved} storage units, and this TransferQueue has "
                f"{self.num_storage_units}. Set data_plane.num_storage_units to {saved}, and start again."
            )
        listing = await self.run(call, lambda client: client.async_kv_list(None))
        keys = [key for partition in listing.values() for key in partition]
        if keys:
            # Loading is not transactional: halfway through, live keys hold other rows' data.
            raise DataPlaneError(
                f"{call}: this TransferQueue already holds {len(keys)} keys, the first of them {keys[:_SHOWN_KEYS]}. "
                "Close it, start a fresh one, and load into that."
            )
        self._refusal = f"a load from {directory} did not complete, and its state is undefined. Close it."
        await _blocking(call, lambda: tq_native.load_checkpoint(directory), timeout_s=timeout_s)
        self._refusal = None

    async def close(self) -> None:
        """End TransferQueue for every process, and wait until its name is free again. Idempotent.

        Before ``ray.shutdown()``: the other order leaves this process with handles of a cluster that is gone.

        Raises
        ------
        DataPlaneError
            When this process is not the owner (detach instead), or it did not end in time.
        """
        call = TqCall("close")
        if not self._owner:
            raise DataPlaneError(
                f"{call}: it would end TransferQueue for every process; this one may only detach"
            )
        if self._refusal == _CLOSED:
            return
        self._refusal = _CLOSED
        await _blocking(call, self._end_loop_thread, timeout_s=_CLOSE_TIMEOUT_S)
        await _blocking(call, tq_native.close, timeout_s=_CLOSE_TIMEOUT_S)
        await _until(
            lambda: not tq_native.controller_exists(),
            f"{call}: the controller did not end in {_SETTLE_TIMEOUT_S:g} s",
        )

    async def detach(self) -> None:
        """Let go of TransferQueue in this process only. Idempotent. A later :meth:`attach` makes a new connection.

        Raises
        ------
        DataPlaneError
            When this process is the owner: without it TransferQueue would end, in no defined order.
        """
        call = TqCall("detach")
        if self._owner:
            raise DataPlaneError(f"{call}: this process started TransferQueue; close it instead")
        if self._refusal == _CLOSED:
            return
        self._refusal = _CLOSED
        await _blocking(call, self._end_loop_thread, timeout_s=_CLOSE_TIMEOUT_S)
        await _blocking(call, lambda: tq_native.detach(self._client), timeout_s=_CLOSE_TIMEOUT_S)

    def _end_loop_thread(self) -> None:
        # First of all: the client's sockets belong to this loop, and destroying them under it is not safe.
        if not self._loop_thread.stop(timeout_s=_GRACE_S):
            raise DataPlaneError(f"the session's event loop did not stop in {_GRACE_S:g} s")

    def _check_usable(self, call: TqCall) -> None:
        if self._refusal is not None:
            raise DataPlaneError(f"{call}: refused: {self._refusal}")


def _check_settings(settings: DataPlaneSettings) -> None:
    if settings.call_timeout_s >= tq_native.UNIT_ANSWER_TIMEOUT_S:
        # When a storage unit stays silent that long, TransferQueue's clear logs it and frees the rows' indexes all the
        # same. They are reused at once, and the silent unit's late work overwrites other rows. We give up before.
        raise ConfigError(
            f"data_plane.call_timeout_s must be below {tq_native.UNIT_ANSWER_TIMEOUT_S}, found {settings.call_timeout_s}"
        )


def _check_ray(call: TqCall) -> None:
    if not ray.is_initialized():
        raise DataPlaneError(f"{call}: Ray is not running in this process. Call ray.init() first.")


def _timed_out(call: TqCall, timeout_s: float) -> DataPlaneTimeoutError:
    return DataPlaneTimeoutError(
        f"{call}: no answer in {timeout_s:g} s. TransferQueue's controller or a storage unit is dead or overloaded."
    )


async def _until(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait for Ray's view of names and CPUs, which trails what happened by up to some seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_TIMEOUT_S
    while not await asyncio.wrap_future(start_blocking("kinlog-ray-view", condition)):
        if loop.time() >= deadline:
            raise DataPlaneError(otherwise)
        await asyncio.sleep(_POLL_INTERVAL_S)


async def _blocking(call: TqCall, work: Callable[[], T], *, timeout_s: float) -> T:
    return await _result(
        call, start_blocking(f"kinlog-transfer-queue-{call.name}", work), timeout_s=timeout_s
    )


async def _result(call: TqCall, running: "concurrent.futures.Future[T]", *, timeout_s: float) -> T:
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await asyncio.wrap_future(running)
    except KinlogError as error:
        raise DataPlaneError(f"{call}: {error}") from error
    except Exception as error:
        if scope.expired():
            raise _timed_out(call, timeout_s) from error
        raise DataPlaneError(f"{call}: failed: {type(error).__name__}: {error}") from error
