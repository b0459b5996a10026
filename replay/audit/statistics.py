"""Statistics of a run: what its log holds and what that amounts to."""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.lineage.scan import LogScan, ScannedSegment
from kinlog.lineage.state import GroupPhase, Projection
from kinlog.replay.lives import Life, LivesTally
from kinlog.replay.payload_columns import payload_columns
from kinlog.replay.settled import SealedTokens, count_reasons, is_of, replay_newest_first
from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind

_IDENTITY = ("group_id", "generation", "attempt")
_FACTOR = 4099

#: Few, and looked at one by one.
_RUN_EVENTS = (
    e.WriterOpened,
    e.WriterClosed,
    e.TailTruncated,
    e.RunRestored,
    e.StepApplied,
    e.CheckpointCommitted,
)

__all__ = [
    "CheckpointRecord",
    "GroupStatistics",
    "RunStatistics",
    "SiblingStatistics",
    "StepStatistics",
    "TokenStatistics",
    "collect_statistics",
]


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the groups are: drawn = applied + dropped + parked + alive."""

    drawn: int
    applied: int
    dropped: dict[str, int]
    """By reason."""
    parked: dict[str, int]
    """By reason: set aside now."""
    alive: dict[str, int]
    """By phase."""


class SiblingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of siblings, counted over all lives."""

    dispatched: int
    sealed: int
    superseded: dict[str, int]
    """Attempts given up, by reason."""
    superseded_sealed: dict[str, int]
    """Those of them that had been sealed: finished work that was redone."""
    late_rejected: dict[str, int]
    """Results that came after their attempt was given up, by reason."""
    running: int
    """In flight at the end of the log."""
    sealed_by_validity: dict[str, int]
    sealed_by_finish: dict[str, int]


class TokenStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Completion tokens, counted over all lives."""

    sealed: int
    resumed: int
    """Of these, what an earlier attempt had generated: not generated again after a crash."""
    superseded: int
    """Of sealed attempts that were given up later."""
    late: int
    """Of results that were rejected."""


class StepStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer steps and weights."""

    applied: int
    """The last step on the surviving history."""
    rolled_back: int
    """Steps that were applied, and undone by a restart."""
    weight_version: int
    weights_published: int


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the log says was committed; its directory may have been pruned since."""

    name: str
    kind: CheckpointKind
    train_step: int
    position_seq: int
    committed_us: int


class RunStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kinlog log stats`` shows."""

    run_id: str
    log_id: str
    segments: int
    verified_bytes: int
    events: int
    dropped_events: int
    """The first of them: of these only the sum is left. What is counted event by event is counted after them."""
    events_by_kind: dict[str, int]
    groups: GroupStatistics
    siblings: SiblingStatistics
    tokens: TokenStatistics
    steps: StepStatistics
    draw_cursor: int
    dataset_exhausted: bool
    checkpoints: tuple[CheckpointRecord, ...]
    checkpoints_failed: dict[str, int]
    """By reason."""
    lives: tuple[Life, ...]


