"""The metrics of a run: each with its name, kind, unit, labels and meaning. What is exported and what is documented both come
from here."""

from kinlog.controller.metric_kinds import Kind, Label, Metric, Scope
from kinlog.controller.metric_labels import CHECKPOINT, CUT, PHASE, REASON, RECOVERY_PHASE
from kinlog.schemas.events import EVENT_TYPES
from kinlog.schemas.reasons import FinishReason, Partition, Validity

__all__ = ["METRICS"]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_LONG_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16)

_METRICS: list[Metric] = []


def _metric(
    section: str,
    name: str,
    kind: Kind,
    unit: str,
    text: str,
    *labels: Label,
    scope: Scope = Scope.LIFE,
    buckets: tuple[float, ...] = (),
) -> Metric:
    own = Scope.NOW if kind is Kind.GAUGE else scope
    metric = Metric(section, f"kinlog_{name}", kind, unit, own, text, labels, buckets)
    _METRICS.append(metric)
    return metric


# ---- progress -----------------------------------------------------------------------------------------------------------

RUN_INFO = _metric(
    "progress",
    "run_info",
    Kind.GAUGE,
    "1",
    "Always 1: which run this is.",
    Label("run_id", ()),
    Label("version", ()),
)
TRAIN_STEP = _metric(
    "progress", "train_step", Kind.GAUGE, "steps", "The last optimizer step, on the surviving history."
)
MAX_STEPS = _metric("progress", "max_steps", Kind.GAUGE, "steps", "The step that the run ends at.")
WEIGHT_VERSION = _metric(
    "progress", "weight_version", Kind.GAUGE, "versions", "The weights that generation has."
)
STEPS_APPLIED = _metric(
    "progress",
    "steps_applied_total",
    Kind.COUNTER,
    "steps",
    "Optimizer steps applied, those included that are rolled back.",
)
STEPS_SHRUNK = _metric(
    "progress",
    "steps_shrunk_total",
    Kind.COUNTER,
    "steps",
    "Steps trained on fewer groups than configured.",
    REASON,
)
RESTARTS = _metric(
    "progress",
    "restarts_total",
    Kind.COUNTER,
    "restarts",
    "How often trainer and data plane were restored.",
    scope=Scope.RUN,
)
RAW_REWARD = _metric(
    "progress", "raw_reward", Kind.GAUGE, "reward", "Mean raw reward of the last step's siblings."
)
SHAPED_REWARD = _metric(
    "progress", "shaped_reward", Kind.GAUGE, "reward", "Mean shaped reward of the last step's siblings."
)
LOSS = _metric("progress", "loss", Kind.GAUGE, "loss", "Of the last step.")
GRAD_NORM = _metric("progress", "grad_norm", Kind.GAUGE, "norm", "Of the last step, before clipping.")
CLIP_FRACTION = _metric(
    "progress", "clip_fraction", Kind.GAUGE, "fraction", "Tokens of the last step whose ratio was clipped."
)
TOKEN_LAG = _metric(
    "progress",
    "token_lag",
    Kind.GAUGE,
    "versions",
    "Between the weights that sampled a token of the last step and those that were trained: the mean over tokens.",
)
MIXED_ROWS = _metric(
    "progress",
    "mixed_rows",
    Kind.GAUGE,
    "rows",
    "Rows of the last step with tokens of more than one version.",
)
TRAINER_STEP_SECONDS = _metric(
    "progress",
    "trainer_step_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "What the trainer took for a step.",
    buckets=_LONG_SECONDS,
)

# ---- groups -------------------------------------------------------------------------------------------------------------

