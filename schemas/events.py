"""The events of the log: what happened, in the past tense, versioned, immutable.

An event is metadata: tokens and text are never in it, and an encoded payload over ``MAX_PAYLOAD_BYTES`` is refused.
Fields named in ``kinlog.schemas.columns.ENVELOPE_FIELDS`` are Arrow columns of the log; the others are its payload.
Fields may be added at the end with a default; a change of meaning is a new ``VERSION`` with an upcaster.
"""

import re
from typing import ClassVar

import msgspec

from kinlog.schemas.prompts import Digest, PromptRef
from kinlog.schemas.reasons import CheckpointKind, FinishReason, Granularity, Partition, Reason, Validity
from kinlog.schemas.receipts import Receipt

__all__ = [
    "Event",
    "RecordedEvent",
    "Position",
    "RetryBudget",
    "CanonicalRowRef",
    "EVENT_TYPES",
    "kind_of",
    "PassedOver",
    "RunOpened",
    "WriterOpened",
    "WriterClosed",
    "TailTruncated",
    "GroupReserved",
    "GroupAdmitted",
    "SiblingDispatched",
    "SiblingSealed",
    "AttemptSuperseded",
    "LateResultRejected",
    "CohortSealed",
    "FinalizeStarted",
    "GroupFinalized",
    "FinalizeFailed",
    "GroupClaimed",
    "StepShrunk",
    "StepApplied",
    "WeightsPublished",
    "GroupDropped",
    "GroupParked",
    "RowsCleared",
    "CheckpointCommitted",
    "CheckpointFailed",
    "RecoveryPlanned",
    "RunRestored",
    "DatasetExhausted",
]


def _kind_name(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


# Nothing here can be part of a cycle, and a run keeps many thousands: the collector need not walk through them.
class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag=_kind_name):
    """The base of every event."""

    VERSION: ClassVar[int] = 1
    #: A reader that does not know this kind may pass over it. Only for events that change no state.
    IGNORABLE: ClassVar[bool] = False


def kind_of(event_type: type[Event]) -> str:
    """Return the kind under which events of this type are recorded, such as ``sibling_sealed``."""
    tag = event_type.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


class RecordedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event with its place in the log."""

    seq: int
    """Order of the event in its log, from 1, without gaps. The only order there is: clocks may go backwards."""
    epoch: int
    """The writer epoch that appended it."""
    time_us: int
    """Wall clock of the writer, microseconds since 1970-01-01 UTC. For people: nothing is decided by it."""
    event: Event
    """What happened."""


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A place in a log that can be checked: the last event's seq and epoch, and the checksum of its frame."""

    epoch: int
    """Writer epoch of the frame."""
    seq: int
    """Its last event."""
    checksum: int
    """CRC-32 of the frame."""


class RetryBudget(msgspec.Struct, frozen=True, array_like=True):
    """How many failed attempts a sibling may have, by class of failure, over all lives of the run."""

    infrastructure: int
    """Failures of workers, network or data plane."""
    data: int
    """Failures of the sibling's own."""
    restarts: int | None = None
    """How many attempts may be under way when a controller dies. ``None``: no restart is charged to anybody."""


class CanonicalRowRef(msgspec.Struct, frozen=True, array_like=True):
    """One trainable row of a finalized group. Its key follows from the identity: see ``canonical_key``."""

    generation: int
    """The sibling that the row is of."""
    attempt: int
    """The sealed attempt that it was made of."""
    num_tokens: int
    """Length of the row: prompt, completions and feedback."""
    row_digest: Digest
    """BLAKE2b-128 of its content."""


class RunOpened(Event, frozen=True, kw_only=True):
    """A new run began. Always the first event of a log."""

    run_id: str
    """Names the run, in every life, log and checkpoint of it."""
    kinlog_version: str
    """Version that began it."""
    config_digest: Digest
    """BLAKE2b-128 of the configuration with every default written out."""
    dataset_fingerprint: str
    """Digest (hex) of the dataset's definition."""
    seed: int
    """``seed`` of the configuration."""


class WriterOpened(Event, frozen=True, kw_only=True):
    """A controller took the log over. Its epoch is the envelope's."""

    host: str
    """Name of the machine that the controller runs on."""
    pid: int
    """Its process there."""


class WriterClosed(Event, frozen=True, kw_only=True):
    """A controller closed the log in order: a log that is shorter than this is damaged."""


