"""Every kind of event, and every reason, in words."""

from collections.abc import Callable
from typing import Any, TypeAlias

from kinlog.replay.plain_text import format_bytes, format_count, some
from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind, Granularity, Partition, Reason, Validity

__all__ = ["BECAUSE", "SENTENCES", "sentence"]

#: What a reason means, to follow the word "because".
BECAUSE: dict[Reason, str] = {
    Reason.INFRASTRUCTURE_FAILURE: "something failed that it was run on or with, and no fault of its own",
    Reason.DATA_FAILURE: "it failed by its own content, and would fail anywhere",
    Reason.TIMEOUT: "it took longer than the configuration allows",
    Reason.WORKER_LOST: "the worker that had it died, or could not be reached any more",
    Reason.CONTROLLER_RESTART: "the controller died while it was under way",
    Reason.PREEMPTED: "the run was told to stop while it was under way",
    Reason.COHORT_RESTART: "another sibling of its group was given up, and this group is redone as a whole",
    Reason.ROWS_MISSING: "its rows were not in the data plane any more, nor in the row journal",
    Reason.DIGEST_MISMATCH: "its rows have another content than was recorded",
    Reason.STALE: "the weights had moved on further from it than the sampler allows",
    Reason.FUTURE_WEIGHTS: "newer weights than the restored trainer's had generated it, and such work is discarded by choice",
    Reason.DISCARDED_BY_REQUEST: "the restart was told to generate again what had not been trained on",
    Reason.RETRY_BUDGET: "its retry budget was spent",
    Reason.LOW_VALID_FRACTION: "too few of its siblings are valid examples",
    Reason.EVICTED: "the replay buffer needed its place for fresher work",
    Reason.SHORTFALL: "there were not enough groups left to fill it",
    Reason.SUPERSEDED_ATTEMPT: "the attempt had been given up before",
    Reason.UNREFERENCED: "nothing in the log refers to them",
    Reason.FINALIZED: "the group's canonical rows are published, and the staged ones have served",
    Reason.STEP_DURABLE: "a durable trainer checkpoint covers the step that was trained on them",
}

_GRANULARITIES = {
    Granularity.SIBLING: "what fails is redone sibling by sibling",
    Granularity.PROMPT_GROUP: "if one sibling fails, all are redone",
}
_VALIDITIES = {
    Validity.VALID: "",
    Validity.PLACEHOLDER: ", as a placeholder without an example",
    Validity.FAILED: ", though its environment failed",
    Validity.POISONED: ", with tokens that cannot be trusted",
}
_PARTITIONS = {Partition.STAGING: "staged", Partition.TRAINING: "canonical"}
_CHECKPOINTS = {CheckpointKind.TRAINER: "trainer checkpoint", CheckpointKind.ROLLOUT: "rollout checkpoint"}


def sentence(event: e.Event) -> str:
    """Return what an event says, without a full stop."""
    return SENTENCES[type(event)](event)


def _because(reason: Reason, detail: str = "") -> str:
    return f"because {BECAUSE[reason]} ({reason.value}{': ' + detail.strip() if detail.strip() else ''})"


def _run_opened(event: e.RunOpened) -> str:
    return f"the run began, with kinlog {event.kinlog_version}, seed {event.seed}"


def _writer_opened(event: e.WriterOpened) -> str:
    return f"a controller took the log over: process {event.pid} on {event.host}"


def _writer_closed(event: e.WriterClosed) -> str:
    return "the controller ended in order"


def _tail_truncated(event: e.TailTruncated) -> str:
    return f"{format_bytes(event.quarantined_bytes)} that a crash had left half written in {event.segment} were put aside"


def _group_reserved(event: e.GroupReserved) -> str:
    prompt = event.prompt
    place = f" for step {event.train_step}" if event.train_step is not None else ""
    again = f" of dataset epoch {prompt.dataset_epoch}" if prompt.dataset_epoch else ""
    budget = event.retry_budget
    restarts = f" and {budget.restarts} restarts" if budget.restarts is not None else ""
    return (
        f"drawn{place}: sample {prompt.sample_id!r} of task {prompt.task_name}, for agent {prompt.agent_name}, draw "
        f"{prompt.draw_index}{again}, to be generated {event.num_generations} times; granularity "
        f"{event.granularity.value}: {_GRANULARITIES[event.granularity]}; each sibling may fail {budget.infrastructure} "
        f"times by infrastructure, {budget.data} by its data{restarts}; the weights were at version {event.weight_version}"
    )


def _group_admitted(event: e.GroupAdmitted) -> str:
    return "admitted: the sampler let it start"


def _sibling_dispatched(event: e.SiblingDispatched) -> str:
    resumes = (
        ""
        if event.resumes_attempt is None
        else f", to go on from what attempt {event.resumes_attempt} had generated"
    )
    return (
        f"sibling {event.generation}, attempt {event.attempt}: sent to {event.worker}, under weights "
        f"{event.weight_version}{resumes}"
    )


def _sibling_sealed(event: e.SiblingSealed) -> str:
    calls = len(event.receipt.calls) if event.receipt is not None else 0
    weights = (
        f"weights {event.weight_version}"
        if event.weight_version == event.max_weight_version
        else f"weights {event.weight_version} to {event.max_weight_version}"
    )
    resumed = f", {event.resumed_tokens:,} of them by an earlier attempt," if event.resumed_tokens else ""
    return (
        f"sibling {event.generation}, attempt {event.attempt}: sealed{_VALIDITIES[event.validity]}: "
        f"{format_count(event.completion_tokens, 'token')}{resumed} in {format_count(calls, 'model call')} by {weights}, ended by "
        f"{event.finish_reason.value}, reward {event.raw_reward:.4g}, {event.shaped_reward:.4g} to train on"
    )


