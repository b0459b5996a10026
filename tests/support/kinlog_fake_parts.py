"""In-memory parts of a run, for tests of the controller that need no cluster. The real ones are tested in tests/e2e.

They keep the contracts of ``kinlog.controller.protocols``: rows are visible after their put, a saved data plane comes
back as it was, a worker's result depends on its order only.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kinlog.controller.protocols import Dataset, StreamingDataset, Workers
from kinlog.lineage.ledger import Cut
from kinlog.schemas.errors import DataPlaneError, DatasetError, WorkerLostError
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
from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.reasons import FinishReason, Partition, Reason, Validity
from kinlog.schemas.receipts import ModelCall, Receipt, canonical_key, staging_key
from kinlog.schemas.rows import NO_CALL, RowTag

Identity = tuple[int, int, int]
"""(group, generation, attempt)."""


class FakeItem(msgspec.Struct, frozen=True):
    sample_id: str
    task_name: str
    agent_name: str
    content_digest: bytes


class FakeDataset:
    """``size`` rows; even ones are of task "even" with agent "one", odd ones of task "odd" with agent "two"."""

    def __init__(self, size: int = 64, *, salt: str = "") -> None:
        self._size = size
        self._salt = salt
        self.fingerprint = digest_bytes(str(size).encode()).hex()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> FakeItem:
        odd = index % 2
        digest = digest_bytes(f"{index}{self._salt}".encode())
        return FakeItem(f"row-{index}", "odd" if odd else "even", "two" if odd else "one", digest)

    def resolve(self, sample_id: str) -> FakeItem:
        for index in range(self._size):
            if self[index].sample_id == sample_id:
                return self[index]
        raise DatasetError(f"no sample {sample_id}")


class FakeStream:
    """Rows that can only be read on, from any place. ``opened`` says from where."""

    fingerprint = "stream-1"
    task_names = frozenset({"even", "odd"})
    agent_names = frozenset({"one", "two"})

    def __init__(self, size: int, *, salt: str = "") -> None:
        self._rows = FakeDataset(size=max(size, 1), salt=salt)
        self._size = size
        self.opened: list[int] = []

    def open(self, draw_index: int) -> Iterator[FakeItem]:
        self.opened.append(draw_index)
        return (self._rows[index] for index in range(draw_index, self._size))


class FakeDataPlane:
    """Rows in a dictionary."""

    num_storage_units = 2

    def __init__(self) -> None:
        self.rows: dict[Partition, dict[str, RowTag]] = {p: {} for p in Partition}
        self.journal: dict[str, RowTag] = {}
        """Staged rows that outlive the data plane."""
        self.saves = 0
        self.closed = False
        self.fail_save: Exception | None = None
        self.on_clear: Callable[[Partition, list[str]], None] = lambda partition, keys: None

    def put(self, partition: Partition, key: str, tag: RowTag) -> None:
        existing = self.rows[partition].get(key)
        assert existing is None or existing == tag, f"{key} was rewritten"
        self.rows[partition][key] = tag

    async def list_rows(self, partition: Partition) -> Mapping[str, RowTag]:
        return dict(self.rows[partition])

    async def clear(self, partition: Partition, keys: Iterable[str], cut: Cut) -> int:
        cut.require()
        await asyncio.sleep(0)
        keys = list(keys)
        self.on_clear(partition, keys)
        return sum(self.rows[partition].pop(key, None) is not None for key in keys)

    async def save(self, directory: Path, metadata: Mapping[str, str | int], *, timeout_s: float) -> None:
        await asyncio.sleep(0)
        if self.fail_save is not None:
            raise self.fail_save
        self.saves += 1
        directory.mkdir()
        (directory / "rows.json").write_bytes(msgspec.json.encode(self.rows))

    async def load(self, directory: Path, *, timeout_s: float) -> None:
        try:
            data = (directory / "rows.json").read_bytes()
        except OSError as error:
            raise DataPlaneError(f"cannot load {directory}") from error
        self.rows = msgspec.json.decode(data, type=dict[Partition, dict[str, RowTag]])

    async def put_back(self, journal: Path, wanted: Mapping[str, RowTag]) -> PutBack:
        found = {key: tag for key, tag in wanted.items() if self.journal.get(key) == tag}
        self.rows[Partition.STAGING].update(found)
        return PutBack(num_rows=len(found), missing=tuple(sorted(wanted.keys() - found.keys())))

    async def ping(self) -> None: ...

    async def close(self) -> None:
        self.closed = True


class FakePool:
    """Generation workers whose answers are scripted by identity, and computed from the order otherwise."""

    def __init__(self, data_plane: FakeDataPlane) -> None:
        self._data_plane = data_plane
        self.weight_version = 0
        self.calls: list[RolloutOrder] = []
        self.answers: dict[Identity, Callable[[RolloutOrder], SiblingSealed | RolloutFailed]] = {}
        self.gates: dict[Identity, asyncio.Event] = {}
        self.aborted: list[Identity] = []
        """What was asked to stop. It goes on all the same: best effort may come to nothing."""
        self.running = 0
        self.max_running = 0
        self.delay_ticks: Callable[[RolloutOrder], int] = lambda order: 1

    def hold(self, group_id: int, generation: int, attempt: int) -> asyncio.Event:
        """Let an attempt wait until the returned event is set."""
        return self.gates.setdefault((group_id, generation, attempt), asyncio.Event())

    def fail(self, group_id: int, generation: int, attempt: int, reason: Reason) -> None:
        """Let an attempt fail."""

        def answer(order: RolloutOrder) -> RolloutFailed:
            return RolloutFailed(
                group_id=group_id, generation=generation, attempt=attempt, reason=reason, detail="scripted"
            )

        self.answers[group_id, generation, attempt] = answer

    def lose_worker(self, group_id: int, generation: int, attempt: int) -> None:
        """Let the worker of an attempt die."""

        def answer(order: RolloutOrder) -> SiblingSealed:
            raise WorkerLostError("generation-0 died")

        self.answers[group_id, generation, attempt] = answer

    def attempts(self) -> Counter[tuple[int, int]]:
        """Return how often each (group, generation) was generated."""
        return Counter((order.group_id, order.generation) for order in self.calls)

    async def available(self) -> None: ...

    def assign(self) -> str:
        return "generation-0"

    def abort(self, worker: str, order: RolloutOrder) -> None:
        self.aborted.append((order.group_id, order.generation, order.attempt))

    async def run(self, worker: str, order: RolloutOrder) -> SiblingSealed | RolloutFailed:
        identity = (order.group_id, order.generation, order.attempt)
        self.calls.append(order)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if identity in self.gates:
                await self.gates[identity].wait()
            for _ in range(self.delay_ticks(order)):
                await asyncio.sleep(0)
            if identity in self.answers:
                return self.answers[identity](order)
            return self.seal(order)
        finally:
            self.running -= 1

    def seal(self, order: RolloutOrder, *, validity: Validity = Validity.VALID) -> SiblingSealed:
        """Stage the row of an order's one model call, and return its seal."""
        tokens = 3 + (order.group_id * 7 + order.generation * 3) % 11
        digest = digest_bytes(
            f"{order.group_id}/{order.generation}/{order.seed}/{self.weight_version}".encode()
        )
        identity = (order.group_id, order.generation, order.attempt)
        tag = RowTag(
            group_id=order.group_id,
            generation=order.generation,
            attempt=order.attempt,
            call=0,
            digest=digest,
        )
        self._data_plane.put(Partition.STAGING, staging_key(*identity, 0), tag)
        call = ModelCall(0, -1, 5, tokens, self.weight_version, self.weight_version, digest)
        return SiblingSealed(
            group_id=order.group_id,
            generation=order.generation,
            attempt=order.attempt,
            weight_version=self.weight_version,
            max_weight_version=self.weight_version,
            receipt=Receipt((call,)),
            raw_reward=order.generation / 10,
            shaped_reward=order.generation / 20,
            prompt_tokens=5,
            completion_tokens=tokens,
            finish_reason=FinishReason.STOP,
            validity=validity,
        )

    async def probe(self) -> None: ...


