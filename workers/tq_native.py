"""TransferQueue's own calls, as blocking functions, and the part of its client that kinlog uses, as protocols.

The only module that imports ``transfer_queue``. Nothing here has a time-out or can be cancelled, and most of it waits
for ever when TransferQueue's controller is dead: :mod:`kinlog.workers.tq_session` calls it from threads that it can
give up.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import ray

from kinlog.schemas.errors import DataPlaneError

__all__ = [
    "TqClient",
    "StorageManager",
    "RowsMeta",
    "TQ_ENVIRONMENT",
    "UNIT_ANSWER_TIMEOUT_S",
    "start",
    "attach",
    "save_checkpoint",
    "load_checkpoint",
    "saved_unit_count",
    "close",
    "detach",
    "controller_exists",
    "kill_actors",
]

#: Seconds that TransferQueue waits for a storage unit before it tries again, or gives up a clear.
UNIT_ANSWER_TIMEOUT_S = 200

#: Read by TransferQueue when it is imported, in every process of it. Processes that Ray starts inherit it from the
#: job's runtime environment: pass it there (``ray.init(runtime_env={"env_vars": dict(TQ_ENVIRONMENT)})``).
TQ_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # Its default of 8 is above the physical cores of a small machine, and each request then logs a warning.
        "TQ_NUM_THREADS": "1",
        # I/O threads of one client; 8 by default, in each of many workers.
        "TQ_CLIENT_ZMQ_IO_THREADS": "2",
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": str(UNIT_ANSWER_TIMEOUT_S),
    }
)

_CONTROLLER_NAME = "TransferQueueController"
_CONTROLLER_NAMESPACE = "transfer_queue"
_UNIT_NAME = "TransferQueueStorageUnit#{}"
_CHECKPOINT_FILES = ("metadata.json", "controller_state.pkl", "simple_storage/storage_unit_info.json")


class RowsMeta(Protocol):
    """What TransferQueue says of some keys: storage indexes, ready columns and tags, in the order of the keys."""

    size: int
    field_names: list[str]
    custom_meta: list[dict[str, object]]

    def select_samples(self, sample_indices: list[int]) -> "RowsMeta": ...
    def select_fields(self, field_names: list[str]) -> "RowsMeta": ...
    def update_custom_meta(self, custom_meta: list[dict[str, object]]) -> None: ...


class StorageManager(Protocol):
    """The payload side of a client. Its put and get, unlike the client's own, leave torch's thread count alone."""

    storage_unit_infos: Mapping[str, object]

    async def put_data(self, data: Any, metadata: RowsMeta) -> None: ...
    async def get_data(self, metadata: RowsMeta) -> Mapping[str, Any]: ...
    async def _probe_storage_unit(self, *, target_storage_unit: str) -> Mapping[str, object]: ...


class TqClient(Protocol):
    """TransferQueue's client: one for each process, and its methods may run on any event loop."""

    storage_manager: StorageManager

    async def async_kv_retrieve_meta(
        self, *, keys: list[str], partition_id: str, create: bool
    ) -> RowsMeta: ...
    async def async_kv_list(self, partition_id: str | None) -> dict[str, dict[str, dict[str, object]]]: ...
    async def async_set_custom_meta(self, metadata: RowsMeta) -> None: ...
    async def async_clear_samples(self, metadata: RowsMeta) -> None: ...
    async def async_get_partition_list(self) -> list[str]: ...
    def close(self) -> None: ...


def start(num_storage_units: int) -> TqClient:
    """Start the cluster's TransferQueue, owned by this process, and return this process's client.

    Waits for ever when Ray has too few logical CPUs, and attaches instead when one is running already.
    """
    transfer_queue = _import_transfer_queue()
    transfer_queue.init(
        {
            # Otherwise a request for more rows than there are sleeps 5 s in the controller's only request thread, and
            # everybody waits.
            "controller": {"polling_mode": True},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {"num_data_storage_units": num_storage_units},
            },
        }
    )
    return cast(TqClient, transfer_queue.get_client())


def attach() -> TqClient:
    """Return a client of the TransferQueue that is running. Waits for ever while that one is still starting."""
    transfer_queue = _import_transfer_queue()
    transfer_queue.init()
    return cast(TqClient, transfer_queue.get_client())


def save_checkpoint(directory: Path, metadata: Mapping[str, str | int]) -> None:
    """Write TransferQueue's native checkpoint to ``directory``: absolute, not existing, seen by every node."""
    if not directory.is_absolute() or directory.exists():
        raise DataPlaneError(f"{directory} must be an absolute path, and must not exist yet")
    _import_transfer_queue().save_checkpoint(directory, metadata=dict(metadata))


def load_checkpoint(directory: Path) -> None:
    """Replace TransferQueue's state by a native checkpoint's. Undefined state when it fails."""
    _import_transfer_queue().load_checkpoint(directory)


def saved_unit_count(directory: Path) -> int:
    """Return how many storage units a native checkpoint was saved from, once its files are all there."""
    for name in _CHECKPOINT_FILES:
        if not (directory / name).is_file():
            raise DataPlaneError(f"{directory} is no data plane checkpoint: {name} is missing")
    return len(json.loads((directory / _CHECKPOINT_FILES[-1]).read_bytes()))


def close() -> None:
    """Kill TransferQueue's actors, for every process that is attached."""
    _import_transfer_queue().close()


def detach(client: TqClient) -> None:
    """Forget this process's client, so that it can attach anew."""
    from transfer_queue import interface

    client.close()
    # There is no call for this: `transfer_queue.close` would kill the controller for everybody.
    interface._TQ_CLIENT = None
    interface._TQ_CONTROLLER = None
    interface._TQ_STORAGE = None


def controller_exists() -> bool:
    """Tell whether this Ray cluster has a TransferQueue, or one that is just starting or ending."""
    try:
        ray.get_actor(_CONTROLLER_NAME, namespace=_CONTROLLER_NAMESPACE)
    except ValueError:
        return False
    return True


def kill_actors(num_storage_units: int) -> None:
    """Kill what a start that never ended has made, by name: also actors that Ray has not scheduled yet."""
    names: list[tuple[str, str | None]] = [(_CONTROLLER_NAME, _CONTROLLER_NAMESPACE)]
    names += [(_UNIT_NAME.format(rank), None) for rank in range(num_storage_units)]
    for name, namespace in names:
        try:
            ray.kill(ray.get_actor(name, namespace=namespace))
        except ValueError:
            continue  # it never came to be


def _import_transfer_queue() -> Any:
    # Not at the top: the variables must be set before, and importing it takes seconds.
    for name, value in TQ_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import transfer_queue

    return transfer_queue