GROUPS_DRAWN = _metric(
    "groups", "groups_drawn_total", Kind.COUNTER, "groups", "Groups that were ever reserved.", scope=Scope.RUN
)
GROUPS_FINALIZED = _metric(
    "groups", "groups_finalized_total", Kind.COUNTER, "groups", "Groups that came into the replay buffer."
)
GROUPS_APPLIED = _metric(
    "groups",
    "groups_applied_total",
    Kind.COUNTER,
    "groups",
    "Groups that a step was trained on, those included that are rolled back.",
)
GROUPS_DROPPED = _metric(
    "groups",
    "groups_dropped_total",
    Kind.COUNTER,
    "groups",
    "Groups that left untrained.",
    REASON,
    scope=Scope.RUN,
)
GROUPS_PARKED = _metric(
    "groups", "groups_parked_total", Kind.COUNTER, "groups", "Groups that were set aside.", REASON
)
FINALIZE_FAILURES = _metric(
    "groups", "finalize_failures_total", Kind.COUNTER, "calls", "Finalizes that came to nothing.", REASON
)
LIVE_GROUPS = _metric("groups", "live_groups", Kind.GAUGE, "groups", "Groups that hold a permit.", PHASE)
PERMITS = _metric(
    "groups", "permits", Kind.GAUGE, "groups", "How many may be live (rollout.max_live_groups)."
)
STALENESS = _metric(
    "groups",
    "staleness_versions",
    Kind.GAUGE,
    "versions",
    "Weight versions that the oldest tokens of live groups are behind the current weights.",
    Label("statistic", ("min", "mean", "max")),
)
TRAINED_STALENESS = _metric(
    "groups",
    "trained_staleness_versions",
    Kind.HISTOGRAM,
    "versions",
    "The same, of groups as a step claims them.",
    buckets=_VERSIONS,
)

# ---- siblings -----------------------------------------------------------------------------------------------------------

SIBLINGS_DISPATCHED = _metric(
    "siblings", "siblings_dispatched_total", Kind.COUNTER, "attempts", "Attempts sent to workers."
)
SIBLINGS_SEALED = _metric(
    "siblings", "siblings_sealed_total", Kind.COUNTER, "siblings", "Results accepted.", scope=Scope.RUN
)
SEALED_TOKENS = _metric(
    "siblings",
    "sealed_tokens_total",
    Kind.COUNTER,
    "tokens",
    "Completion tokens of accepted results.",
    scope=Scope.RUN,
)
RESUMED_TOKENS = _metric(
    "siblings",
    "resumed_tokens_total",
    Kind.COUNTER,
    "tokens",
    "Of these, what earlier attempts had generated before they were cut off.",
    scope=Scope.RUN,
)
TOKENS_PER_SECOND = _metric(
    "siblings",
    "tokens_per_second",
    Kind.GAUGE,
    "tokens/s",
    "Completion tokens accepted, over the last minute.",
)
OUTCOMES = _metric(
    "siblings",
    "sibling_outcomes_total",
    Kind.COUNTER,
    "siblings",
    "Results accepted, by what they are and how they ended.",
    Label("validity", tuple(validity.value for validity in Validity)),
    Label("finish_reason", tuple(reason.value for reason in FinishReason)),
)
SUPERSEDED = _metric(
    "siblings",
    "attempts_superseded_total",
    Kind.COUNTER,
    "attempts",
    "Attempts given up: their siblings are redone, or leave with their group.",
    REASON,
    scope=Scope.RUN,
)
LATE_RESULTS = _metric(
    "siblings",
    "late_results_total",
    Kind.COUNTER,
    "results",
    "Results that came too late, and were rejected.",
    REASON,
)
IN_FLIGHT = _metric(
    "siblings", "siblings_in_flight", Kind.GAUGE, "siblings", "Siblings that a worker was sent."
)
WAITING = _metric(
    "siblings", "siblings_waiting", Kind.GAUGE, "siblings", "Siblings of live groups that are yet to be sent."
)
ROLLOUT_SECONDS = _metric(
    "siblings",
    "rollout_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From an attempt's dispatch to its result's acceptance.",
    buckets=_LONG_SECONDS,
)
COMPLETION_TOKENS = _metric(
    "siblings",
    "completion_tokens",
    Kind.HISTOGRAM,
    "tokens",
    "Length of accepted results.",
    buckets=_TOKENS,
)

# ---- queues -------------------------------------------------------------------------------------------------------------

QUEUE_WAIT = _metric(
    "queues",
    "queue_wait_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "Waits. dispatch: from a group's admission, or a failed attempt, to the sibling's dispatch. finalize: from the last "
    "seal to the finalizer's call. train: from finalized to claimed by a step.",
    Label("queue", ("dispatch", "finalize", "train")),
    buckets=_SECONDS,
)
WORKER_SLOTS = _metric(
    "queues", "worker_slots", Kind.GAUGE, "slots", "The budget (rollout.max_inflight_siblings)."
)
WORKER_SLOTS_IN_USE = _metric("queues", "worker_slots_in_use", Kind.GAUGE, "slots", "What of it is taken.")
WORKER_REQUESTS_WAITING = _metric(
    "queues",
    "worker_requests_waiting",
    Kind.GAUGE,
    "requests",
    "Who waits for slots.",
    Label("work", ("recovery", "fresh")),
)