def _attempt_superseded(event: e.AttemptSuperseded) -> str:
    return f"sibling {event.generation}, attempt {event.attempt}: given up, {_because(event.reason, event.detail)}"


def _late_result_rejected(event: e.LateResultRejected) -> str:
    return (
        f"sibling {event.generation}, attempt {event.attempt}: a late result of "
        f"{format_count(event.completion_tokens, 'token')} was rejected, {_because(event.reason)}"
    )


def _cohort_sealed(event: e.CohortSealed) -> str:
    return f"all siblings of attempt {event.attempt} are sealed together"


def _finalize_started(event: e.FinalizeStarted) -> str:
    return "finalizing began"


def _group_finalized(event: e.GroupFinalized) -> str:
    tokens = sum(row.num_tokens for row in event.rows)
    return (
        f"finalized: {format_count(len(event.rows), 'canonical row')} of {format_count(tokens, 'token')} published, "
        f"{event.valid_fraction:.0%} of the siblings valid; it is in the replay buffer"
    )


def _finalize_failed(event: e.FinalizeFailed) -> str:
    charged = "" if event.charged else "; this is not charged to its budget"
    return f"its canonical rows are not there, {_because(event.reason, event.detail)}{charged}"


def _group_claimed(event: e.GroupClaimed) -> str:
    return f"claimed by step {event.train_step}"


def _step_shrunk(event: e.StepShrunk) -> str:
    return (
        f"step {event.train_step} is trained on {event.found_groups} groups instead of {event.expected_groups}, "
        f"{_because(event.reason)}"
    )


def _step_applied(event: e.StepApplied) -> str:
    return f"step {event.train_step} was applied to {format_count(len(event.group_ids), 'group')}"


def _weights_published(event: e.WeightsPublished) -> str:
    return f"weights {event.weight_version}, of step {event.train_step}, went to the generation engines"


def _group_dropped(event: e.GroupDropped) -> str:
    return f"dropped for good, {_because(event.reason, event.detail)}; it is not trained on"


def _group_parked(event: e.GroupParked) -> str:
    return f"parked, {_because(event.reason, event.detail)}; other groups go on, and it is not trained on"


def _rows_cleared(event: e.RowsCleared) -> str:
    groups = f" of groups {some(event.group_ids)}" if len(event.group_ids) > 1 else ""
    return (
        f"{format_count(event.num_rows, _PARTITIONS[event.partition] + ' row')}{groups} cleared from the data plane, "
        f"{_because(event.reason)}"
    )


def _checkpoint_committed(event: e.CheckpointCommitted) -> str:
    text = f"{_CHECKPOINTS[event.checkpoint_kind]} {event.name} was committed, with the trainer at step {event.train_step}"
    if not event.frontier_step:
        return text
    return f"{text}; steps up to {event.frontier_step} can no longer be undone"


def _checkpoint_failed(event: e.CheckpointFailed) -> str:
    return f"checkpoint {event.name} was given up, {_because(event.reason, event.detail)}"


def _recovery_planned(event: e.RecoveryPlanned) -> str:
    return (
        f"of all groups, the restart keeps {format_count(event.siblings_reused, 'sealed sibling')} and redoes "
        f"{format_count(event.siblings_redispatched, 'attempt')}: {event.tokens_saved:,} tokens saved, "
        f"{event.tokens_redone:,} to be generated again"
    )


def _run_restored(event: e.RunRestored) -> str:
    where = f"checkpoint {event.checkpoint}" if event.checkpoint is not None else "the start of the run"
    return (
        f"restored from {where}, at step {event.train_step} and weights {event.weight_version}: later steps are undone, "
        "draws are not"
    )


def _dataset_exhausted(event: e.DatasetExhausted) -> str:
    return f"the dataset was exhausted after {format_count(event.draw_cursor, 'draw')}"


_Sentence: TypeAlias = Callable[[Any], str]

#: One for every kind.
SENTENCES: dict[type[e.Event], _Sentence] = {
    e.RunOpened: _run_opened,
    e.WriterOpened: _writer_opened,
    e.WriterClosed: _writer_closed,
    e.TailTruncated: _tail_truncated,
    e.GroupReserved: _group_reserved,
    e.GroupAdmitted: _group_admitted,
    e.SiblingDispatched: _sibling_dispatched,
    e.SiblingSealed: _sibling_sealed,
    e.AttemptSuperseded: _attempt_superseded,
    e.LateResultRejected: _late_result_rejected,
    e.CohortSealed: _cohort_sealed,
    e.FinalizeStarted: _finalize_started,
    e.GroupFinalized: _group_finalized,
    e.FinalizeFailed: _finalize_failed,
    e.GroupClaimed: _group_claimed,
    e.StepShrunk: _step_shrunk,
    e.StepApplied: _step_applied,
    e.WeightsPublished: _weights_published,
    e.GroupDropped: _group_dropped,
    e.GroupParked: _group_parked,
    e.RowsCleared: _rows_cleared,
    e.CheckpointCommitted: _checkpoint_committed,
    e.CheckpointFailed: _checkpoint_failed,
    e.RecoveryPlanned: _recovery_planned,
    e.RunRestored: _run_restored,
    e.DatasetExhausted: _dataset_exhausted,
}
