"""Any commands in any order, with restarts anywhere, against a model that is too simple to be wrong."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kinlog_batches import newest_first
from kinlog_builders import Story, recorded_again, sealed_result

from kinlog.lineage.decide import (
    Assignment,
    SealOutcome,
    dispatch_siblings,
    seal_cohort,
    seal_sibling,
    supersede_attempt,
)
from kinlog.lineage.fold import fold
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.replay.projection import replay
from kinlog.replay.settled import replay_newest_first
from kinlog.schemas import events as e
from kinlog.schemas.errors import ResultConflictError, TransitionError
from kinlog.schemas.reasons import Granularity, Reason

PICK = st.integers(0, 10**6)
REASONS = st.sampled_from([Reason.TIMEOUT, Reason.DATA_FAILURE, Reason.CONTROLLER_RESTART, Reason.STALE])


@dataclass
class Sibling:
    attempt: int = 0
    status: str = "waiting"
    reward: float | None = None
    failures: dict[Reason, int] = field(default_factory=dict)


@dataclass
class Group:
    cohort: bool
    siblings: list[Sibling]
    status: str = "reserved"
    step: int | None = None

    @property
    def all_sealed(self) -> bool:
        return all(s.status == "sealed" for s in self.siblings)


class RunAgainstModel(RuleBasedStateMachine):
    """The real run is told event by event; the model is a list of groups that forgets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Story()
        self.groups: list[Group] = []
        self.steps: list[list[int]] = []
        self.frontier = 0
        self.late = 0
        self.restarts = 0

    # ---- choosing ---------------------------------------------------------------------------------------------

    def in_status(self, *statuses: str) -> list[int]:
        return [i for i, g in enumerate(self.groups) if g.status in statuses]

    def pick(self, number: int, *statuses: str) -> int | None:
        chosen = self.in_status(*statuses)
        return chosen[number % len(chosen)] if chosen else None

    # ---- the life of a group ----------------------------------------------------------------------------------

    @rule(siblings=st.integers(1, 3), cohort=st.booleans())
    def reserve(self, siblings: int, cohort: bool) -> None:
        granularity = Granularity.PROMPT_GROUP if cohort else Granularity.SIBLING
        group_id = self.told.reserve(siblings=siblings, granularity=granularity)
        self.groups.append(Group(cohort, [Sibling() for _ in range(siblings)]))
        assert group_id == len(self.groups) - 1

    @rule(siblings=st.integers(1, 2), cohort=st.booleans())
    def a_group_goes_all_the_way(self, siblings: int, cohort: bool) -> None:
        """What a random walk would seldom reach: a group that can be claimed."""
        granularity = Granularity.PROMPT_GROUP if cohort else Granularity.SIBLING
        self.told.finalized(siblings=siblings, granularity=granularity, weight_version=0)
        self.groups.append(Group(cohort, [Sibling(1, "sealed", 1.0) for _ in range(siblings)], "finalized"))

    @rule(number=PICK)
    def admit(self, number: int) -> None:
        group_id = self.pick(number, "reserved")
        if group_id is not None:
            self.told.admit(group_id)
            self.groups[group_id].status = "admitted"

    @rule(number=PICK, which=PICK)
    def dispatch(self, number: int, which: int) -> None:
        group_id = self.pick(number, "admitted", "generating")
        if group_id is None:
            return
        group = self.groups[group_id]
        waiting = [i for i, s in enumerate(group.siblings) if s.status == "waiting"]
        if not waiting:
            return
        chosen = waiting if group.cohort else [waiting[which % len(waiting)]]
        attempt = 1 + max(group.siblings[i].attempt for i in chosen)
        events = dispatch_siblings(self.told.p, group_id, [Assignment(i, "w", 0) for i in chosen])
        assert [event.attempt for event in events] == [attempt] * len(chosen)
        self.told.commit(*events)
        for i in chosen:
            group.siblings[i].status, group.siblings[i].attempt = "running", attempt
        group.status = "generating"

    @rule(number=PICK, which=PICK, back=st.sampled_from([0, 0, 0, 1, 2]), reward=st.sampled_from([0.5, 1.0]))
    def result_arrives(self, number: int, which: int, back: int, reward: float) -> None:
        """A result of any attempt of any sibling, whatever has become of it."""
        if not self.groups:
            return
        group_id = number % len(self.groups)
        group = self.groups[group_id]
        i = which % len(group.siblings)
        sibling = group.siblings[i]
        attempt = max(0, sibling.attempt - back)
        result = sealed_result(group_id, i, attempt, raw_reward=reward)
        gone = group.status in ("dropped", "forgotten")
        try:
            outcome, events = seal_sibling(self.told.p, result)
        except TransitionError:
            current = sibling.status == "running" and attempt == sibling.attempt
            assert not gone
            assert attempt == 0 or (group.cohort and current)
            return
        except ResultConflictError:
            assert not gone
            assert (sibling.status, sibling.attempt) == ("sealed", attempt)
            assert sibling.reward != reward
            return
        self.told.commit(*events) if events else None
        if outcome is SealOutcome.ACCEPTED:
            assert (group.status, sibling.status, sibling.attempt) == ("generating", "running", attempt)
            sibling.status, sibling.reward = "sealed", reward
            group.status = "ready" if group.all_sealed else group.status
        elif outcome is SealOutcome.DUPLICATE:
            assert (sibling.status, sibling.attempt, sibling.reward) == ("sealed", attempt, reward)
        else:
            assert gone or sibling.attempt > attempt or sibling.status in ("waiting", "parked")
            self.late += 1

    @rule(number=PICK, missing=st.booleans())
    def cohort_results_arrive(self, number: int, missing: bool) -> None:
        group_id = self.pick(number, "generating")
        if group_id is None or not self.groups[group_id].cohort:
            return
        group = self.groups[group_id]
        results = {i: sealed_result(group_id, i, s.attempt) for i, s in enumerate(group.siblings)}
        if missing:
            results.popitem()
        whole = not missing and all(s.status == "running" for s in group.siblings)
        try:
            self.told.commit(*seal_cohort(self.told.p, group_id, results))
        except TransitionError:
            assert not whole
            return
        assert whole
        for sibling in group.siblings:
            sibling.status, sibling.reward = "sealed", 1.0
        group.status = "ready"

    @rule(number=PICK, which=PICK, reason=REASONS)
    def supersede(self, number: int, which: int, reason: Reason) -> None:
        group_id = self.pick(number, "generating", "ready")
        if group_id is None:
            return
        group = self.groups[group_id]
        i = which % len(group.siblings)
        if group.siblings[i].status == "waiting":
            return
        self.told.commit(*supersede_attempt(self.told.p, group_id, i, reason))
        sibling = group.siblings[i]
        sibling.failures[reason] = sibling.failures.get(reason, 0) + 1
        for given_up in group.siblings if group.cohort else [sibling]:
            given_up.status, given_up.reward = "waiting", None
        group.status = "generating"

    @rule(number=PICK, outcome=st.sampled_from(["lost", "failed", "finalized"]))
    def finalize(self, number: int, outcome: str) -> None:
        group_id = self.pick(number, "ready", "finalizing")
        if group_id is None:
            return
        self.told.start_finalize(group_id)
        if outcome == "lost":
            self.groups[group_id].status = "finalizing"
        elif outcome == "failed":
            self.told.commit(e.FinalizeFailed(charged=True, group_id=group_id, reason=Reason.TIMEOUT))
            self.groups[group_id].status = "ready"
        else:
            self.told.finish_finalize(group_id)
            self.groups[group_id].status = "finalized"

    @rule(number=PICK, park=st.booleans())
    def leave(self, number: int, park: bool) -> None:
        statuses = ["reserved", "admitted", "generating", "ready", "finalizing", "finalized", "claimed"]
        group_id = self.pick(number, *statuses, *([] if park else ["parked"]))
        if group_id is None:
            return
        group = self.groups[group_id]
        if park:
            self.told.commit(e.GroupParked(group_id=group_id, reason=Reason.RETRY_BUDGET))
            group.status = "parked"
            for sibling in group.siblings:
                sibling.status = "parked" if sibling.status == "running" else sibling.status
        else:
            self.told.commit(e.GroupDropped(group_id=group_id, reason=Reason.EVICTED))
            group.status = "dropped"

    # ---- the trainer ------------------------------------------------------------------------------------------

    @rule(number=PICK)
    def claim(self, number: int) -> None:
        group_id = self.pick(number, "finalized")
        if group_id is not None:
            self.told.claim(group_id)
            self.groups[group_id].status = "claimed"
            self.groups[group_id].step = len(self.steps) + 1

    @precondition(lambda self: self.in_status("claimed"))
    @rule()
    def apply(self) -> None:
        claimed = self.in_status("claimed")
        self.told.apply(*claimed)
        self.steps.append(claimed)
        for group_id in claimed:
            self.groups[group_id].status = "applied"

    @rule()
    def claim_and_apply_whatever_is_finalized(self) -> None:
        for _ in self.in_status("finalized"):
            self.claim(0)
        if self.in_status("claimed"):
            self.apply()

    @rule(behind=st.integers(0, 2))
    def checkpoint(self, behind: int) -> None:
        self.frontier = max(self.frontier, len(self.steps) - behind)
        self.told.checkpoint(frontier_step=self.frontier)
        for group in self.groups:
            if group.status == "applied" and group.step <= self.frontier:
                group.status = "forgotten"

    # ---- restarts ---------------------------------------------------------------------------------------------

    @rule(back=st.integers(0, 3))
    def restore(self, back: int) -> None:
        step = max(self.frontier, len(self.steps) - back)
        self.told.commit(e.RunRestored(checkpoint="c", position=None, train_step=step, weight_version=step))
        self.restarts += 1
        del self.steps[step:]
        for group in self.groups:
            if group.status == "claimed" or (group.status == "applied" and group.step > step):
                group.status, group.step = "finalized", None

    @rule()
    def restart_from_a_snapshot(self) -> None:
        self.told._own = decode_projection(encode_projection(self.told.p))

    @rule(snapshot_at=st.floats(0, 1))
    def restart_from_the_log(self, snapshot_at: float) -> None:
        records = [recorded_again(record) for record in self.told.records]
        place = int(snapshot_at * len(records))
        p = Projection()
        for record in records[:place]:
            fold(p, record)
        p = decode_projection(encode_projection(p))
        for record in records[place:]:
            fold(p, record)
        assert encode_projection(p) == encode_projection(self.told.p)
        self.told._own = p

    @rule(snapshot_at=st.floats(0, 1), rows=st.sampled_from([9, 50, 1000]))
    def restart_from_the_log_by_columns(self, snapshot_at: float, rows: int) -> None:
        p = replay(self.told.records[: int(snapshot_at * len(self.told.records))])
        p = replay_newest_first(newest_first(self.told.records, after_seq=p.last_seq, rows=rows), p)
        assert encode_projection(p) == encode_projection(self.told.p)

    # ---- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def groups_stand_where_the_model_says(self) -> None:
        p = self.told.p
        present = {i: g for i, g in enumerate(self.groups) if g.status not in ("dropped", "forgotten")}
        assert {i: str(g.phase) for i, g in p.groups.items()} == {i: g.status for i, g in present.items()}
        for group_id, group in present.items():
            for i, expected in enumerate(group.siblings):
                found = p.groups[group_id].siblings[i]
                status = "sealed" if found.sealed else "running" if found.running else "waiting"
                assert (found.attempt, status) == (
                    expected.attempt,
                    expected.status if expected.status != "parked" else "waiting",
                )
                assert found.infrastructure_failures == expected.failures.get(Reason.TIMEOUT, 0)
                assert found.data_failures == expected.failures.get(Reason.DATA_FAILURE, 0)
                assert (found.sealed.raw_reward if found.sealed else None) == expected.reward

    @invariant()
    def nothing_drawn_is_lost(self) -> None:
        p = self.told.p
        assert p.drawn_total == len(self.groups) == p.draw_cursor
        assert p.applied_total == len(self.in_status("applied", "forgotten"))
        assert p.dropped_total == len(self.in_status("dropped"))
        assert p.parked_total == len(self.in_status("parked"))
        assert p.drawn_total == p.applied_total + p.dropped_total + p.parked_total + p.alive_total

    @invariant()
    def steps_are_those_of_the_surviving_history(self) -> None:
        p = self.told.p
        assert (p.train_step, p.frontier_step) == (len(self.steps), self.frontier)
        kept = {step: tuple(g) for step, g in enumerate(self.steps, 1) if step > self.frontier}
        assert p.steps == kept
        assert (p.late_rejected, p.restarts) == (self.late, self.restarts)


TestRunAgainstModel = RunAgainstModel.TestCase
TestRunAgainstModel.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