class TailTruncated(Event, frozen=True, kw_only=True):
    """A torn tail, left by a crash in the middle of a write, was copied aside and cut off."""

    segment: str
    """File name of the segment that was cut."""
    offset_bytes: int
    """Where it ends now."""
    quarantined_bytes: int
    """How many bytes were cut off, without trailing zeros."""
    quarantined_to: str
    """Path of the copy, relative to the log."""


class GroupReserved(Event, frozen=True, kw_only=True):
    """A group owns a prompt and a buffer permit. Nothing has been sent."""

    group_id: int
    """The group's number, from 0, in the order of the draws. Never used twice in a run."""
    prompt: PromptRef
    """Which row of the dataset it is drawn from."""
    num_generations: int
    """N: how many siblings it has."""
    granularity: Granularity
    """What a failure or a restart redoes of it. Resolved here, once."""
    retry_budget: RetryBudget
    """Of each of its siblings, and of its finalize. Fixed here, once."""
    weight_version: int
    """Weights at the time of the reservation."""
    train_step: int | None = None
    """The step that this group is drawn for, where the sampler fixes one."""
    draw_cursor: int
    """Draws made so far, this one included: where the dataloader goes on."""


class GroupAdmitted(Event, frozen=True, kw_only=True):
    """The sampler let the group start: its siblings may be dispatched."""

    group_id: int


class SiblingDispatched(Event, frozen=True, kw_only=True):
    """An attempt of a sibling is about to be sent to a worker."""

    group_id: int
    generation: int
    """Which sibling of the group, from 0 to N - 1."""
    attempt: int
    """Which attempt of the sibling, from 1. No number is used twice."""
    weight_version: int
    """Weights of the generation engines at the time."""
    worker: str
    """Name of the worker that it is sent to."""
    seed: int
    """Seed of its random numbers."""
    resumes_attempt: int | None = None
    """The attempt before, if this one may go on from the tokens that it left."""


class SiblingSealed(Event, frozen=True, kw_only=True):
    """The controller accepted an attempt's result. Only a supersede can undo it."""

    group_id: int
    generation: int
    attempt: int
    weight_version: int
    """The oldest weights that generated a token of it."""
    max_weight_version: int
    """The newest weights that generated a token of it."""
    receipt: Receipt | None
    """``None`` for a placeholder: sealed, but no example."""
    raw_reward: float
    """What the environment gave."""
    shaped_reward: float
    """The value that is trained on."""
    prompt_tokens: int
    """Tokens of its first model call's prompt."""
    completion_tokens: int
    """Tokens that the policy generated, over all its model calls."""
    finish_reason: FinishReason
    """How its last model call ended."""
    validity: Validity
    """Whether it is an example to train on."""
    resumed_tokens: int = 0
    """How many of ``completion_tokens`` an earlier attempt had generated."""


class AttemptSuperseded(Event, frozen=True, kw_only=True):
    """An attempt was given up: a late result of it will be rejected."""

    group_id: int
    generation: int
    attempt: int
    reason: Reason
    """Why."""
    detail: str = ""
    """More about it, for people. May be empty."""


class LateResultRejected(Event, frozen=True, kw_only=True):
    """A result arrived for an attempt that had been superseded, or whose group had left."""

    group_id: int
    generation: int
    attempt: int
    reason: Reason
    completion_tokens: int
    """Tokens that were generated for nothing."""


class CohortSealed(Event, frozen=True, kw_only=True):
    """All siblings of a ``prompt_group`` group sealed: their seals follow in the same frame."""

    group_id: int
    attempt: int


class FinalizeStarted(Event, frozen=True, kw_only=True):
    """The finalizer is about to be called. Until ``group_finalized`` the outcome is unknown, and is re-driven."""

    group_id: int


class GroupFinalized(Event, frozen=True, kw_only=True):
    """The group's canonical rows are published, and the replay buffer owns them."""

    group_id: int
    rows: tuple[CanonicalRowRef, ...]
    """One for each sibling, in the order of their generations."""
    valid_fraction: float
    """Valid siblings out of N, from 0 to 1."""


class FinalizeFailed(Event, frozen=True, kw_only=True):
    """The group has no canonical rows that the log knows of: the finalizer refused or never answered, or what it
    published is gone.

    Version 1 had no ``charged``: nothing was counted.
    """

    VERSION: ClassVar[int] = 2

    group_id: int
    reason: Reason
    charged: bool
    """Whether this counts against the group's infrastructure budget. A restart's own findings do not."""
    detail: str = ""


