"""A run as somebody would keep it on paper: every group ever drawn, what each sibling is at, and which rows lie where.

It forgets nothing, has no events, and shares no code with the product: what the product decides is compared with it.
A staged row is ``(group, sibling, attempt, call)``, a canonical one ``(group, sibling, attempt)``; what lies under it is
``good``, ``bad`` (another content) or ``half`` (a put that was cut off).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Row = tuple[int, ...]
Stale = Callable[[int | None, int], bool]

WAITING, RUNNING, SEALED = "waiting", "running", "sealed"
BEFORE_FINALIZED = ("reserved", "admitted", "generating", "ready", "finalizing")
ALIVE = (*BEFORE_FINALIZED, "finalized", "claimed")
INFRASTRUCTURE = ("infrastructure_failure", "worker_lost", "timeout")
NO_FAULT_OF_ITS_OWN = ("infrastructure_failure", "worker_lost", "controller_restart")
MAX_RESUMES = 2


@dataclass
class NaiveSibling:
    attempt: int = 0
    status: str = WAITING
    reward: float = 0.0
    calls: int = 0
    oldest: int = 0
    newest: int = 0
    infrastructure: int = 0
    data: int = 0
    tokens_of: list[int] = field(default_factory=list)
    """Attempts in a row that were cut off without a fault of their own: the next may go on from what they generated."""
    goes_on_from: int | None = None
    """What the present attempt was sent to go on from."""
    sealed_attempts: list[int] = field(default_factory=list)


@dataclass
class NaiveGroup:
    draw: int
    whole: bool
    """Redone whole, or sibling by sibling."""
    budget: tuple[int, int]
    born: int
    """The weights when it was drawn."""
    target: int | None
    siblings: list[NaiveSibling]
    status: str = "reserved"
    step: int | None = None
    failed_finalizes: int = 0
    why: str = ""
    """Why it was dropped or parked."""

    @property
    def all_sealed(self) -> bool:
        return all(sibling.status == SEALED for sibling in self.siblings)

    @property
    def oldest(self) -> int:
        """The oldest weights behind any token of it. A placeholder has no tokens."""
        return min((s.oldest for s in self.siblings if s.status == SEALED and s.calls), default=self.born)

    def staged(self, number: int, which: int) -> set[Row]:
        """The rows behind one sealed sibling."""
        sibling = self.siblings[which]
        return {(number, which, sibling.attempt, call) for call in range(sibling.calls)}

    def canonical(self, number: int) -> set[Row]:
        return {(number, which, sibling.attempt) for which, sibling in enumerate(self.siblings)}


@dataclass
class NaiveCheckpoint:
    """A directory that can be gone back to, and what the data plane held when it was made."""

    name: str
    step: int
    weights: int
    trainer: bool
    promised: set[Row]
    plane: dict[Row, str]


@dataclass
class Verdict:
    """What a restart should come to."""

    dropped: set[int] = field(default_factory=set)
    unfinalized: dict[int, set[str]] = field(default_factory=dict)
    """Groups that lose their canonical rows, or the hope of them, with what may be given as the reason."""
    redone: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """(group, sibling) -> what may be given as the reason."""
    reused: set[tuple[int, int]] = field(default_factory=set)
    kept_rows: set[Row] = field(default_factory=set)
    missed: set[Row] = field(default_factory=set)
    """Rows that lineage relies on and the data plane lacks."""
    refinalized: set[int] = field(default_factory=set)
    finalized: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)


class NaiveRun:
    def __init__(self) -> None:
        self.groups: list[NaiveGroup] = []
        self.steps: list[list[int]] = []
        self.weights = 0
        self.frontier = 0
        self.exhausted = False
        self.late = 0
        self.restarts = 0
        self.superseded: dict[str, int] = {}
        self.usable: list[NaiveCheckpoint] = []
        self.recorded: list[str] = []
        """Names of the checkpoints that the log knows of, oldest first."""
        self.ever_recorded = False
        self.chosen_away: set[int] = set()
        """Groups of which promised rows were redone by choice: what is promised of them has become a matter of taste."""

    # ---- looking ----------------------------------------------------------------------------------------------

    def in_status(self, *statuses: str) -> list[int]:
        return [number for number, group in enumerate(self.groups) if group.status in statuses]

    def alive(self) -> list[int]:
        return self.in_status(*ALIVE)

    def relied_on(self) -> set[Row]:
        """The rows that those alive could not do without."""
        rows: set[Row] = set()
        for number in self.in_status("finalized", "claimed"):
            rows |= self.groups[number].canonical(number)
        for number, which in self.sealed_in(*BEFORE_FINALIZED):
            rows |= self.groups[number].staged(number, which)
        return rows

    def sealed_in(self, *statuses: str) -> Iterator[tuple[int, int]]:
        for number in self.in_status(*statuses):
            for which, sibling in enumerate(self.groups[number].siblings):
                if sibling.status == SEALED:
                    yield number, which

    def budget_spent(self, number: int, which: int, reason: str) -> bool:
        group = self.groups[number]
        sibling = group.siblings[which]
        if reason in INFRASTRUCTURE:
            return sibling.infrastructure >= group.budget[0]
        return reason == "data_failure" and sibling.data >= group.budget[1]

    # ---- what happens -----------------------------------------------------------------------------------------

    def send(self, number: int, chosen: list[int]) -> None:
        group = self.groups[number]
        common = 1 + max(sibling.attempt for sibling in group.siblings)
        for which in chosen:
            sibling = group.siblings[which]
            assert sibling.status == WAITING
            if group.whole or len(sibling.tokens_of) > MAX_RESUMES:
                sibling.tokens_of = []
            sibling.goes_on_from = sibling.tokens_of[-1] if sibling.tokens_of else None
            sibling.status, sibling.attempt = RUNNING, common if group.whole else sibling.attempt + 1
        group.status = "generating"

    def seal(self, number: int, which: int, *, calls: int, reward: float, oldest: int, newest: int) -> None:
        group = self.groups[number]
        sibling = group.siblings[which]
        assert sibling.status == RUNNING
        assert sibling.attempt not in sibling.sealed_attempts, "one attempt was accepted twice"
        sibling.sealed_attempts.append(sibling.attempt)
        sibling.status, sibling.calls, sibling.reward = SEALED, calls, reward
        sibling.oldest, sibling.newest = oldest, newest
        if group.all_sealed:
            group.status = "ready"

    def give_up(self, number: int, which: int, reason: str) -> None:
        """One sibling's attempt only: of a cohort, each is given up for itself."""
        group = self.groups[number]
        sibling = group.siblings[which]
        assert sibling.status != WAITING
        sibling.status, sibling.calls, sibling.reward = WAITING, 0, 0.0
        sibling.infrastructure += reason in INFRASTRUCTURE
        sibling.data += reason == "data_failure"
        sibling.tokens_of = [*sibling.tokens_of, sibling.attempt] if reason in NO_FAULT_OF_ITS_OWN else []
        group.status = "generating"
        self.superseded[reason] = self.superseded.get(reason, 0) + 1

    def unfinalize(self, number: int, *, charged: bool) -> None:
        group = self.groups[number]
        group.status = "ready"
        group.failed_finalizes += charged

    def leave(self, number: int, status: str, why: str) -> None:
        group = self.groups[number]
        group.status, group.why = status, why
        for sibling in group.siblings:
            if sibling.status == RUNNING:
                sibling.status = WAITING

    def apply(self, numbers: list[int]) -> None:
        self.steps.append(numbers)
        for number in numbers:
            assert self.groups[number].step == len(self.steps)
            self.groups[number].status = "applied"

    def covered_by(self, step: int) -> set[Row]:
        """The canonical rows that nobody needs once a trainer checkpoint covers a step."""
        rows: set[Row] = set()
        for number in self.in_status("applied", "forgotten"):
            group = self.groups[number]
            if group.step is not None and group.step <= step:
                rows |= group.canonical(number)
        return rows

    def checkpointed(self, name: str, frontier: int) -> None:
        """The log hears of a checkpoint; what can no longer be gone back to is forgotten."""
        self.ever_recorded = True
        self.frontier = frontier
        for number in self.in_status("applied"):
            group = self.groups[number]
            if group.step is not None and group.step <= frontier:
                group.status = "forgotten"
        self.usable = [checkpoint for checkpoint in self.usable if checkpoint.step >= frontier]
        steps = {checkpoint.name: checkpoint.step for checkpoint in self.usable}
        self.recorded = [known for known in [*self.recorded, name] if known in steps]

    def go_back(self, checkpoint: NaiveCheckpoint | None) -> None:
        step = checkpoint.step if checkpoint is not None else 0
        assert step >= self.frontier
        self.weights = checkpoint.weights if checkpoint is not None else 0
        del self.steps[step:]
        for group in self.groups:
            if group.status == "claimed" or (
                group.status == "applied" and group.step is not None and group.step > step
            ):
                group.status, group.step = "finalized", None
        self.usable = [found for found in self.usable if found.step <= step]
        names = {found.name for found in self.usable}
        self.recorded = [name for name in self.recorded if name in names]
        self.restarts += 1

    # ---- what a restart should decide -------------------------------------------------------------------------

    def judge(
        self, plane: dict[Row, str], stale: Stale, *, discard_future: bool, discard_all: bool
    ) -> Verdict:
        """What is to become of everybody alive, given what the data plane holds. To be asked after ``go_back``.

        ``stale`` is told a group's step, and the oldest weights behind it.
        """
        verdict = Verdict()
        for number in self.alive():
            self._judge_group(number, plane, stale, discard_future, discard_all, verdict)
        return verdict

    def _judge_group(
        self,
        number: int,
        plane: dict[Row, str],
        stale: Stale,
        discard_future: bool,
        discard_all: bool,
        verdict: Verdict,
    ) -> None:
        group = self.groups[number]
        everybody = range(len(group.siblings))
        missed: set[Row] = set()
        taken_apart: set[str] = set()
        if group.status == "finalized":
            lost = {} if discard_all else _lost(group.canonical(number), plane)
            missed |= set(lost)
            if discard_all:
                taken_apart = {"discarded_by_request"}
            elif lost:
                taken_apart = set(lost.values())
            elif discard_future and any(s.newest > self.weights for s in group.siblings):
                taken_apart = {"future_weights"}
            elif stale(group.target, group.oldest):
                verdict.dropped.add(number)
                return
            else:
                verdict.finalized.add(number)
                verdict.kept_rows |= group.canonical(number)
                verdict.reused |= {(number, which) for which in everybody}
                return
        redone: dict[int, str] = {}
        for which in everybody:
            sibling = group.siblings[which]
            lost = {} if discard_all else _lost(group.staged(number, which), plane)
            if sibling.status == RUNNING:
                redone[which] = "controller_restart"
            elif sibling.status == SEALED and discard_all:
                redone[which] = "discarded_by_request"
            elif sibling.status == SEALED and lost and taken_apart != {"future_weights"}:
                redone[which] = lost[min(lost)]
                missed |= set(lost)
            elif sibling.status == SEALED and (lost or (discard_future and sibling.newest > self.weights)):
                redone[which] = "future_weights"
        reasons = {which: {reason} for which, reason in redone.items()}
        if group.whole and redone:
            sent = [which for which in everybody if group.siblings[which].status != WAITING]
            reasons = {which: reasons.get(which, set()) | {"cohort_restart"} for which in sent}
        kept = [w for w in everybody if group.siblings[w].status == SEALED and w not in reasons]
        of_kept = [group.siblings[which].oldest for which in kept if group.siblings[which].calls]
        # What is generated again is as fresh as the weights are, but for a step that is past it is late.
        if stale(group.target, min(of_kept, default=self.weights)):
            verdict.dropped.add(number)
            return
        if not stale(group.target, group.oldest):
            verdict.missed |= missed
        if taken_apart:
            verdict.unfinalized[number] = taken_apart
        verdict.redone |= {(number, which): given for which, given in reasons.items()}
        for which in kept:
            verdict.reused.add((number, which))
            verdict.kept_rows |= group.staged(number, which)
        if len(kept) < len(group.siblings):
            verdict.waiting.add(number)
        if group.status == "finalizing" and redone:
            verdict.unfinalized[number] = set(redone.values()) | {"cohort_restart"}
        elif group.status == "finalizing":
            verdict.refinalized.add(number)
            verdict.kept_rows |= group.canonical(number)


def _lost(rows: set[Row], plane: dict[Row, str]) -> dict[Row, str]:
    """Those that are not there as they were put, each with what that is called."""
    return {
        row: "digest_mismatch" if plane.get(row) == "bad" else "rows_missing"
        for row in rows
        if plane.get(row) != "good"
    }