class _Tally:
    """Counts a log's events by columns, the newest batch first."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.superseded: Counter[str] = Counter()
        self.superseded_sealed: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.validity: Counter[str] = Counter()
        self.finish: Counter[str] = Counter()
        self.failed_checkpoints: Counter[str] = Counter()
        self.superseded_tokens = self.late_tokens = 0
        self._given_up: dict[int, dict[tuple[int, int], str]] = {}
        """group -> (generation, attempt) -> why it was given up, as long as it is not known whether it had been sealed."""
        nothing = pa.array([], pa.int64())
        self._sealed_seqs, self._sealed_tokens, self._resumed_tokens = (
            pa.array([], pa.uint64()),
            nothing,
            nothing,
        )
        """Of the last batch."""
        self._records: list[e.RecordedEvent] = []
        """Of the whole run, and those at which a life begins or ends; the newest first."""

    def through(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Count batches on their way to another reader."""
        for batch in batches:
            self._take(batch)
            yield batch

    def sealed_tokens(self, rows: pa.RecordBatch) -> SealedTokens:
        """Return the sums over some of the last batch's seals."""
        some = pc.is_in(self._sealed_seqs, rows.column("seq"))
        return SealedTokens.summed(self._sealed_tokens.filter(some), self._resumed_tokens.filter(some))

    def _take(self, batch: pa.RecordBatch) -> None:
        kinds = batch.column("kind")
        names = kinds.dictionary.to_pylist()
        for counted in pc.value_counts(kinds.indices).to_pylist():
            self.kinds[names[counted["values"]]] += counted["counts"]
        self._take_superseded(batch.filter(is_of(batch, e.AttemptSuperseded)))
        self._take_sealed(batch.filter(is_of(batch, e.SiblingSealed)))
        late = batch.filter(is_of(batch, e.LateResultRejected))
        self.late.update(count_reasons(late))
        tokens = payload_columns(e.LateResultRejected, late, ("completion_tokens",))["completion_tokens"]
        self.late_tokens += pc.sum(tokens).as_py() or 0
        self.failed_checkpoints.update(count_reasons(batch.filter(is_of(batch, e.CheckpointFailed))))
        told = pc.or_(is_of(batch, *_RUN_EVENTS), _ends_of_lives(batch))
        records = list(read_events(batch.filter(told), ignorable_kinds(batch.schema)))
        self._records += reversed(records)

    def _take_superseded(self, rows: pa.RecordBatch) -> None:
        self.superseded.update(count_reasons(rows))
        columns = [rows.column(name).to_pylist() for name in _IDENTITY]
        reasons = rows.column("reason").cast(pa.utf8()).to_pylist()
        for group_id, generation, attempt, reason in zip(*columns, reasons, strict=True):
            self._given_up.setdefault(group_id, {})[generation, attempt] = reason

    def _take_sealed(self, rows: pa.RecordBatch) -> None:
        names = ("completion_tokens", "resumed_tokens", "validity", "finish_reason")
        columns = payload_columns(e.SiblingSealed, rows, names)
        self._sealed_seqs, self._sealed_tokens = rows.column("seq"), columns["completion_tokens"]
        self._resumed_tokens = columns["resumed_tokens"]
        for counter, name in ((self.validity, "validity"), (self.finish, "finish_reason")):
            for counted in pc.value_counts(columns[name]).to_pylist():
                counter[counted["values"]] += counted["counts"]
        here = set(pc.unique(rows.column("group_id")).to_pylist()) & self._given_up.keys()
        hashes = [
            _hash(group_id, generation, attempt)
            for group_id in here
            for generation, attempt in self._given_up[group_id]
        ]
        may_be_given_up = pc.is_in(_hashes(rows), pa.array(hashes, pa.int64()))
        of_given_up, tokens = rows.filter(may_be_given_up), self._sealed_tokens.filter(may_be_given_up)
        identity = [of_given_up.column(name).to_pylist() for name in _IDENTITY]
        for group_id, generation, attempt, completion_tokens in zip(
            *identity, tokens.to_pylist(), strict=True
        ):
            self._take_given_up(group_id, generation, attempt, completion_tokens)

    def _take_given_up(self, group_id: int, generation: int, attempt: int, completion_tokens: int) -> None:
        """Count a seal if its attempt was given up later."""
        reason = self._given_up.get(group_id, {}).pop((generation, attempt), None)
        if reason is not None:
            self.superseded_sealed[reason] += 1
            self.superseded_tokens += completion_tokens

    def go_on_from(self, beginning: Projection) -> None:
        """Take what had been sealed before the oldest batch. The last to be called."""
        for group_id in self._given_up.keys() & beginning.groups.keys():
            for sibling in beginning.groups[group_id].siblings.values():
                if sibling.sealed is not None:
                    self._take_given_up(
                        group_id, sibling.generation, sibling.attempt, sibling.sealed.completion_tokens
                    )

    def lives(self) -> tuple[Life, ...]:
        """Return the lives of the run, oldest first."""
        lives = LivesTally()
        for record in reversed(self._records):
            lives.add(record)
        return lives.lives()

    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """Return the checkpoints that were committed, oldest first."""
        return tuple(
            CheckpointRecord(
                name=event.name,
                kind=event.checkpoint_kind,
                train_step=event.train_step,
                position_seq=event.position.seq,
                committed_us=record.time_us,
            )
            for record in reversed(self._records)
            if isinstance(event := record.event, e.CheckpointCommitted)
        )

    def steps_rolled_back(self, train_step: int) -> int:
        """Return how many steps restarts have undone, given the last one before the oldest batch."""
        undone = 0
        for record in reversed(self._records):
            if isinstance(record.event, e.StepApplied):
                train_step = record.event.train_step
            elif isinstance(record.event, e.RunRestored):
                undone += train_step - record.event.train_step
                train_step = record.event.train_step
        return undone