class FakeFinalizer:
    def __init__(self, data_plane: FakeDataPlane) -> None:
        self._data_plane = data_plane
        self.calls: list[int] = []
        self.lose_answers = 0
        """How many answers get lost after the rows were put."""
        self.reject: dict[int, FinalizeRejected] = {}
        """Group -> what its next finalize answers."""

    async def available(self) -> None: ...

    async def finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        await asyncio.sleep(0)
        self.calls.append(order.group_id)
        if order.group_id in self.reject:
            return self.reject.pop(order.group_id)
        refs = []
        for sealed in order.siblings:
            calls = sealed.receipt.calls if sealed.receipt is not None else ()
            for call in calls:
                key = staging_key(sealed.group_id, sealed.generation, sealed.attempt, call.call)
                assert self._data_plane.rows[Partition.STAGING][key].digest == call.row_digest
            digest = digest_bytes(*(call.row_digest for call in calls))
            tag = RowTag(
                group_id=sealed.group_id,
                generation=sealed.generation,
                attempt=sealed.attempt,
                call=NO_CALL,
                digest=digest,
            )
            key = canonical_key(sealed.group_id, sealed.generation, sealed.attempt)
            self._data_plane.put(Partition.TRAINING, key, tag)
            refs.append(
                CanonicalRowRef(sealed.generation, sealed.attempt, 5 + sealed.completion_tokens, digest)
            )
        if self.lose_answers:
            self.lose_answers -= 1
            raise WorkerLostError("the finalizer died after it had put the rows")
        return tuple(refs)

    async def probe(self) -> None: ...


