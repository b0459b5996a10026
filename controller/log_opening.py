"""The log at the beginning of a life: made for a new run, or gone on with for one that is resumed."""

import uuid
from pathlib import Path

from kinlog.lineage.log import OpenedLog, create_log, open_log
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.store import FileLock, Store
from kinlog.schemas.errors import LogWriteError, RunExistsError
from kinlog.schemas.settings import LogSettings

__all__ = ["begin_log", "go_on_with_log"]


def begin_log(directory: Path, settings: LogSettings, *, version: str, store: Store) -> OpenedLog:
    """Create the log, or take up one whose creation was killed before its first event.

    Raises
    ------
    RunExistsError
        There is one, with events.
    """
    try:
        return create_log(
            directory,
            log_id=uuid.uuid4().hex,
            run_id=uuid.uuid4().hex[:16],
            writer_version=version,
            settings=settings,
            store=store,
        )
    except RunExistsError:
        if scan_log(directory, store=store).end.seq:
            raise
    return open_log(directory, writer_version=version, settings=settings, store=store)


def go_on_with_log(
    directory: Path, settings: LogSettings, *, version: str, store: Store, lock: FileLock, scan: LogScan
) -> OpenedLog:
    """Open the log that a restart was decided from. It is written to from here on.

    Parameters
    ----------
    lock, scan:
        Taken and made before anything was decided. The lock is released if this fails.

    Raises
    ------
    LogWriteError
        The log has grown since: what was decided does not hold for it.
    """
    opened = open_log(directory, writer_version=version, settings=settings, lock=lock, scan=scan, store=store)
    if opened.scan.end != scan.end:
        opened.close()
        raise LogWriteError(
            f"the log in {directory} grew from seq {scan.end.seq} to {opened.scan.end.seq} while it was read: another "
            "process writes it. Stop that one, then resume."
        )
    return opened
