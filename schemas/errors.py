"""The errors that kinlog raises: one class for each decision that a caller can make.

Every error has a stable ``code`` (what scripts and the documentation refer to) and an ``exit_code`` (what the
command line returns). Messages say what was expected, what was found, where, and what to do next.
"""

from typing import ClassVar

__all__ = [
    "KinlogError",
    "ConfigError",
    "RunNotFoundError",
    "RunExistsError",
    "RunLockedError",
    "LogDamagedError",
    "LogUnsupportedError",
    "LogWriteError",
    "WriterFencedError",
    "EventTooLargeError",
    "TransitionError",
    "ResultConflictError",
    "CheckpointError",
    "RowsMissingError",
    "DatasetError",
    "DataPlaneError",
    "DataPlaneTimeoutError",
    "RowCorruptError",
    "WorkerLostError",
    "NotAttachedError",
    "StalledError",
    "DemoFailedError",
    "RolloutsFailError",
    "PreemptedError",
    "MissingExtraError",
    "QueryError",
    "NotInRunError",
]


class KinlogError(Exception):
    """The base of every error that kinlog raises on purpose."""

    code: ClassVar[str] = "kinlog"
    exit_code: ClassVar[int] = 1


class ConfigError(KinlogError, ValueError):
    """The configuration cannot be used. Correct the key that the message names."""

    code = "config"
    exit_code = 2


class RunNotFoundError(KinlogError, FileNotFoundError):
    """The directory holds no kinlog run. Check the path."""

    code = "run_not_found"
    exit_code = 3


class RunExistsError(KinlogError, FileExistsError):
    """The directory already holds a run. Resume it, or choose another directory."""

    code = "run_exists"
    exit_code = 4


class RunLockedError(KinlogError):
    """Another process is writing to this run. Stop it first."""

    code = "run_locked"
    exit_code = 5


class LogDamagedError(KinlogError):
    """The log is not what was written: stop, keep the files, and read what the message locates.

    Parameters
    ----------
    what:
        One sentence: what is wrong.
    segment:
        File name of the segment, or of the checkpoint file that disagrees with the log.
    offset_bytes:
        Where in that file.
    seq:
        The event sequence number at which trust ends: every event before it verified.
    expected, found:
        The two values that differ, rendered.
    """

    code = "log_damaged"
    exit_code = 6

    def __init__(
        self, what: str, *, segment: str, offset_bytes: int, seq: int, expected: str, found: str
    ) -> None:
        super().__init__(
            f"{what}: segment {segment}, byte {offset_bytes}, seq {seq}: expected {expected}, found {found}. "
            "Nothing was changed. Run 'kinlog log verify' for the whole story, or restore a checkpoint directory."
        )
        self.what = what
        self.segment = segment
        self.offset_bytes = offset_bytes
        self.seq = seq
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only arguments: let it cross process borders
        fields = (self.what, self.segment, self.offset_bytes, self.seq, self.expected, self.found)
        return (_rebuild_log_damaged, fields)


def _rebuild_log_damaged(
    what: str, segment: str, offset_bytes: int, seq: int, expected: str, found: str
) -> LogDamagedError:
    return LogDamagedError(
        what, segment=segment, offset_bytes=offset_bytes, seq=seq, expected=expected, found=found
    )


class LogUnsupportedError(KinlogError):
    """The log was written by a newer kinlog. Upgrade kinlog to read it."""

    code = "log_unsupported"
    exit_code = 7


class LogWriteError(KinlogError, OSError):
    """Writing the log failed, and the writer takes no more events. Free the disk or repair it, then resume."""

    code = "log_write"
    exit_code = 8


class WriterFencedError(LogWriteError):
    """Another process took this log over with a newer epoch. This process must stop."""

    code = "writer_fenced"
    exit_code = 9


class EventTooLargeError(KinlogError, ValueError):
    """An event is metadata, and this one is over the limit. Keep tokens and text in the data plane."""

    code = "event_too_large"
    exit_code = 10


class TransitionError(KinlogError):
    """An event does not fit the state it is applied to: a bug in the caller, or a log that tells an impossible story."""

    code = "illegal_transition"
    exit_code = 11


class ResultConflictError(KinlogError):
    """Two different results claim the same sealed attempt. Find the worker that ran it twice."""

    code = "result_conflict"
    exit_code = 12


class CheckpointError(KinlogError):
    """A checkpoint cannot be written or used. The message names the file and the difference."""

    code = "checkpoint"
    exit_code = 13


class RowsMissingError(KinlogError):
    """Rows that a checkpoint promised are not in the data plane. Use another checkpoint, or redispatch by choice."""

    code = "rows_missing"
    exit_code = 14


class DatasetError(KinlogError):
    """The dataset is absent, or not the one the run was started on. Restore it, or start a new run."""

    code = "dataset"
    exit_code = 15


class DataPlaneError(KinlogError):
    """The data plane did not answer in time, or gave something other than what was asked for."""

    code = "data_plane"
    exit_code = 16


class DataPlaneTimeoutError(DataPlaneError):
    """The data plane did not answer in time. Look at its machine, raise the time-out, then try again."""

    code = "data_plane_timeout"
    exit_code = 21


class RowCorruptError(DataPlaneError):
    """A row in the data plane is not what was put under its key. It is lost: generate it again."""

    code = "row_corrupt"
    exit_code = 23


class WorkerLostError(KinlogError):
    """A worker died before it answered: what it was doing is an infrastructure failure, and is done again."""

    code = "worker_lost"
    exit_code = 17


class NotAttachedError(WorkerLostError):
    """A worker's new life was asked before it was attached: what its past life was doing is lost."""

    code = "not_attached"
    exit_code = 22


class StalledError(KinlogError):
    """Nothing was recorded for too long. The message says what waits for what."""

    code = "stalled"
    exit_code = 18


class DemoFailedError(KinlogError):
    """The demonstration did not show what it is for. Its output says where it stopped."""

    code = "demo_failed"
    exit_code = 19


class RolloutsFailError(KinlogError):
    """Rollouts fail, and the run cannot come to anything, or was told to stop at it. Correct what they fail of."""

    code = "rollouts_fail"
    exit_code = 24


class PreemptedError(KinlogError):
    """The run was told to stop, and has. Nothing sealed is lost: resume it."""

    code = "preempted"
    exit_code = 25


class MissingExtraError(KinlogError):
    """A part of kinlog that is installed on request is not there. Install the extra that the message names."""

    code = "missing_extra"
    exit_code = 20


class QueryError(KinlogError):
    """A query cannot be answered. Correct what its message names."""

    code = "query"
    exit_code = 26


class NotInRunError(KinlogError, LookupError):
    """The run has no such step, group, sibling or moment. The message says what it has."""

    code = "not_in_run"
    exit_code = 27