class FakeTrainer:
    """Its weights are the digest of everything it was trained on, in order: the strongest thing to compare."""

    def __init__(self, data_plane: FakeDataPlane, pool: FakePool) -> None:
        self._data_plane = data_plane
        self._pool = pool
        self.weights = b""
        self.step_number = 0
        self.steps: list[TrainOrder] = []
        self.gate: asyncio.Event | None = None

    async def step(self, order: TrainOrder) -> TrainMetrics:
        if self.gate is not None:
            await self.gate.wait()
        rows = self._data_plane.rows[Partition.TRAINING]
        digests = [rows[key].digest for key in order.row_keys]  # KeyError: a row was cleared too early
        await asyncio.sleep(0)
        self.weights = digest_bytes(self.weights, *digests)
        self.step_number += 1
        assert self.step_number == order.train_step
        self.steps.append(order)
        return TrainMetrics(
            train_step=order.train_step,
            weight_version=self.step_number,
            loss=0.0,
            grad_norm=0.0,
            clip_fraction=0.0,
            mean_raw_reward=0.0,
            mean_shaped_reward=0.0,
            rows=len(digests),
            mixed_rows=0,
            loss_tokens=0,
            token_lag=0.0,
            seconds=0.0,
        )

    async def publish(self, weight_version: int) -> None:
        self._pool.weight_version = weight_version

    async def save(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "trainer.json").write_bytes(msgspec.json.encode((self.step_number, self.weights.hex())))

    async def load(self, directory: Path) -> None:
        self.step_number, weights = msgspec.json.decode(
            (directory / "trainer.json").read_bytes(), type=tuple[int, str]
        )
        self.weights = bytes.fromhex(weights)

    async def probe(self) -> None: ...


class FakeParts:
    """One life's parts. ``data_plane`` and the workers exist once they were started."""

    data_plane: FakeDataPlane
    pool: FakePool
    finalizer: FakeFinalizer
    trainer: FakeTrainer

    def __init__(self, dataset: Dataset | StreamingDataset | None = None) -> None:
        self.dataset: Dataset | StreamingDataset = dataset or FakeDataset()
        self.prepare: Callable[[FakeParts], None] = lambda parts: None
        """Called when the workers exist: scripts them."""
        self.tamper: Callable[[FakeDataPlane], None] = lambda data_plane: None
        """Called at the end of a load: changes what the data plane holds."""

    async def start_data_plane(self) -> FakeDataPlane:
        self.data_plane = _TamperedDataPlane(self.tamper)
        return self.data_plane

    async def start_workers(self) -> Workers:
        self.pool = FakePool(self.data_plane)
        self.finalizer = FakeFinalizer(self.data_plane)
        self.trainer = FakeTrainer(self.data_plane, self.pool)
        self.prepare(self)
        return Workers(self.pool, self.finalizer, self.trainer)


class _TamperedDataPlane(FakeDataPlane):
    def __init__(self, tamper: Callable[[FakeDataPlane], None]) -> None:
        super().__init__()
        self._tamper = tamper

    async def load(self, directory: Path, *, timeout_s: float) -> None:
        await super().load(directory, timeout_s=timeout_s)
        self._tamper(self)
