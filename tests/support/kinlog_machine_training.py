"""Commands of the recovery machine: groups are finalized, trained on, and leave."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from kinlog_builders import digest_of
from kinlog_machine_attempts import FAILURES, PICK, AttemptCommands, when_any
from kinlog_naive_run import BEFORE_FINALIZED, RUNNING, WAITING

from kinlog.lineage import decide
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Partition, Reason


class TrainingCommands(AttemptCommands):
    """What comes after a group's last seal; and whole ways, which a random walk would seldom go."""

    # ---- finalize ---------------------------------------------------------------------------------------------

    @when_any("ready", "finalizing")
    @rule(number=PICK)
    def finalize_starts(self, number: int) -> None:
        chosen = self.pick(number, "ready", "finalizing")
        if chosen is not None:
            self.world.commit(e.FinalizeStarted(group_id=chosen))
            self.world.acknowledge()
            self.group(chosen).status = "finalizing"

    @when_any("finalizing")
    @rule(number=PICK)
    def finalizer_publishes_and_says_nothing(self, number: int) -> None:
        chosen = self.pick(number, "finalizing")
        if chosen is not None:
            self.world.put(self.group(chosen).canonical(chosen))

    @when_any("finalizing")
    @rule(number=PICK, clears=st.booleans())
    def finalize_answers(self, number: int, clears: bool) -> None:
        world, chosen = self.world, self.pick(number, "finalizing")
        if chosen is None:
            return
        group = self.group(chosen)
        world.put(group.canonical(chosen))
        world.commit(self.finalized(chosen))
        world.acknowledge()
        group.status, group.failed_finalizes = "finalized", 0
        if clears:
            rows = {row for which in range(len(group.siblings)) for row in group.staged(chosen, which)}
            world.clear(rows, Partition.STAGING, Reason.FINALIZED)
        world.refuses(e.FinalizeStarted(group_id=chosen), "found finalized")

    def finalized(self, number: int) -> e.GroupFinalized:
        rows = tuple(
            e.CanonicalRowRef(which, attempt, 16, digest_of("canonical", of, which, attempt))
            for of, which, attempt in sorted(self.group(number).canonical(number))
        )
        return e.GroupFinalized(group_id=number, rows=rows, valid_fraction=1.0)

    @when_any("finalizing")
    @rule(number=PICK)
    def finalized_group_has_too_few_valid_siblings(self, number: int) -> None:
        world, chosen = self.world, self.pick(number, "finalizing")
        if chosen is not None:
            world.put(self.group(chosen).canonical(chosen))
            dropped = e.GroupDropped(group_id=chosen, reason=Reason.LOW_VALID_FRACTION)
            world.commit(self.finalized(chosen), dropped)
            world.naive.leave(chosen, "dropped", "low_valid_fraction")
            world.clear_group(chosen, Reason.LOW_VALID_FRACTION)

    @when_any("finalizing")
    @rule(number=PICK, published=st.booleans())
    def finalize_comes_to_nothing(self, number: int, published: bool) -> None:
        world, chosen = self.world, self.pick(number, "finalizing")
        if chosen is None:
            return
        group = self.group(chosen)
        if published:
            world.put(group.canonical(chosen))
        spent = decide.finalize_budget_spent(world.p.groups[chosen])
        assert spent == (group.failed_finalizes >= group.budget[0])
        failed = e.FinalizeFailed(group_id=chosen, reason=Reason.WORKER_LOST, charged=True)
        parked = [e.GroupParked(group_id=chosen, reason=Reason.RETRY_BUDGET)] if spent else []
        world.commit(failed, *parked)
        world.naive.unfinalize(chosen, charged=True)
        if spent:
            world.naive.leave(chosen, "parked", "retry_budget")
            world.clear_group(chosen, Reason.RETRY_BUDGET)

    @when_any("finalizing")
    @rule(number=PICK, which=PICK, reason=st.sampled_from([Reason.ROWS_MISSING, Reason.DIGEST_MISMATCH]))
    def finalize_is_rejected(self, number: int, which: int, reason: Reason) -> None:
        world, chosen = self.world, self.pick(number, "finalizing")
        if chosen is None:
            return
        group = self.group(chosen)
        which %= len(group.siblings)
        superseded = decide.supersede_attempt(world.p, chosen, which, reason)
        redone = range(len(group.siblings)) if group.whole else [which]
        rows = group.canonical(chosen).union(*(group.staged(chosen, place) for place in redone))
        world.commit(e.FinalizeFailed(group_id=chosen, reason=reason, charged=True), *superseded)
        world.naive.unfinalize(chosen, charged=True)
        for place in redone:
            world.naive.give_up(chosen, place, reason if place == which else "cohort_restart")
        for row in rows:
            world.plane.pop(row, None)

    # ---- training ---------------------------------------------------------------------------------------------

    @when_any("finalized")
    @rule()
    def drop_what_is_stale(self) -> None:
        world = self.world
        for number in world.naive.in_status("finalized"):
            stale = world.sampler.is_stale(world.p, world.p.groups[number])
            assert stale == world.is_stale(world.naive, self.group(number).target, self.group(number).oldest)
            if stale:
                world.commit(e.GroupDropped(group_id=number, reason=Reason.STALE))
                world.naive.leave(number, "dropped", "stale")
                world.clear_group(number, Reason.STALE)

    @when_any("finalized")
    @rule()
    def claim(self) -> None:
        world, naive = self.world, self.world.naive
        if naive.in_status("claimed"):
            return
        self.drop_what_is_stale()
        chosen = world.sampler.select(world.p)
        finalized = naive.in_status("finalized")
        gps, step = world.config.trainer.groups_per_step, len(naive.steps) + 1
        if chosen is None:
            due = [n for n in finalized if self.group(n).target in (None, step)]
            enough = due if world.config.sampler.name == "in_order" else finalized
            assert len(enough) < gps or len(naive.alive()) > len(finalized), (
                "all wait, and enough are finalized"
            )
            return
        assert chosen
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(finalized)
        if world.config.sampler.name == "in_order":
            assert all(self.group(n).target in (None, step) for n in chosen)
            assert len(chosen) >= gps or world.config.sampler.shortfall == "shrink"
        else:
            assert len(chosen) == gps
        world.commit(*(e.GroupClaimed(group_id=n, train_step=step) for n in chosen))
        for n in chosen:
            self.group(n).status, self.group(n).step = "claimed", step
        world.acknowledge()

    @when_any("claimed")
    @rule(publishes=st.booleans())
    def apply(self, publishes: bool) -> None:
        world = self.world
        claimed, step = world.naive.in_status("claimed"), len(world.naive.steps) + 1
        published = [e.WeightsPublished(weight_version=step, train_step=step)] if publishes else []
        world.commit(e.StepApplied(train_step=step, group_ids=tuple(claimed)), *published)
        world.naive.apply(claimed)
        world.naive.weights = step if publishes else world.naive.weights
        world.refuses(e.GroupClaimed(group_id=claimed[0], train_step=step + 1), "found applied")

    @precondition(lambda self: self.world.naive.weights < len(self.world.naive.steps))
    @rule()
    def publish_weights(self) -> None:
        world = self.world
        step = len(world.naive.steps)
        if world.naive.weights < step:
            world.commit(e.WeightsPublished(weight_version=step, train_step=step))
            world.naive.weights = step

    @rule(trainer=st.booleans())
    def checkpoint(self, trainer: bool) -> None:
        world, step = self.world, len(self.world.naive.steps)
        world.record_checkpoint(world.save(trainer=trainer))
        if trainer:
            world.acknowledge()
            world.clear(world.naive.covered_by(step), Partition.TRAINING, Reason.STEP_DURABLE)

    # ---- leaving ----------------------------------------------------------------------------------------------

    @when_any(*BEFORE_FINALIZED, "finalized", "parked")
    @rule(number=PICK)
    def evict(self, number: int) -> None:
        chosen = self.pick(number, *BEFORE_FINALIZED, "finalized", "parked")
        if chosen is not None and number % 3 == 0:
            self.world.commit(e.GroupDropped(group_id=chosen, reason=Reason.EVICTED))
            self.world.naive.leave(chosen, "dropped", "evicted")
            self.world.clear_group(chosen, Reason.EVICTED)

    # ---- what a random walk would seldom reach ----------------------------------------------------------------

    @rule(steps=st.lists(st.integers(0, 8), min_size=1, max_size=3))
    def new_groups_go_forward(self, steps: list[int]) -> None:
        """Fresh groups do whatever comes next for them, so many times."""
        for of_this_one in steps:
            drawn = len(self.world.naive.groups)
            self.draw(0)
            if len(self.world.naive.groups) > drawn:
                for _ in range(of_this_one):
                    self.forward(drawn)

    @when_any(*BEFORE_FINALIZED)
    @rule(number=PICK, steps=st.integers(1, 4))
    def somebody_goes_forward(self, number: int, steps: int) -> None:
        chosen = self.pick(number, *BEFORE_FINALIZED)
        for _ in range(steps):
            assert chosen is not None
            self.forward(chosen)

    def forward(self, number: int) -> None:
        group, naive = self.group(number), self.world.naive
        place = naive.in_status(group.status).index(number)
        match group.status:
            case "reserved":
                self.admit(place)
            case "admitted" | "generating" if any(s.status == WAITING for s in group.siblings):
                waiting = [
                    n
                    for n in naive.in_status("admitted", "generating")
                    for s in self.group(n).siblings
                    if s.status == WAITING
                ]
                self.dispatch(waiting.index(number), True)
            case "generating" if group.whole:
                cohorts = [n for n in naive.in_status("generating") if self.group(n).whole]
                self.cohort_answers(cohorts.index(number), False)
            case "generating":
                which = [sibling.status for sibling in group.siblings].index(RUNNING)
                self.answer(number, which, group.siblings[which].attempt, 1.0)
            case "ready":
                self.finalize_starts(naive.in_status("ready", "finalizing").index(number))
            case "finalizing":
                self.finalize_answers(place, True)

    @rule(failures=st.lists(st.tuples(PICK, FAILURES), min_size=1, max_size=4))
    def attempts_fail_and_are_made_again(self, failures: list[tuple[int, Reason]]) -> None:
        self.new_groups_go_forward([2])
        for number, reason in failures:
            self.attempt_fails(number, reason)
            self.dispatch(number, False)

    @rule(draws=st.integers(1, 3), saves=st.booleans())
    def everybody_goes_all_the_way(self, draws: int, saves: bool) -> None:
        for _ in range(draws):
            self.draw(0)
        for number in self.world.naive.in_status(*BEFORE_FINALIZED):
            for _ in range(9):
                self.forward(number)
        self.claim()
        if self.world.naive.in_status("claimed"):
            self.apply(True)
            if saves:
                self.checkpoint(True)
