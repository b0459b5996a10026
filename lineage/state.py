"""The projection: what a log amounts to, as of one event.

Every structure is keyed by typed identity. Groups that left for good are counted, and forgotten once no kept checkpoint
can bring them back, so the projection's size follows what is alive, not the length of the run.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from kinlog.schemas.events import CanonicalRowRef, Position, RetryBudget, SiblingSealed
from kinlog.schemas.prompts import PromptRef, digest_bytes
from kinlog.schemas.reasons import CheckpointKind, Granularity, Reason

__all__ = [
    "GroupPhase",
    "SiblingState",
    "GroupState",
    "CheckpointState",
    "Projection",
    "LIVE_PHASES",
    "encode_projection",
    "decode_projection",
    "projection_digest",
]


class GroupPhase(StrEnum):
    """Where a group stands between its reservation and its end."""

    RESERVED = "reserved"
    ADMITTED = "admitted"
    GENERATING = "generating"
    READY = "ready"
    FINALIZING = "finalizing"
    FINALIZED = "finalized"
    CLAIMED = "claimed"
    APPLIED = "applied"
    PARKED = "parked"


#: A group in one of these holds a buffer permit.
LIVE_PHASES = frozenset(set(GroupPhase) - {GroupPhase.APPLIED, GroupPhase.PARKED})


class SiblingState(msgspec.Struct, gc=False):
    """One generation slot of a group."""

    generation: int
    attempt: int = 0
    """The last attempt that was dispatched; 0 before the first."""
    running: bool = False
    sealed: SiblingSealed | None = None
    """The accepted result of ``attempt``."""
    sealed_seq: int = 0
    infrastructure_failures: int = 0
    data_failures: int = 0
    last_reason: Reason | None = None
    """Why the attempt before the current one was given up."""
    restarts: int = 0
    """Attempts that were under way when a controller died."""
    resumed_from: int = 0
    """The oldest attempt whose tokens ``attempt`` may go on from; 0: it began anew."""
    rolled_back_to: int | None = None
    """The oldest weight version that was gone back to since that attempt began: tokens of newer ones that these attempts
    left may be of a history that was undone. ``None``: none was."""

    @property
    def waiting(self) -> bool:
        return not self.running and self.sealed is None


class GroupState(msgspec.Struct, gc=False):
    """One drawing of a prompt, with its siblings."""

    group_id: int
    prompt: PromptRef
    num_generations: int
    granularity: Granularity
    retry_budget: RetryBudget
    weight_version: int
    train_step: int | None
    siblings: dict[int, SiblingState]
    phase: GroupPhase = GroupPhase.RESERVED
    cohort_attempt: int | None = None
    """``prompt_group``: the attempt whose seal is in the log."""
    rows: tuple[CanonicalRowRef, ...] = ()
    finalized_seq: int = 0
    valid_fraction: float = 0.0
    finalize_failures: int = 0
    """Finalizes in a row that came to nothing, over all lives, as far as they are charged to the group."""
    claimed_step: int | None = None
    parked_reason: Reason | None = None
    rolled_back: bool = False
    """A step was trained on it, and a restart has undone that step: its permit had been given to another group."""

    @property
    def live(self) -> bool:
        """Whether the group holds a buffer permit."""
        return self.phase in LIVE_PHASES

    @property
    def all_sealed(self) -> bool:
        return all(sibling.sealed is not None for sibling in self.siblings.values())

    @property
    def min_weight_version(self) -> int:
        """The oldest weights behind any sealed token of the group: what staleness is judged by. A placeholder has none."""
        return min(
            (
                sibling.sealed.weight_version
                for sibling in self.siblings.values()
                if sibling.sealed is not None and sibling.sealed.receipt is not None
            ),
            default=self.weight_version,
        )


class CheckpointState(msgspec.Struct, frozen=True):
    """A checkpoint that was committed and may still exist."""

    name: str
    kind: CheckpointKind
    train_step: int
    position: Position


class Projection(msgspec.Struct):
    """Everything that the log's events amount to, as of ``last_seq``."""

    run_id: str = ""
    seed: int = 0
    dataset_fingerprint: str = ""
    last_seq: int = 0
    last_epoch: int = 0
    cleanly_closed: bool = False
    groups: dict[int, GroupState] = {}
    """Live, parked, and applied but not yet out of reach of every kept checkpoint."""
    next_group_id: int = 0
    draw_cursor: int = 0
    exhausted: bool = False
    weight_version: int = 0
    train_step: int = 0
    """The last optimizer step applied on the surviving history."""
    steps: dict[int, tuple[int, ...]] = {}
    """Step -> its groups in order, for the steps that a kept checkpoint can still undo."""
    places: dict[int, int] = {}
    """Step -> how many groups were ever drawn for it, for the steps that a kept checkpoint can still undo."""
    frontier_step: int = 0
    """Steps up to here can no longer be undone."""
    checkpoints: tuple[CheckpointState, ...] = ()
    applied_forgotten: int = 0
    """Groups applied at or before the frontier."""
    dropped: dict[Reason, int] = {}
    sealed_total: int = 0
    sealed_tokens_total: int = 0
    resumed_tokens_total: int = 0
    """How many of them an earlier attempt had generated."""
    superseded: dict[Reason, int] = {}
    late_rejected: int = 0
    restarts: int = 0

    @property
    def drawn_total(self) -> int:
        return self.next_group_id

    @property
    def applied_total(self) -> int:
        return self.applied_forgotten + self._count(GroupPhase.APPLIED)

    @property
    def parked_total(self) -> int:
        return self._count(GroupPhase.PARKED)

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())

    @property
    def alive_total(self) -> int:
        return sum(1 for _ in self.live_groups())

    def live_groups(self) -> Iterator[GroupState]:
        """Yield the groups that hold a buffer permit, oldest first."""
        return (group for _, group in sorted(self.groups.items()) if group.live)

    def _count(self, phase: GroupPhase) -> int:
        return sum(1 for group in self.groups.values() if group.phase is phase)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Projection)


def encode_projection(projection: Projection) -> bytes:
    """Return the projection as msgpack: the same bytes for equal projections, in every process.

    Groups are encoded one by one. In a single call, thousands of them would hold the interpreter for longer than an event
    loop in another thread can wait.
    """
    parts = [_map_header(len(projection.__struct_fields__))]
    for name in projection.__struct_fields__:
        value = getattr(projection, name)
        parts.append(_ENCODER.encode(name))
        if name == "groups":
            parts.append(_map_header(len(value)))
            for group_id in sorted(value):
                parts += (_ENCODER.encode(group_id), _ENCODER.encode(value[group_id]))
        elif isinstance(value, dict):
            parts.append(_ENCODER.encode(dict(sorted(value.items()))))
        else:
            parts.append(_ENCODER.encode(value))
    return b"".join(parts)


def _map_header(size: int) -> bytes:
    """Return how a msgpack map of so many entries begins."""
    if size < 16:
        return bytes((0x80 | size,))
    return b"\xde" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xdf" + size.to_bytes(4, "big")


def decode_projection(data: bytes) -> Projection:
    """Rebuild a projection.

    Raises
    ------
    msgspec.DecodeError
        The bytes are not a projection of this version.
    """
    return _DECODER.decode(data)


def projection_digest(projection: Projection) -> bytes:
    """Return the BLAKE2b-128 digest of the projection."""
    return digest_bytes(encode_projection(projection))
