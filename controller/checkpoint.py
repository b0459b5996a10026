"""Checkpoints: a directory that restarts the run as of one place in the log, complete or absent.

A trainer checkpoint has everything. A rollout checkpoint is taken between two of them, also while an optimizer step is
open, and goes with the newest one, its *anchor*: a restart rolls steps that were begun since back to it.

Only what must agree happens inside the exclusive hold: the place in the log, and the data plane's own save. With the row
journal on, a rollout checkpoint takes its rows from there, and the place is all. Everything else follows outside.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from kinlog.controller.checkpoint_directory import (
    Anchorage,
    CheckpointDirectories,
    HeldFacts,
    JournalLacksRowsError,
    Target,
)
from kinlog.controller.checkpoint_failures import FailuresInARow
from kinlog.controller.journal_keeping import JournalKeeper
from kinlog.controller.retention import newest_anchor, newly_durable, outdated_rollouts, retain
from kinlog.controller.runtime import Runtime, clear_group_rows
from kinlog.lineage.compaction import compact_log
from kinlog.lineage.ledger import Cut
from kinlog.lineage.state import Projection
from kinlog.lineage.store import Store
from kinlog.replay.checkpoints import DATA_PLANE_NAME, TRAINER_NAME, find_checkpoints, read_manifest
from kinlog.replay.projection import project
from kinlog.replay.recovery.journal import needed_attempts, unfinished_attempts
from kinlog.schemas.errors import CheckpointError, DataPlaneTimeoutError, KinlogError, LogWriteError
from kinlog.schemas.events import CheckpointCommitted, CheckpointFailed
from kinlog.schemas.reasons import CheckpointKind, Reason

__all__ = ["Checkpointer", "SavedCheckpoint", "checkpoint_name", "rollout_checkpoint_name"]

_logger = logging.getLogger(__name__)


def checkpoint_name(train_step: int) -> str:
    """Return the directory name of the trainer checkpoint at a step."""
    return f"step_{train_step:06d}"


def rollout_checkpoint_name(anchor_step: int, number: int) -> str:
    """Return the directory name of a rollout checkpoint: the step of its anchor, and which one of it this is."""
    return f"rollout_{anchor_step:06d}_{number:04d}"


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """What a save came to, for those who show progress."""

    name: str
    seconds: float
    held_s: float
    """How long no cut was open anywhere."""
    problem: str = ""
    """Why there is no checkpoint; empty when there is."""


class _TooLongError(CheckpointError):
    """A save was given up, or an earlier one that was is still under way."""


class Checkpointer:
    """Takes checkpoints of a running controller, one at a time.

    Parameters
    ----------
    base:
        A projection at or before the log's present end, which this object may change.
    journal, progress:
        The run's row journal, and its progress journal: what is not needed any more is let go of at each checkpoint.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        base: Projection,
        journal: JournalKeeper,
        progress: JournalKeeper,
        *,
        run_id: str,
        log_id: str,
        version: str,
        on_saved: Callable[[SavedCheckpoint], None] = lambda saved: None,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._journal = journal
        self._progress = progress
        self._log_id = log_id
        self._on_saved = on_saved
        self._directories = CheckpointDirectories(
            runtime, store, base, journal, run_id=run_id, log_id=log_id, version=version
        )
        self._one_at_a_time = asyncio.Lock()
        self._building: asyncio.Task[HeldFacts] | None = None
        self._given_up: set[Path] = set()
        self._compacting: asyncio.Task[None] | None = None
        self._failures = FailuresInARow()
        self._recorded_seq = 0
        """The last event of this object's own."""
        self.last_seconds: float | None = None
        """How long the last trainer checkpoint took; ``None`` before the first one of this life."""

    @property
    def has_news(self) -> bool:
        """Whether anything was recorded since the last checkpoint was, or its failure."""
        return self._runtime.projection.last_seq > self._recorded_seq

    async def save(self) -> SavedCheckpoint:
        """Take a trainer checkpoint. A failure is recorded, and costs this checkpoint, not the run.

        Raises
        ------
        LogWriteError
            The log failed: the run must stop.
        CheckpointError
            Too many have failed in a row, of this kind or of both together: the run must stop.
        """
        async with self._one_at_a_time:
            return await self._save(Target(checkpoint_name(self._runtime.projection.train_step)))

    async def save_rollout(self) -> SavedCheckpoint:
        """Take a rollout checkpoint. Trainer and live run are not touched. Raises as :meth:`save`."""
        async with self._one_at_a_time:
            p, present = self._runtime.projection, self._directories.names()
            anchor = newest_anchor(p, present)
            step = anchor.train_step if anchor is not None else 0
            taken = present | {c.name for c in p.checkpoints}
            name = next(n for number in count(1) if (n := rollout_checkpoint_name(step, number)) not in taken)
            position = anchor.position if anchor is not None else None
            anchorage = Anchorage(anchor.name if anchor is not None else None, position, step)
            return await self._save(Target(name, anchorage))

    async def close(self) -> None:
        """Give what a save that was given up is still doing a while to end, and let go of it."""
        if self._building is not None and not self._building.done():
            await asyncio.wait({self._building}, timeout=self._runtime.config.checkpointing.timeout_s)
            self._building.cancel()
        await self._until_compacted()

    def clear_leavings(self) -> None:
        """Remove what earlier lives left half-written or half-removed."""
        self._directories.clear_leavings()

    def compact(self, drop_through_seq: int = 0) -> None:
        """Begin to compact the log, beside everything else.

        Parameters
        ----------
        drop_through_seq:
            What is behind everything that can still be gone back to: dropped, where the policy says so.
        """
        self._compacting = asyncio.create_task(asyncio.to_thread(self._compact_log, drop_through_seq))

    def _compact_log(self, drop_through_seq: int) -> None:
        """Compact what can be compacted. A failure costs space, and is tried again after the next checkpoint."""
        runtime = self._runtime
        found = find_checkpoints(runtime.directory.checkpoints, log_id=self._log_id, verify=False)
        try:
            compact_log(
                self._store,
                runtime.directory.log,
                epoch=runtime.ledger.writer.epoch,
                checkpoints=[f.manifest.position for f in found if f.manifest is not None and f.usable],
                drop_through_seq=drop_through_seq if runtime.config.log.history == "drop" else 0,
                project=lambda scan, through_seq: project(scan, through_seq=through_seq),
            )
        except (KinlogError, OSError) as error:
            _logger.warning("the log could not be compacted: %s", error)

    async def _until_compacted(self) -> None:
        if self._compacting is not None:
            await asyncio.wait({self._compacting})

    async def _save(self, target: Target) -> SavedCheckpoint:
        started = time.perf_counter()
        held_s = 0.0
        try:
            facts = await self._build_in_time(self._directories.temporary(target.name), target)
        except LogWriteError:
            raise
        except (KinlogError, OSError) as error:
            self._failures.add(target.kind)
            problem = await self._record_failure(target.name, error)
        else:
            self._failures.end(target.kind)
            problem, held_s = "", facts.held_s
            await self._record(target, facts, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        if not problem and target.kind is CheckpointKind.TRAINER:
            self.last_seconds = seconds
        saved = SavedCheckpoint(target.name, seconds, held_s, problem)
        self._on_saved(saved)
        count, what = self._failures.count(target.kind)
        if count >= self._runtime.config.checkpointing.max_failures_in_a_row:
            raise CheckpointError(
                f"{count} {what} in a row have failed, the last of them {target.name}: {problem}. "
                "A crash would cost more with every hour: the run ends (checkpointing.max_failures_in_a_row). Correct the "
                "cause, then resume it: it goes on from the checkpoint before."
            )
        return saved

    async def _build_in_time(self, temporary: Path, target: Target) -> HeldFacts:
        """Build and commit the directory, or give up. Threads cannot be stopped: what was given up runs out by itself,
        cleans up after itself, and holds up the next save until then."""
        if self._building is not None and not self._building.done():
            raise _TooLongError("an earlier save, which was given up, is still running")
        limit_s = self._runtime.config.checkpointing.timeout_s
        self._building = asyncio.create_task(self._build(temporary, target))
        try:
            # The data plane has a time-out of its own, of the same length: the hold is bounded by that.
            done, _ = await asyncio.wait({self._building}, timeout=2 * limit_s)
        except asyncio.CancelledError:
            self._building.cancel()
            raise
        if not done:
            self._given_up.add(temporary)
            # What it comes to in the end is of no interest, and asyncio would print it as an error that nobody saw.
            self._building.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise _TooLongError(f"the save took longer than {2 * limit_s:g} s")
        return self._building.result()

    async def _build(self, temporary: Path, target: Target) -> HeldFacts:
        try:
            target = await self._anchored(target)
            # The log is copied further down, file by file: none of them may be replaced meanwhile.
            await self._until_compacted()
            by_journal = target.kind is CheckpointKind.ROLLOUT and self._runtime.config.row_journal.enabled
            try:
                facts = await self._fill(temporary, target, by_journal=by_journal)
            except JournalLacksRowsError as error:
                _logger.info("%s is saved with the data plane: %s", target.name, error)
                await asyncio.to_thread(self._directories.discard, [temporary.name])
                facts = await self._fill(temporary, target, by_journal=False)
            self._stop_if_given_up(temporary)
            await asyncio.to_thread(self._directories.commit, temporary, target.name)
            return facts
        except BaseException:
            await asyncio.to_thread(self._directories.discard, [temporary.name])
            raise
        finally:
            self._given_up.discard(temporary)

    async def _anchored(self, target: Target) -> Target:
        """Complete a target by what the anchor's manifest says. Without that, nobody could go back to the checkpoint."""
        anchorage = target.anchorage
        if anchorage is None:
            return target
        if anchorage.name is None:
            if self._runtime.projection.frontier_step:
                raise CheckpointError(
                    "there is no trainer checkpoint that it could go with, and the start of the run is out of reach"
                )
            return target
        path = self._runtime.directory.checkpoints / anchorage.name
        manifest = await asyncio.to_thread(read_manifest, path)
        anchorage = msgspec.structs.replace(anchorage, weight_version=manifest.weight_version)
        return msgspec.structs.replace(target, anchorage=anchorage)

    async def _fill(self, temporary: Path, target: Target, *, by_journal: bool) -> HeldFacts:
        self._store.make_directory(temporary)
        self._stop_if_given_up(temporary)
        facts = await self._hold(None if by_journal else temporary / DATA_PLANE_NAME)
        if target.kind is CheckpointKind.TRAINER:
            await self._runtime.trainer.save(temporary / TRAINER_NAME)
        await asyncio.to_thread(self._directories.fill, temporary, target, facts, by_journal=by_journal)
        return facts

    def _stop_if_given_up(self, temporary: Path) -> None:
        if temporary in self._given_up:
            raise _TooLongError("the save was given up")

    async def _hold(self, data_plane: Path | None) -> HeldFacts:
        """Fix the place in the log, and save the data plane to a directory if one is given, with no cut open anywhere."""
        runtime = self._runtime
        async with runtime.barrier.exclusive("checkpoint"):
            entered = time.perf_counter()
            p = runtime.projection
            position = await runtime.ledger.position()
            if data_plane is not None:
                facts = {"position_seq": position.seq, "train_step": p.train_step}
                await runtime.data_plane.save(
                    data_plane, facts, timeout_s=runtime.config.checkpointing.timeout_s
                )
            return HeldFacts(
                position, p.train_step, p.weight_version, p.draw_cursor, time.perf_counter() - entered
            )

    async def _record(self, target: Target, facts: HeldFacts, seconds: float) -> None:
        """Record the checkpoint, which took so long to build, then let go of what it makes superfluous."""
        if target.anchorage is not None:
            await self._record_rollout(target, target.anchorage, facts, seconds)
        else:
            await self._record_trainer(target, facts, seconds)

    async def _record_trainer(self, target: Target, facts: HeldFacts, seconds: float) -> None:
        """Let go of rows, forgotten groups, and all older checkpoints but those that are kept."""
        runtime = self._runtime
        p = runtime.projection
        keep = runtime.config.checkpointing.keep
        present = self._directories.names()
        kept = retain(p, name=target.name, train_step=facts.train_step, keep=keep, present=present)
        durable = newly_durable(p, facts.train_step)
        async with runtime.barrier.cut("checkpoint_committed") as cut:
            await self._commit(cut, target, facts, seconds, facts.train_step, kept.frontier_step)
            # Their step can no longer be undone by a crash: a restart begins at this checkpoint, or at an older one
            # that has these rows in its own copy of the data plane.
            await clear_group_rows(runtime, cut, durable, Reason.STEP_DURABLE)
        try:
            await asyncio.to_thread(self._directories.prune, present - kept.names)
            for keeper in (self._journal, self._progress):
                await asyncio.to_thread(keeper.note_ended)
            await asyncio.to_thread(self._journal.drop_unneeded, needed_attempts(p, kept.behind_seq))
            await asyncio.to_thread(self._progress.drop_unneeded, unfinished_attempts(p))
        except OSError as error:
            _logger.warning("what a checkpoint makes superfluous could not all be removed: %s", error)
        self.compact(kept.behind_seq)

    async def _record_rollout(
        self, target: Target, anchorage: Anchorage, facts: HeldFacts, seconds: float
    ) -> None:
        """Let go of older rollout checkpoints. No step becomes durable by this one: frontier, rows and journal stay."""
        runtime = self._runtime
        p = runtime.projection
        outdated = outdated_rollouts(p, present=self._directories.names())
        async with runtime.barrier.cut("checkpoint_committed") as cut:
            await self._commit(cut, target, facts, seconds, anchorage.train_step, p.frontier_step)
        try:
            await asyncio.to_thread(self._directories.prune, outdated)
        except OSError as error:
            _logger.warning("older rollout checkpoints could not all be removed: %s", error)

    async def _commit(
        self, cut: Cut, target: Target, facts: HeldFacts, seconds: float, train_step: int, frontier_step: int
    ) -> None:
        """Record, durably, that a checkpoint is there."""
        event = CheckpointCommitted(
            name=target.name,
            checkpoint_kind=target.kind,
            train_step=train_step,
            position=facts.position,
            frontier_step=frontier_step,
            duration_us=round(seconds * 1e6),
            held_us=round(facts.held_s * 1e6),
        )
        ticket = self._runtime.ledger.commit(cut, event)
        self._recorded_seq = ticket.seq
        await ticket.durable()

    async def _record_failure(self, name: str, error: Exception) -> str:
        problem = f"{type(error).__name__.lstrip('_')}: {error}"
        too_long = isinstance(error, DataPlaneTimeoutError | _TooLongError)
        reason = Reason.TIMEOUT if too_long else Reason.INFRASTRUCTURE_FAILURE
        async with self._runtime.barrier.cut("checkpoint_failed") as cut:
            event = CheckpointFailed(name=name, reason=reason, detail=problem[:500])
            self._recorded_seq = self._runtime.ledger.commit(cut, event).seq
        return problem
