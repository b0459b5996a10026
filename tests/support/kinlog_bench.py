"""One task of a controller on the bench: a real runtime around a ledger in memory, with nothing else running.

It needs no thread and no file, so that a test may step through it in any interleaving.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

from kinlog_builders import FreeCut, ManualClock, Story
from kinlog_fake_parts import FakeDataPlane, FakeDataset, FakeFinalizer, FakePool, FakeTrainer
from kinlog_interleavings import ticks
from kinlog_lives import run_config

from kinlog.controller.barrier import Barrier
from kinlog.controller.changes import Changes
from kinlog.controller.group_driver import GroupDriver
from kinlog.controller.prompt_source import PromptSource
from kinlog.controller.runtime import Runtime
from kinlog.controller.samplers import build_sampler
from kinlog.controller.worker_budget import WorkerBudget
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.lineage.writer import LogWriter
from kinlog.schemas.codec import EncodedEvent, decode_event
from kinlog.schemas.config import RunConfig
from kinlog.schemas.events import DatasetExhausted, Event, GroupDropped, Position, RetryBudget
from kinlog.schemas.reasons import Granularity, Reason

E = TypeVar("E", bound=Event)


class MemoryWriter:
    """Keeps events in a list. They become durable a little later, in order, or not before they are let."""

    epoch = 1

    def __init__(self, last_seq: int = 0) -> None:
        self.last_seq = last_seq
        self.acknowledged_seq = last_seq
        self.events: list[Event] = []
        self.held = False
        """While set, nothing becomes durable."""

    def append(self, events: Sequence[EncodedEvent], time_us: int) -> "MemoryTicket":
        self.events += [decode_event(event) for event in events]
        self.last_seq += len(events)
        return MemoryTicket(self, self.last_seq)

    async def position(self) -> Position:
        seq = self.last_seq
        await MemoryTicket(self, seq).durable()
        return Position(self.epoch, seq, 0)


class MemoryTicket:
    def __init__(self, writer: MemoryWriter, seq: int) -> None:
        self._writer = writer
        self.seq = seq

    async def durable(self) -> None:
        while self._writer.acknowledged_seq < self.seq:
            await asyncio.sleep(0)
            if not self._writer.held:
                self._writer.acknowledged_seq = max(self._writer.acknowledged_seq, self.seq)


class Bench:
    """A runtime on in-memory parts, and a story told to its ledger."""

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        writer: LogWriter | None = None,
        projection: Projection | None = None,
        data_plane: FakeDataPlane | None = None,
        dataset: FakeDataset | None = None,
    ) -> None:
        self.config = config or run_config()
        projection = projection or Projection()
        self.writer = MemoryWriter(projection.last_seq)
        self.data_plane = data_plane or FakeDataPlane()
        self.pool = FakePool(self.data_plane)
        self.finalizer = FakeFinalizer(self.data_plane)
        self.trainer = FakeTrainer(self.data_plane, self.pool)
        self.slept_s: list[float] = []
        """Every pause that the runtime took."""
        changes = Changes()
        self.runtime = Runtime(
            config=self.config,
            directory=RunDirectory(Path("nowhere")),
            ledger=Ledger(projection, writer or cast(LogWriter, self.writer), ManualClock(), changes.notify),
            barrier=Barrier(),
            changes=changes,
            budget=WorkerBudget(self.config.rollout.max_inflight_siblings),
            prompts=PromptSource(dataset or FakeDataset(), seed=0, max_epochs=self.config.dataset.max_epochs),
            sampler=build_sampler(self.config.sampler, groups_per_step=self.config.trainer.groups_per_step),
            data_plane=self.data_plane,
            pool=self.pool,
            finalizer=self.finalizer,
            trainer=self.trainer,
            clock_us=ManualClock(),
            sleep=self._sleep,
        )
        self.driver = GroupDriver(self.runtime)
        self.story = Story(self.runtime.ledger)

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0)

    @property
    def p(self) -> Projection:
        return self.runtime.projection

    def restarted(self) -> "Bench":
        """Another life, from what is in the log; what ran is superseded, as a restart does."""
        life = Bench(
            self.config,
            projection=decode_projection(encode_projection(self.p)),
            data_plane=self.data_plane,
        )
        for group in list(life.p.live_groups()):
            for sibling in group.siblings.values():
                if sibling.running:
                    life.story.supersede(group.group_id, sibling.generation, Reason.CONTROLLER_RESTART)
        return life

    def admitted(self, *, siblings: int = 3, granularity: Granularity = Granularity.SIBLING) -> int:
        """A fresh group, ready to be driven."""
        settings = self.config.rollout
        budget = RetryBudget(settings.max_infrastructure_retries, settings.max_data_retries)
        group_id = self.story.reserve(siblings=siblings, granularity=granularity, budget=budget)
        self.story.admit(group_id)
        return group_id

    def exhaust(self) -> None:
        """Let the dataset end at the last draw."""
        self.runtime.prompts._max_epochs = 0
        self.runtime.ledger.commit(FreeCut(), DatasetExhausted(draw_cursor=self.p.draw_cursor))

    def drop(self, group_id: int, reason: Reason = Reason.EVICTED) -> None:
        """Let a group leave, as another part of a controller may at any time."""
        self.runtime.ledger.commit(FreeCut(), GroupDropped(group_id=group_id, reason=reason))

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.writer.events if isinstance(event, kind)]

    async def until_called(self, number: int) -> None:
        """Wait until the workers have got this many calls."""
        async with asyncio.timeout(600):
            while len(self.pool.calls) < number:
                await ticks(1)