# ---- barrier ------------------------------------------------------------------------------------------------------------

CUTS = _metric(
    "barrier", "cuts_total", Kind.COUNTER, "cuts", "Cuts and exclusive holds that were entered.", CUT
)
CUT_WAITS = _metric(
    "barrier",
    "cut_waits_total",
    Kind.COUNTER,
    "cuts",
    "Those that were blocked: by an exclusive hold, or as one by cuts.",
    CUT,
)
CUT_WAIT_SECONDS = _metric(
    "barrier", "cut_wait_seconds_total", Kind.COUNTER, "seconds", "For how long, all together.", CUT
)
CUT_MAX_WAIT_SECONDS = _metric(
    "barrier", "cut_max_wait_seconds", Kind.GAUGE, "seconds", "The longest of these waits in this life.", CUT
)
CUT_HELD_SECONDS = _metric(
    "barrier",
    "cut_held_seconds_total",
    Kind.COUNTER,
    "seconds",
    "How long they were held, all together.",
    CUT,
)

# ---- checkpoints --------------------------------------------------------------------------------------------------------

CHECKPOINTS = _metric(
    "checkpoints",
    "checkpoints_committed_total",
    Kind.COUNTER,
    "checkpoints",
    "Checkpoints that were taken.",
    CHECKPOINT,
)
CHECKPOINT_FAILURES = _metric(
    "checkpoints",
    "checkpoint_failures_total",
    Kind.COUNTER,
    "checkpoints",
    "Checkpoints that were given up.",
    REASON,
)
CHECKPOINT_SECONDS = _metric(
    "checkpoints",
    "checkpoint_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From the beginning of a save until it was complete and durable.",
    CHECKPOINT,
    buckets=_LONG_SECONDS,
)
CHECKPOINT_HOLD_SECONDS = _metric(
    "checkpoints",
    "checkpoint_hold_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "How much of that no cut was open anywhere. What it blocked: cut_waits_total.",
    CHECKPOINT,
    buckets=_SECONDS,
)
CHECKPOINT_AGE = _metric(
    "checkpoints",
    "checkpoint_age_seconds",
    Kind.GAUGE,
    "seconds",
    "Since the last one of this life was taken.",
)

# ---- recovery -----------------------------------------------------------------------------------------------------------

RECOVERY_SECONDS = _metric(
    "recovery", "recovery_seconds", Kind.GAUGE, "seconds", "What this life's restart took.", RECOVERY_PHASE
)
RECOVERY_SIBLINGS = _metric(
    "recovery",
    "recovery_siblings",
    Kind.GAUGE,
    "siblings",
    "What this life's restart decided about siblings.",
    Label("outcome", ("reused", "redispatched")),
)
RECOVERY_GROUPS = _metric(
    "recovery",
    "recovery_groups",
    Kind.GAUGE,
    "groups",
    "What it decided about groups: kept as finalized, taken out of the replay buffer again, or dropped.",
    Label("outcome", ("reused", "rolled_back", "dropped")),
)
RECOVERY_TOKENS = _metric(
    "recovery",
    "recovery_tokens",
    Kind.GAUGE,
    "tokens",
    "Completion tokens of sealed siblings that were reused, and that are redone.",
    Label("outcome", ("saved", "redone")),
)

# ---- log ----------------------------------------------------------------------------------------------------------------

EVENTS = _metric(
    "log", "events_total", Kind.COUNTER, "events", "Events recorded.", Label("kind", tuple(EVENT_TYPES))
)
LOG_SEQ = _metric("log", "log_seq", Kind.GAUGE, "events", "seq of the last event.")
LOG_LAG = _metric(
    "log",
    "log_lag_events",
    Kind.GAUGE,
    "events",
    "Events appended and not acknowledged yet: see log.durability.",
)
LOG_EPOCH = _metric(
    "log", "log_epoch", Kind.GAUGE, "lives", "The writer epoch: which life of the run this is."
)
ROWS_CLEARED = _metric(
    "log",
    "rows_cleared_total",
    Kind.COUNTER,
    "rows",
    "Rows removed from the data plane.",
    Label("partition", tuple(partition.value for partition in Partition)),
    REASON,
)
EVENT_LOOP_LAG = _metric(
    "log",
    "event_loop_lag_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "How much later than asked for the controller's event loop wakes, measured four times a second.",
    buckets=_SECONDS,
)

#: All of them, in the order of the documentation.
METRICS: tuple[Metric, ...] = tuple(_METRICS)