def _hash(group_id: int, generation: int, attempt: int) -> int:
    """Return a number by which an attempt is found among many; others may have the same."""
    return (((group_id * _FACTOR + generation) * _FACTOR + attempt + 2**63) % 2**64) - 2**63


def _hashes(rows: pa.RecordBatch) -> pa.Array:
    group_ids, generations, attempts = (rows.column(name).cast(pa.int64()) for name in _IDENTITY)
    # Arrow's numbers wrap around.
    return pc.add(pc.multiply(pc.add(pc.multiply(group_ids, _FACTOR), generations), _FACTOR), attempts)


def _ends_of_lives(batch: pa.RecordBatch) -> pa.Array:
    """Return for each row whether it is next to another life's, or at an end of the batch."""
    epochs = batch.column("epoch")
    changes = pc.not_equal(epochs.slice(1), epochs.slice(0, batch.num_rows - 1))
    end = pa.array([True])
    return pc.or_(pa.concat_arrays([end, changes]), pa.concat_arrays([changes, end]))


def collect_statistics(scan: LogScan) -> RunStatistics:
    """Count what a log holds, by its columns: few of its events are decoded.

    Raises
    ------
    TransitionError
        The log tells an impossible story, as far as that is looked at: see ``kinlog.replay.settled``.
    LogUnsupportedError
        An event was written by a newer kinlog.
    """
    beginning, tally = scan.beginning(), _Tally()
    batches = scan.batches(beginning.last_seq, newest_first=True)
    projection = replay_newest_first(
        tally.through(batches), scan.beginning(), sealed_tokens=tally.sealed_tokens
    )
    tally.go_on_from(beginning)
    groups = projection.groups.values()
    parked = Counter(
        g.parked_reason.value for g in groups if g.phase is GroupPhase.PARKED and g.parked_reason is not None
    )
    alive = Counter(g.phase.value for g in projection.live_groups())
    return RunStatistics(
        run_id=scan.run_id,
        log_id=scan.log_id,
        segments=len(scan.segments),
        verified_bytes=sum(_verified_bytes(scan, segment) for segment in scan.segments),
        events=scan.end.seq,
        dropped_events=scan.first_seq - 1,
        events_by_kind=dict(tally.kinds),
        groups=GroupStatistics(
            drawn=projection.drawn_total,
            applied=projection.applied_total,
            dropped={reason.value: count for reason, count in projection.dropped.items()},
            parked=dict(parked),
            alive={phase.value: alive[phase.value] for phase in GroupPhase if alive[phase.value]},
        ),
        siblings=SiblingStatistics(
            dispatched=tally.kinds["sibling_dispatched"],
            sealed=tally.kinds["sibling_sealed"],
            superseded=dict(tally.superseded),
            superseded_sealed=dict(tally.superseded_sealed),
            late_rejected=dict(tally.late),
            running=sum(s.running for g in groups for s in g.siblings.values()),
            sealed_by_validity=dict(tally.validity),
            sealed_by_finish=dict(tally.finish),
        ),
        tokens=TokenStatistics(
            sealed=projection.sealed_tokens_total - beginning.sealed_tokens_total,
            resumed=projection.resumed_tokens_total - beginning.resumed_tokens_total,
            superseded=tally.superseded_tokens,
            late=tally.late_tokens,
        ),
        steps=StepStatistics(
            applied=projection.train_step,
            rolled_back=tally.steps_rolled_back(beginning.train_step),
            weight_version=projection.weight_version,
            weights_published=tally.kinds["weights_published"],
        ),
        draw_cursor=projection.draw_cursor,
        dataset_exhausted=projection.exhausted,
        checkpoints=tally.checkpoints(),
        checkpoints_failed=dict(tally.failed_checkpoints),
        lives=tally.lives(),
    )


def _verified_bytes(scan: LogScan, segment: ScannedSegment) -> int:
    # Of a compacted one the scan has the beginning only; all of it was verified to be read.
    return segment.path.stat().st_size if segment.compacted else segment.scan.end_offset
