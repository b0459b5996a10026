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


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A place in a log that can be checked: the last event's seq and epoch, and the checksum of its frame."""

    epoch: int
    seq: int
    checksum: int


class RetryBudget(msgspec.Struct, frozen=True, array_like=True):
    """How many failed attempts a sibling may have, by class of failure, over all lives of the run."""

    infrastructure: int
    data: int
    restarts: int | None = None
    """How many attempts may be under way when a controller dies. ``None``: no restart is charged to anybody."""


class CanonicalRowRef(msgspec.Struct, frozen=True, array_like=True):
    """One trainable row of a finalized group. Its key follows from the identity: see ``canonical_key``."""

    generation: int
    attempt: int
    num_tokens: int
    row_digest: Digest


class RunOpened(Event, frozen=True, kw_only=True):
    """A new run began. Always the first event of a log."""

    run_id: str
    kinlog_version: str
    config_digest: Digest
    dataset_fingerprint: str
    seed: int


class WriterOpened(Event, frozen=True, kw_only=True):
    """A controller took the log over. Its epoch is the envelope's."""

    host: str
    pid: int


class WriterClosed(Event, frozen=True, kw_only=True):
    """A controller closed the log in order: a log that is shorter than this is damaged."""


class TailTruncated(Event, frozen=True, kw_only=True):
    """A torn tail, left by a crash in the middle of a write, was copied aside and cut off."""

    segment: str
    offset_bytes: int
    quarantined_bytes: int
    quarantined_to: str


class GroupReserved(Event, frozen=True, kw_only=True):
    """A group owns a prompt and a buffer permit. Nothing has been sent."""

    group_id: int
    prompt: PromptRef
    num_generations: int
    granularity: Granularity
    retry_budget: RetryBudget
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
    attempt: int
    weight_version: int
    worker: str
    seed: int


class SiblingSealed(Event, frozen=True, kw_only=True):
    """The controller accepted an attempt's result. Only a supersede can undo it."""

    group_id: int
    generation: int
    attempt: int
    weight_version: int
    """The oldest weights that generated a token of it."""
    max_weight_version: int
    receipt: Receipt | None
    """``None`` for a placeholder: sealed, but no example."""
    raw_reward: float
    shaped_reward: float
    """The value that is trained on."""
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason
    validity: Validity


class AttemptSuperseded(Event, frozen=True, kw_only=True):
    """An attempt was given up: a late result of it will be rejected."""

    group_id: int
    generation: int
    attempt: int
    reason: Reason
    detail: str = ""


class LateResultRejected(Event, frozen=True, kw_only=True):
    """A result arrived for an attempt that had been superseded, or whose group had left."""

    group_id: int
    generation: int
    attempt: int
    reason: Reason
    completion_tokens: int


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
    valid_fraction: float


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


class StepShrunk(Event, frozen=True, kw_only=True):
    """An optimizer step is trained on fewer groups than configured: its places cannot all be filled any more."""

    train_step: int
    reason: Reason
    expected_groups: int
    found_groups: int


class StepApplied(Event, frozen=True, kw_only=True):
    """An optimizer step was applied to these groups, in this order. Durable with the next trainer checkpoint."""

    train_step: int
    group_ids: tuple[int, ...]


class WeightsPublished(Event, frozen=True, kw_only=True):
    """The generation engines were given new weights."""

    weight_version: int
    train_step: int


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
    reason: Reason
    num_rows: int
    group_ids: tuple[int, ...]
    """The groups that the rows belonged to; those unknown to the log included."""


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """A checkpoint directory is complete and durable."""

    name: str
    checkpoint_kind: CheckpointKind
    train_step: int
    position: Position
    """Everything up to here is in the checkpoint."""
    frontier_step: int
    """The oldest step that a kept trainer checkpoint can go back to: groups applied up to it are forgotten."""


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A checkpoint was given up: the run goes on with the previous one."""

    name: str
    reason: Reason
    detail: str


class RecoveryPlanned(Event, frozen=True, kw_only=True):
    """What this restart decided to do. The supersedes that follow say it sibling by sibling."""

    checkpoint: str | None
    siblings_reused: int
    siblings_redispatched: int
    groups_reused: int
    groups_rolled_back: int
    groups_dropped: int
    rows_unreferenced: int
    tokens_saved: int
    tokens_redone: int


class RunRestored(Event, frozen=True, kw_only=True):
    """Trainer and data plane were restored from a checkpoint: effects of later steps are undone, draws are not."""

    checkpoint: str | None
    position: Position | None
    train_step: int
    weight_version: int


class DatasetExhausted(Event, frozen=True, kw_only=True):
    """The dataset has no more prompts to draw."""

    draw_cursor: int


EVENT_TYPES: dict[str, type[Event]] = {
    kind_of(event_type): event_type for event_type in Event.__subclasses__()
}


class PassedOver(Event, frozen=True, kw_only=True):
    """Stands for an event of a newer kinlog that its writer marked ignorable: it has a seq, and changes nothing.

    Made by readers, and never written: it is not in ``EVENT_TYPES``.
    """

    original_kind: str
