"""The story of a group: all that the log says of it, in plain sentences, and how it stands."""

from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import Choice, ignorable_kinds, read_events
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import GroupPhase, GroupState, SiblingState
from kinlog.replay.plain_text import format_count
from kinlog.replay.selection import may_list
from kinlog.replay.settled import is_of
from kinlog.replay.story.one_group import OneGroup
from kinlog.replay.story.sentences import BECAUSE, sentence
from kinlog.schemas import events as e
from kinlog.schemas.errors import NotInRunError
from kinlog.schemas.reasons import CheckpointKind
from kinlog.schemas.settings import RolloutRecoverySettings

__all__ = ["Story", "StoryLine", "tell_story"]

#: What happens to the whole run, and so to a group that is alive.
_RUN_EVENTS = (
    e.WriterOpened,
    e.WriterClosed,
    e.TailTruncated,
    e.RunRestored,
    e.RecoveryPlanned,
    e.CheckpointCommitted,
    e.StepShrunk,
)


class StoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One event, in words."""

    seq: int
    epoch: int
    time_us: int
    kind: str
    text: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kinlog why`` tells."""

    run_id: str
    group_id: int
    generation: int | None
    """``None``: of the whole group."""
    dropped_events: int
    """The first of the log: of these nothing can be told."""
    lines: tuple[StoryLine, ...]
    alive: bool
    phase: str
    """A phase of a group; or ``dropped``, or ``durable``: trained on, and never undone."""
    present: str
    """How it stands, in a sentence."""


def tell_story(
    scan: LogScan,
    group_id: int,
    generation: int | None = None,
    *,
    recovery: RolloutRecoverySettings | None = None,
) -> Story:
    """Tell what became of a group, or of one of its siblings.

    Parameters
    ----------
    recovery:
        The run's configuration, which says who resolved the granularity; ``None``: that is not told.

    Raises
    ------
    NotInRunError
        The log has no such group or sibling, or nothing of it any more.
    TransitionError
        The events of the group tell an impossible story.
    """
    teller = _Teller(scan, group_id, generation, recovery)
    for record in _records(scan, group_id):
        teller.take(record)
    if teller.prompted is None:
        raise NotInRunError(_missing(scan, group_id))
    if generation is not None and generation >= teller.num_generations:
        raise NotInRunError(
            f"group {group_id} has no sibling {generation}: it has 0 to {teller.num_generations - 1}"
        )
    return teller.story()


def _records(scan: LogScan, group_id: int) -> Iterator[e.RecordedEvent]:
    """Yield the events that say something of a group, and perhaps a few more."""

    met = group_id < scan.beginning().next_group_id

    def rows(batch: pa.RecordBatch) -> pa.Array:
        nonlocal met
        wanted = pc.fill_null(pc.equal(batch.column("group_id"), group_id), fill_value=False)
        met |= wanted.true_count > 0
        if not met:
            return wanted  # before its reservation, nothing is told of it
        for listing in (e.StepApplied, e.RowsCleared):
            wanted = pc.or_(wanted, may_list(batch, listing, {group_id}))
        return pc.or_(wanted, is_of(batch, *_RUN_EVENTS))

    for batch in scan.batches(choice=Choice(("kind", "version", "group_id", "payload"), rows)):
        for record in read_events(batch, ignorable_kinds(batch.schema)):
            listed = getattr(record.event, "group_ids", None)
            if listed is None or group_id in listed:
                yield record


def _missing(scan: LogScan, group_id: int) -> str:
    """Say why there is nothing to tell of a group."""
    beginning = scan.beginning()
    if group_id < beginning.next_group_id:
        return (
            f"group {group_id} had left for good by seq {beginning.last_seq}, and the events up to there were dropped "
            "(log.history: drop): nothing of it is left but its place in the sums"
        )
    drawn = beginning.next_group_id
    newest = Choice(("kind",), lambda batch: is_of(batch, e.GroupReserved))
    for batch in scan.batches(newest_first=True, choice=newest):
        drawn = batch.column("group_id")[-1].as_py() + 1
        break
    return f"group {group_id} was never drawn: the run has drawn {format_count(drawn, 'group')}, from 0 on"