class GroupClaimed(Event, frozen=True, kw_only=True):
    """An optimizer step took the group."""

    group_id: int
    train_step: int
    """The optimizer step, from 1."""


class StepShrunk(Event, frozen=True, kw_only=True):
    """An optimizer step is trained on fewer groups than configured: its places cannot all be filled any more."""

    train_step: int
    reason: Reason
    expected_groups: int
    """As configured."""
    found_groups: int
    """How many it is trained on."""


class StepApplied(Event, frozen=True, kw_only=True):
    """An optimizer step was applied to these groups, in this order. Durable with the next trainer checkpoint."""

    train_step: int
    group_ids: tuple[int, ...]
    """The groups, in the order that they were trained on."""


class WeightsPublished(Event, frozen=True, kw_only=True):
    """The generation engines were given new weights."""

    weight_version: int
    """Their version: how many optimizer steps they have behind them."""
    train_step: int
    """The step that made them."""


class GroupDropped(Event, frozen=True, kw_only=True):
    """The group left for good, and is not trained on."""

    group_id: int
    reason: Reason
    detail: str = ""


class GroupParked(Event, frozen=True, kw_only=True):
    """The group's retry budget is spent: it is set aside, and other groups go on."""

    group_id: int
    reason: Reason
    detail: str = ""


class RowsCleared(Event, frozen=True, kw_only=True):
    """Rows are about to be removed from the data plane."""

    partition: Partition
    """Which of the data plane's partitions."""
    reason: Reason
    num_rows: int
    """How many."""
    group_ids: tuple[int, ...]
    """The groups that the rows belonged to; those unknown to the log included."""


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """A checkpoint directory is complete and durable."""

    name: str
    """Name of its directory in ``checkpoints/``."""
    checkpoint_kind: CheckpointKind
    """Whole, or rollouts only."""
    train_step: int
    """The last step that is in it."""
    position: Position
    """Everything up to here is in the checkpoint."""
    frontier_step: int
    """The oldest step that a kept trainer checkpoint can go back to: groups applied up to it are forgotten."""
    duration_us: int | None = None
    """From the beginning of the save until the directory was complete and durable; ``None``: not measured."""
    held_us: int | None = None
    """How much of that no cut was open anywhere."""


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A checkpoint was given up: the run goes on with the previous one."""

    name: str
    """Name that its directory would have had."""
    reason: Reason
    detail: str
    """What went wrong."""


class RecoveryPlanned(Event, frozen=True, kw_only=True):
    """What this restart decided to do. The supersedes that follow say it sibling by sibling."""

    checkpoint: str | None
    """Name of the checkpoint that is gone back to; ``None``: the start of the run."""
    siblings_reused: int
    """Sealed siblings that are kept."""
    siblings_redispatched: int
    """Attempts that are given up, sealed or running."""
    groups_reused: int
    """Finalized groups that are back in the replay buffer as they are."""
    groups_rolled_back: int
    """Groups whose canonical rows are gone: they are finalized, or generated, again."""
    groups_dropped: int
    """Groups that leave for good."""
    rows_unreferenced: int
    """Rows in the data plane that nothing refers to, and that are cleared."""
    tokens_saved: int
    """Completion tokens of the siblings that are kept."""
    tokens_redone: int
    """Completion tokens of sealed siblings that are generated again."""


class RunRestored(Event, frozen=True, kw_only=True):
    """Trainer and data plane were restored from a checkpoint: effects of later steps are undone, draws are not."""

    checkpoint: str | None
    position: Position | None
    """The checkpoint's place in the log; ``None``: the start of the run."""
    train_step: int
    """The step that training goes on after."""
    weight_version: int
    """The restored weights."""


class DatasetExhausted(Event, frozen=True, kw_only=True):
    """The dataset has no more prompts to draw."""

    draw_cursor: int
    """Draws made in the whole run."""


EVENT_TYPES: dict[str, type[Event]] = {
    kind_of(event_type): event_type for event_type in Event.__subclasses__()
}


class PassedOver(Event, frozen=True, kw_only=True):
    """Stands for an event of a newer kinlog that its writer marked ignorable: it has a seq, and changes nothing.

    Made by readers, and never written: it is not in ``EVENT_TYPES``.
    """

    original_kind: str
