"""What the controller asks of its workers. Real ones live in ``kinlog.workers``, and ``launch`` puts them in."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from kinlog.lineage.ledger import Cut
from kinlog.schemas.events import CanonicalRowRef, SiblingSealed
from kinlog.schemas.orders import (
    FinalizeOrder,
    FinalizeRejected,
    PutBack,
    RolloutFailed,
    RolloutOrder,
    TrainMetrics,
    TrainOrder,
)
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import Partition
from kinlog.schemas.rows import RowTag

__all__ = [
    "Dataset",
    "DatasetItem",
    "StreamingDataset",
    "Prompts",
    "DataPlane",
    "RolloutPool",
    "Finalizer",
    "Trainer",
    "Workers",
    "Parts",
]


class DatasetItem(Protocol):
    """A row of the dataset, as far as the controller needs it."""

    @property
    def sample_id(self) -> str: ...
    @property
    def task_name(self) -> str: ...
    @property
    def agent_name(self) -> str: ...
    @property
    def content_digest(self) -> bytes: ...


class Dataset(Protocol):
    """A map-style dataset."""

    @property
    def fingerprint(self) -> str:
        """Digest (hex) of its definition."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, sample_index: int, /) -> DatasetItem: ...

    def resolve(self, sample_id: str) -> DatasetItem:
        """Return the row of that name, or raise ``DatasetError``. Called at every draw, too: a name that belongs to two
        rows is found out by it."""
        ...


@runtime_checkable
class StreamingDataset(Protocol):
    """A dataset that is read in one order only, and that can be opened at any place of it."""

    @property
    def fingerprint(self) -> str:
        """Digest (hex) of its definition."""
        ...

    @property
    def task_names(self) -> Collection[str]:
        """Every task that its rows may be of: granularity overrides are checked against them, before it is read."""
        ...

    @property
    def agent_names(self) -> Collection[str]:
        """Every agent that its rows may be for, likewise."""
        ...

    def open(self, draw_index: int) -> Iterator[DatasetItem]:
        """Return the rows from the ``draw_index``-th on, from 0: the stream's restored state follows from it.

        It is read in a thread.
        """
        ...


class Prompts(Protocol):
    """The draw order of a run: draw ``i`` is the same prompt in every life of it."""

    async def prepare(self, draw_index: int) -> None:
        """Have what a draw needs at hand, however long that takes: :meth:`draw` is called inside a cut."""
        ...

    def has(self, draw_index: int) -> bool:
        """Whether there is such a draw, as far as is known without waiting."""
        ...

    def draw(self, draw_index: int) -> PromptRef | None:
        """Return the prompt of a draw that was prepared, ``None`` when the dataset is exhausted."""
        ...

    def check(self, prompt: PromptRef) -> None:
        """Resolve a restored prompt again. Raises ``DatasetError`` when it is not what it was."""
        ...


class DataPlane(Protocol):
    """The owner's side of the data plane."""

    @property
    def num_storage_units(self) -> int: ...

    async def list_rows(self, partition: Partition) -> Mapping[str, RowTag]:
        """Return the visible rows."""
        ...

    async def clear(self, partition: Partition, keys: Iterable[str], cut: Cut) -> int:
        """Remove rows; absent ones are passed over. Returns how many were there."""
        ...

    async def save(self, directory: Path, metadata: Mapping[str, str | int], *, timeout_s: float) -> None: ...
    async def load(self, directory: Path, *, timeout_s: float) -> None: ...

    async def put_back(self, journal: Path, wanted: Mapping[str, RowTag]) -> PutBack:
        """Put the wanted staged rows back that the row journal in this directory has, before anyone uses them."""
        ...

    async def ping(self) -> None: ...
    async def close(self) -> None: ...


class RolloutPool(Protocol):
    """The generation workers."""

    async def available(self) -> None:
        """Return when some worker is ready: to wait for a restart is charged to nobody.

        Raises
        ------
        WorkerLostError
            None came back in time.
        """
        ...

    def assign(self) -> str:
        """Return the name of the worker that the next rollout should go to."""
        ...

    async def run(self, worker: str, order: RolloutOrder) -> SiblingSealed | RolloutFailed:
        """Run one attempt. Its rows are staged, and acknowledged, before this returns.

        Raises
        ------
        WorkerLostError
            The worker died.
        """
        ...

    def abort(self, worker: str, order: RolloutOrder) -> None:
        """Have a worker stop an attempt that nobody waits for any more, as far as it can; returns at once.

        The attempt's call then ends soon: with a failure, or with a result that came first.
        """
        ...

    async def probe(self) -> None:
        """Raise when not one worker answers."""
        ...


class Finalizer(Protocol):
    """Turns staged rows into canonical ones. Idempotent: keys follow from identity."""

    async def available(self) -> None:
        """Return when the finalizer is ready. Raises ``WorkerLostError`` when it did not come back in time."""
        ...

    async def finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        """Verify, build and put the group's canonical rows, before this returns.

        Raises
        ------
        WorkerLostError
            The worker died: the outcome is unknown, and asking again is safe.
        """
        ...

    async def probe(self) -> None: ...


class Trainer(Protocol):
    """The optimizer, and the publication of its weights to the generation workers."""

    async def step(self, order: TrainOrder) -> TrainMetrics: ...

    async def publish(self, weight_version: int) -> None:
        """Give the generation workers the current weights, as this version."""
        ...

    async def save(self, directory: Path) -> None: ...
    async def load(self, directory: Path) -> None: ...
    async def probe(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a running controller."""

    pool: RolloutPool
    finalizer: Finalizer
    trainer: Trainer


class Parts(Protocol):
    """Makes what a controller runs on: the one seam between it and the training stack."""

    @property
    def dataset(self) -> Dataset | StreamingDataset: ...

    async def start_data_plane(self) -> DataPlane:
        """Start an empty data plane, owned by this process."""
        ...

    async def start_workers(self) -> Workers:
        """Start the workers, attached to the data plane."""
        ...