class _Teller:
    def __init__(
        self,
        scan: LogScan,
        group_id: int,
        generation: int | None,
        recovery: RolloutRecoverySettings | None,
    ) -> None:
        self._scan = scan
        self._group_id = group_id
        self._generation = generation
        self._recovery = recovery
        self._group = OneGroup(group_id, scan.beginning())
        self._lines: list[StoryLine] = []
        self._claimed: set[int] = set()
        self._covered_step: int | None = None
        self._dropped: tuple[int, e.GroupDropped] | None = None
        self.prompted = self._group.state
        self._step = self.prompted.claimed_step if self.prompted is not None else None
        """The last step that was applied to it."""

    @property
    def num_generations(self) -> int:
        return self.prompted.num_generations if self.prompted is not None else 0

    def take(self, record: e.RecordedEvent) -> None:
        """Fold the next event, and keep what it says."""
        before = self._group.state
        event = record.event
        phase, claimed = (before.phase, before.claimed_step) if before is not None else (None, None)
        self._group.fold(record)
        after = self._group.state
        if isinstance(event, e.GroupReserved):
            self.prompted = after
        if isinstance(event, e.GroupDropped):
            self._dropped = record.seq, event
        if isinstance(event, e.StepApplied):
            self._step = event.train_step
        if isinstance(event, _RUN_EVENTS):
            text = None if phase is None else self._told(event, phase, claimed, after)
        elif self._generation in (None, getattr(event, "generation", self._generation)):
            text = self._own(event)
        else:
            text = None
        if text is not None:
            self._lines.append(
                StoryLine(
                    seq=record.seq,
                    epoch=record.epoch,
                    time_us=record.time_us,
                    kind=e.kind_of(type(event)),
                    text=f"{text[0].upper()}{text[1:]}.",
                )
            )

    def _own(self, event: e.Event) -> str:
        """Say what an event of the group itself says."""
        text = sentence(event)
        match event:
            case e.GroupReserved():
                text += self._resolved_by(event)
            case e.GroupClaimed():
                again = "again " if self._claimed else ""
                self._claimed.add(event.train_step)
                text = f"claimed {again}by step {event.train_step}"
            case e.StepApplied():
                place = event.group_ids.index(self._group_id) + 1
                text += f", and this was number {place} of them"
        return text

    def _resolved_by(self, event: e.GroupReserved) -> str:
        recovery, prompt = self._recovery, event.prompt
        if recovery is None:
            return ""
        if recovery.resolve(agent_name=prompt.agent_name, task_name=prompt.task_name) != event.granularity:
            return (
                "; the configuration would give it another granularity by now, which changes nothing for it"
            )
        if prompt.agent_name in recovery.agent_granularity_overrides:
            return f"; the granularity is that of agent {prompt.agent_name}"
        if prompt.task_name in recovery.task_granularity_overrides:
            return f"; the granularity is that of task {prompt.task_name}"
        return "; the granularity is the default"

    def _told(
        self, event: e.Event, phase: GroupPhase, claimed: int | None, after: GroupState | None
    ) -> str | None:
        """Say what an event of the whole run means for the group, if anything."""
        text = sentence(event)
        match event:
            case e.StepShrunk():
                return text if event.train_step == claimed else None
            case e.CheckpointCommitted():
                if after is None:
                    return f"{text}: it will not be trained on again"
                if phase is not GroupPhase.APPLIED or event.checkpoint_kind is not CheckpointKind.TRAINER:
                    return None
                if claimed == self._covered_step:
                    return None
                self._covered_step = claimed
                return f"{text}; it holds what step {claimed} learned from this group"
            case e.RunRestored():
                if after is not None and after.phase is not phase:
                    was = "step" if phase is GroupPhase.APPLIED else "claim by step"
                    return (
                        f"{text}; that {was} {claimed} of this group is undone, and it is back in the replay buffer as it "
                        "was: to be trained on again, not to be generated again"
                    )
                return f"{text}; this group stays as it is, but for what follows"
            case e.WriterOpened():
                return f"the run was started again; {text}"
        return text

    def story(self) -> Story:
        """Return what was told, and how the group stands."""
        state = self._group.state
        if state is not None:
            phase, present = state.phase.value, _standing(state, self._generation)
        elif self._dropped is not None:
            seq, event = self._dropped
            phase = "dropped"
            present = f"gone: dropped at seq {seq}, because {BECAUSE[event.reason]}"
        else:
            phase, present = (
                "durable",
                f"done: trained on by step {self._step}, which no restart can undo any more",
            )
        return Story(
            run_id=self._scan.run_id,
            group_id=self._group_id,
            generation=self._generation,
            dropped_events=self._scan.first_seq - 1,
            lines=tuple(self._lines),
            alive=state is not None and state.live,
            phase=phase,
            present=f"{present[0].upper()}{present[1:]}.",
        )


def _standing(group: GroupState, generation: int | None) -> str:
    """Say how a group stands that the log has not let go of."""
    match group.phase:
        case GroupPhase.APPLIED:
            text = f"trained on by step {group.claimed_step}; a restart from an older checkpoint would train on it again"
        case GroupPhase.PARKED:
            reason = "" if group.parked_reason is None else f", because {BECAUSE[group.parked_reason]}"
            text = f"parked{reason}: {_siblings(group)}"
        case GroupPhase.CLAIMED:
            text = f"alive: step {group.claimed_step} is being trained on it"
        case GroupPhase.FINALIZED:
            text = f"alive: finalized at seq {group.finalized_seq}, and waits in the replay buffer to be trained on"
        case GroupPhase.FINALIZING:
            text = "alive: it is being finalized, or the outcome is not known yet"
        case GroupPhase.READY:
            text = f"alive: all {group.num_generations} siblings are sealed, and wait to be finalized"
        case GroupPhase.RESERVED:
            text = "alive: it waits for the sampler to let it start; nothing was sent"
        case _:
            text = f"alive: {_siblings(group)}"
    if generation is None:
        return text
    return f"sibling {generation}: {_sibling(group.siblings[generation])}. Its group is {text}"


def _siblings(group: GroupState) -> str:
    siblings = group.siblings.values()
    sealed = sum(sibling.sealed is not None for sibling in siblings)
    running = sum(sibling.running for sibling in siblings)
    waiting = group.num_generations - sealed - running
    parts = [f"{sealed} of {group.num_generations} siblings sealed"]
    if running:
        parts.append(f"{running} in flight")
    if waiting:
        parts.append(f"{waiting} not being generated" if not group.live else f"{waiting} to be dispatched")
    return ", ".join(parts)


def _sibling(sibling: SiblingState) -> str:
    if sibling.sealed is not None:
        return f"attempt {sibling.attempt} is sealed"
    if sibling.running:
        return f"attempt {sibling.attempt} is in flight"
    return f"to be dispatched as attempt {sibling.attempt + 1}"
