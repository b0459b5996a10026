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
    """What it was run on or with failed: a worker, the network, the data plane, the disk. Charged to the infrastructure
    budget."""
    DATA_FAILURE = "data_failure"
    """It failed by its own content, and would fail anywhere: an environment that refuses it, a result that is not
    valid. Charged to the data budget."""
    TIMEOUT = "timeout"
    """No answer within the configured time. Charged to the infrastructure budget."""
    WORKER_LOST = "worker_lost"
    """The worker that had it died, or could not be reached any more. Charged to the infrastructure budget."""
    CONTROLLER_RESTART = "controller_restart"
    """The controller died while the attempt was under way. Charged to nobody, unless
    ``rollout.max_controller_restarts`` says so."""
    PREEMPTED = "preempted"
    """The run was told to stop while the attempt was under way: nobody's failure, and no death of the controller."""
    COHORT_RESTART = "cohort_restart"
    """Another sibling of its ``prompt_group`` group was given up, and the group is redone as a whole."""
    ROWS_MISSING = "rows_missing"
    """Rows of it are neither in the data plane nor in the row journal."""
    DIGEST_MISMATCH = "digest_mismatch"
    """Rows of it have another content than was recorded."""
    STALE = "stale"
    """The weights have moved on further from its tokens than the sampler allows, or the step that it was drawn for is
    past."""
    FUTURE_WEIGHTS = "future_weights"
    """Weights newer than those of the restored trainer generated it, and ``rollout_recovery.future_weights`` is
    ``discard``."""
    DISCARDED_BY_REQUEST = "discarded_by_request"
    """The restart was told to generate again what had not been trained on: ``--discard-rollouts``."""
    RETRY_BUDGET = "retry_budget"
    """A retry budget of the group is spent: a sibling's, or its finalize's."""
    LOW_VALID_FRACTION = "low_valid_fraction"
    """Fewer of its siblings are valid examples than ``rollout.min_valid_fraction_per_group`` asks for."""
    EVICTED = "evicted"
    """Its place was needed: the replay buffer is full of fresher groups, or a restart found more groups alive than
    there are permits now."""
    SHORTFALL = "shortfall"
    """There are not enough groups left to fill the optimizer step."""
    SUPERSEDED_ATTEMPT = "superseded_attempt"
    """A result arrived for an attempt that had already been given up, or whose group had left."""
    UNREFERENCED = "unreferenced"
    """Rows in the data plane that no live attempt and no finalized group owns."""
    FINALIZED = "finalized"
    """Staged rows whose group's canonical rows are published."""
    STEP_DURABLE = "step_durable"
    """Canonical rows whose optimizer step is covered by a durable trainer checkpoint."""


class Granularity(StrEnum):
    """What a restart or a failure redoes: the sibling that was unfinished, or its whole prompt group."""

    SIBLING = "sibling"
    """The sibling that was unfinished or failed. Sealed ones of its group are kept."""
    PROMPT_GROUP = "prompt_group"
    """Its whole group: all siblings are sent together, and seal together."""


class FinishReason(StrEnum):
    """How a sibling's last model call ended."""

    STOP = "stop"
    """By itself, at an end token."""
    LENGTH = "length"
    """At the limit of tokens."""
    ABORTED = "aborted"
    """It was cut short, or never made: a placeholder."""


class Validity(StrEnum):
    """Whether a sealed sibling is a training example."""

    VALID = "valid"
    """An example to train on."""
    PLACEHOLDER = "placeholder"
    """Sealed without a receipt, to keep the group at N; never a good sibling."""
    FAILED = "failed"
    """The environment failed after the tokens were captured."""
    POISONED = "poisoned"
    """The captured tokens cannot be trusted."""


class CheckpointKind(StrEnum):
    """What a checkpoint holds: trainer state as well, or rollouts only (it then names its anchor)."""

    TRAINER = "trainer"
    """Trainer state as well as rollouts."""
    ROLLOUT = "rollout"
    """Rollouts only: it goes with its anchor, the newest trainer checkpoint at the time."""


class Partition(StrEnum):
    """The data plane's partitions: token rows of single model calls, and trainable rows of siblings."""

    STAGING = "staging"
    """Token rows of single model calls, as the workers captured them."""
    TRAINING = "training"
    """Trainable rows of siblings, as the finalizer published them."""
