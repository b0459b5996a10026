"""Lives of a run on in-memory parts: started or resumed, killed, and looked at."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from kinlog_fake_parts import FakeParts

from kinlog.controller.single_controller import SingleController
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection
from kinlog.replay.projection import project
from kinlog.replay.recovery.report import RecoveryReport
from kinlog.schemas.config import RunConfig
from kinlog.schemas.events import Event, RecordedEvent
from kinlog.schemas.settings import DatasetSettings, TaskSettings

E = TypeVar("E", bound=Event)


def run_config(**changes: object) -> RunConfig:
    """A small run: 4 steps of 2 groups of 3 siblings, a checkpoint at every second step. ``rollout__x=1`` sets
    ``rollout.x``."""
    data: dict[str, object] = {
        "dataset": DatasetSettings(
            tasks=(
                TaskSettings(name="even", generator="none", agent="one"),
                TaskSettings(name="odd", generator="none", agent="two"),
            )
        ),
    }
    defaults = {
        "trainer__max_steps": 4,
        "trainer__groups_per_step": 2,
        "rollout__num_generations": 3,
        "rollout__max_live_groups": 6,
        "rollout__max_inflight_siblings": 12,
        "checkpointing__every_steps": 2,
        "supervision__retry_backoff_s": 0.001,
        "log__segment_bytes": 65_536,
    }
    sections: dict[str, dict[str, object]] = {}
    for name, value in (defaults | changes).items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = value
    config = msgspec.convert(
        msgspec.to_builtins(RunConfig(**data)),  # type: ignore[arg-type]
        RunConfig,
    )
    for section, values in sections.items():
        part = msgspec.structs.replace(getattr(config, section), **values)
        config = msgspec.structs.replace(config, **{section: part})
    return config


class Life:
    """One life of a run, from its start or restart to its end, which may be sudden."""

    def __init__(self, path: Path, config: RunConfig | None = None, parts: FakeParts | None = None) -> None:
        self.config = config or run_config()
        self.directory = RunDirectory(path)
        self.parts = parts or FakeParts()
        self.controller = SingleController(self.config, self.directory, self.parts)
        self.report: RecoveryReport | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def p(self) -> Projection:
        runtime = self.controller._runtime
        assert runtime is not None
        return runtime.projection

    async def begin(self, *, resume: bool) -> "Life":
        if resume:
            self.report = await self.controller.resume()
        else:
            await self.controller.start()
        return self

    async def train(self) -> "Life":
        """Run to the end, and close in order."""
        await self.controller.run()
        await self.controller.close(cleanly=True)
        return self

    async def train_until(self, condition: Callable[[Projection], bool], *, limit_s: float = 600.0) -> "Life":
        """Run in the background until a condition holds."""
        self._task = asyncio.create_task(self.controller.run())
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self._task.done():
                self._task.result()
                raise AssertionError("the run ended before the condition held")
            if condition(self.p):
                return self
            await asyncio.sleep(0)
        raise AssertionError("the condition never held")

    async def finish(self) -> "Life":
        """Let a run that was started by ``train_until`` go on to its end, and close in order."""
        assert self._task is not None
        await self._task
        await self.controller.close(cleanly=True)
        return self

    async def kill(self) -> None:
        """End this life as SIGKILL would: what is in the log's files is all that is left."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self.controller._checkpointer is not None:
            await self.controller._checkpointer.close()  # a killed process compacts nothing any more
        opened = self.controller._opened
        if opened is not None:
            await opened.writer.position()  # a killed process's writes are in the page cache
            opened.lock.release()


async def first_life(path: Path, config: RunConfig | None = None, parts: FakeParts | None = None) -> Life:
    return await Life(path, config, parts).begin(resume=False)


async def next_life(path: Path, config: RunConfig | None = None, parts: FakeParts | None = None) -> Life:
    return await Life(path, config, parts).begin(resume=True)


def history(path: Path) -> list[RecordedEvent]:
    """All events of a run, from its files."""
    return list(scan_log(RunDirectory(path).log).events())


def replayed(path: Path) -> Projection:
    """The projection of a run, from its files."""
    return project(scan_log(RunDirectory(path).log))


def assert_conserved(p: Projection) -> None:
    """Drawn = applied + dropped + parked + alive."""
    assert p.drawn_total == p.applied_total + p.dropped_total + p.parked_total + p.alive_total
    assert p.draw_cursor == p.drawn_total


def events_of(path: Path, kind: type[E]) -> list[E]:
    return [record.event for record in history(path) if isinstance(record.event, kind)]


def files_of(path: Path) -> dict[str, bytes]:
    return {
        p.relative_to(path).as_posix(): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "writer.lock"
    }


async def interrupted_life(path: Path, config: RunConfig | None = None) -> tuple[Life, int]:
    """A life with a checkpoint at step 2, at which group ``g`` had generations 0 and 1 sealed and 2 running, and it
    still has. Returns the life and ``g``."""
    parts = FakeParts()
    held = 5

    def script(parts: FakeParts) -> None:
        parts.pool.hold(held, 2, 1)

    parts.prepare = script
    life = await first_life(path, config or run_config(trainer__max_steps=6), parts)
    await life.train_until(
        lambda p: (
            bool(p.checkpoints)
            and held in p.groups
            and p.groups[held].siblings[1].sealed is not None
            and p.groups[held].siblings[1].sealed_seq <= p.checkpoints[-1].position.seq
        )
    )
    return life, held
