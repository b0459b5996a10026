"""The closed sets: why something was redone or dropped, how a sibling ended, and how recovery is grained."""

from enum import StrEnum

__all__ = [
    "Reason",
    "Granularity",
    "FinishReason",
    "Validity",
    "CheckpointKind",
    "Partition",
]


class Reason(StrEnum):
    """Why an attempt was given up, a group left, rows were cleared, or a checkpoint failed."""

    INFRASTRUCTURE_FAILURE = "infrastructure_failure"
    DATA_FAILURE = "data_failure"
    TIMEOUT = "timeout"
    WORKER_LOST = "worker_lost"
    CONTROLLER_RESTART = "controller_restart"
    #: The run was told to stop while the attempt was running: nobody's failure, and no death of the controller.
    PREEMPTED = "preempted"
    COHORT_RESTART = "cohort_restart"
    ROWS_MISSING = "rows_missing"
    DIGEST_MISMATCH = "digest_mismatch"
    STALE = "stale"
    FUTURE_WEIGHTS = "future_weights"
    DISCARDED_BY_REQUEST = "discarded_by_request"
    RETRY_BUDGET = "retry_budget"
    LOW_VALID_FRACTION = "low_valid_fraction"
    EVICTED = "evicted"
    SHORTFALL = "shortfall"
    #: A result arrived for an attempt that had already been superseded.
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    #: Rows in the data plane that no live attempt and no finalized group owns.
    UNREFERENCED = "unreferenced"
    #: Staged rows whose group's canonical rows are published.
    FINALIZED = "finalized"
    #: Canonical rows whose optimizer step is covered by a durable trainer checkpoint.
    STEP_DURABLE = "step_durable"


class Granularity(StrEnum):
    """What a restart or a failure redoes: the sibling that was unfinished, or its whole prompt group."""

    SIBLING = "sibling"
    PROMPT_GROUP = "prompt_group"


class FinishReason(StrEnum):
    """How a sibling's last model call ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class Validity(StrEnum):
    """Whether a sealed sibling is a training example.

    ``placeholder``: sealed without a receipt, to keep the group at N; never a good sibling.
    ``failed``: the environment failed after the tokens were captured.
    ``poisoned``: the captured tokens cannot be trusted.
    """

    VALID = "valid"
    PLACEHOLDER = "placeholder"
    FAILED = "failed"
    POISONED = "poisoned"


class CheckpointKind(StrEnum):
    """What a checkpoint holds: trainer state as well, or rollouts only (it then names its anchor)."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class Partition(StrEnum):
    """The data plane's partitions: token rows of single model calls, and trainable rows of siblings."""

    STAGING = "staging"
    TRAINING = "training"
