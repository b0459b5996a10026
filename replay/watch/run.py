"""Watching a run: followed from refresh to refresh, and looked at in between."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kinlog.lineage.fold import FOLD_VERSION, fold
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import Projection
from kinlog.replay.checkpoints import find_checkpoints
from kinlog.replay.inspection import locate_run
from kinlog.replay.projection import SNAPSHOT_NAME, project, read_snapshot
from kinlog.replay.watch.followed_log import FollowedLog
from kinlog.replay.watch.recent import Recent, recent_of
from kinlog.replay.watch.summary import Configured, RunView, view_run
from kinlog.schemas.config import load_config
from kinlog.schemas.errors import CheckpointError, ConfigError, RunNotFoundError

__all__ = ["WatchedRun", "is_process_alive"]


def is_process_alive(host: str, pid: int) -> bool | None:
    """Whether a process lives; ``None`` for one of another machine."""
    if host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class WatchedRun:
    """A run that is looked at again and again. Nothing is read twice: see :class:`FollowedLog`.

    Parameters
    ----------
    path:
        Of the run, or of its log.
    is_alive:
        Whether a process, given its host and pid, lives; ``None`` where that cannot be known.
    """

    def __init__(
        self,
        path: Path,
        *,
        is_alive: Callable[[str, int], bool | None] = is_process_alive,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._run = locate_run(path)
        self._is_alive = is_alive
        self._now_us = now_us
        self._configured = Configured()
        self._configured_in: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._log = FollowedLog(self._run.log)
        scan = self._log.scan
        self._projection = _project(self._run, scan)
        self._recent: Recent = recent_of(scan, self._projection)

    def look(self) -> RunView:
        """Read what is new, and say how the run is.

        Raises
        ------
        RunNotFoundError
            The run is not there any more, or nothing of it was recorded yet.
        LogDamagedError, LogUnsupportedError
            Its log cannot be trusted, or not be read.
        """
        records = self._log.events()
        if records is None:
            self._begin()
        else:
            for record in records:
                fold(self._projection, record)
                self._recent.add(record)
            self._recent.forget(self._projection)
        p = self._projection
        if p.last_seq == 0:
            raise RunNotFoundError(f"the run in {self._run.path} has not begun: nothing is recorded yet")
        if self._configured_in != p.last_epoch:
            # Each life writes its own.
            self._configured, self._configured_in = _configured(self._run), p.last_epoch
        is_alive = self._is_alive(self._recent.host, self._recent.pid)
        return view_run(
            p,
            self._recent,
            self._log.tail,
            configured=self._configured,
            is_alive=is_alive,
            now_us=self._now_us(),
        )


def _project(run: RunDirectory, scan: LogScan) -> Projection:
    """Fold a log from the newest checkpoint that it holds, or from its beginning."""
    for found in find_checkpoints(run.checkpoints, log_id=scan.log_id, verify=False):
        manifest = found.manifest
        if manifest is None or not found.usable or manifest.fold_version != FOLD_VERSION:
            continue
        if not scan.first_seq - 1 <= manifest.position.seq <= scan.end.seq:
            continue
        try:
            snapshot = read_snapshot(found.path / SNAPSHOT_NAME, manifest.projection_digest)
        except CheckpointError:
            continue  # another one, or the log itself, says the same
        return project(scan, snapshot)
    return project(scan)


def _configured(run: RunDirectory) -> Configured:
    try:
        config = load_config(run.config)
    except ConfigError:
        return Configured()
    return Configured(
        max_steps=config.trainer.max_steps,
        max_live_groups=config.rollout.max_live_groups,
        row_journal=config.row_journal.enabled,
    )
