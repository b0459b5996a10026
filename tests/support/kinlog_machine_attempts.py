"""Commands of the recovery machine: groups are drawn, their attempts sent, and results come, fail, or come too late."""

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kinlog_builders import sealed_result
from kinlog_naive_run import (
    ALIVE,
    BEFORE_FINALIZED,
    MAX_RESUMES,
    RUNNING,
    SEALED,
    WAITING,
    NaiveGroup,
    NaiveSibling,
)
from kinlog_recovery_world import RecoveryWorld

from kinlog.lineage import decide
from kinlog.schemas import events as e
from kinlog.schemas.errors import ResultConflictError, TransitionError
from kinlog.schemas.reasons import Granularity, Reason

F = TypeVar("F", bound=Callable[..., None])

PICK = st.integers(0, 10**6)
FAILURES = st.sampled_from(
    [Reason.INFRASTRUCTURE_FAILURE, Reason.DATA_FAILURE, Reason.TIMEOUT, Reason.WORKER_LOST]
)
GRANULARITIES = st.sampled_from(list(Granularity))
CONFIGS = st.fixed_dictionaries(
    {
        "rollout__num_generations": st.integers(1, 3),
        "rollout__max_live_groups": st.integers(2, 8),
        "rollout__max_infrastructure_retries": st.integers(0, 2),
        "rollout__max_data_retries": st.integers(0, 1),
        "rollout__spent_retry_budget": st.sampled_from(["park", "drop", "train_partial"]),
        "trainer__groups_per_step": st.integers(1, 2),
        "sampler__name": st.sampled_from(["in_order", "windowed", "weight_fifo", "ready_first"]),
        "sampler__shortfall": st.sampled_from(["top_up", "shrink"]),
        "sampler__max_lookahead_versions": st.integers(1, 3),
        "sampler__max_staleness_versions": st.integers(0, 3),
        "rollout_recovery__default_granularity": GRANULARITIES,
        "rollout_recovery__agent_granularity_overrides": st.dictionaries(
            st.sampled_from(["one", "two"]), GRANULARITIES, max_size=1
        ),
        "rollout_recovery__task_granularity_overrides": st.dictionaries(
            st.sampled_from(["even", "odd"]), GRANULARITIES, max_size=1
        ),
        "rollout_recovery__missing_rows": st.sampled_from(["refuse", "redispatch"]),
        "rollout_recovery__future_weights": st.sampled_from(["reuse", "discard"]),
    }
)


def when_any(*statuses: str) -> Callable[[F], F]:
    """A rule for which a group must be there."""
    return precondition(lambda self: bool(self.world.naive.in_status(*statuses)))


def when_any_sibling(status: str) -> Callable[[F], F]:
    return precondition(
        lambda self: any(
            sibling.status == status
            for number in self.world.naive.in_status(*BEFORE_FINALIZED)
            for sibling in self.group(number).siblings
        )
    )


class AttemptCommands(RuleBasedStateMachine):
    """One run over all its lives. A rule that has nothing to do does nothing."""

    @initialize(config=CONFIGS)
    def begin(self, config: dict[str, object]) -> None:
        self.world = RecoveryWorld(**config)

    # ---- choosing ---------------------------------------------------------------------------------------------

    def pick(self, number: int, *statuses: str) -> int | None:
        chosen = self.world.naive.in_status(*statuses)
        return chosen[number % len(chosen)] if chosen else None

    def pick_sibling(self, number: int, status: str, *statuses: str) -> tuple[int, int] | None:
        chosen = [
            (n, which)
            for n in self.world.naive.in_status(*statuses)
            for which, sibling in enumerate(self.group(n).siblings)
            if sibling.status == status
        ]
        return chosen[number % len(chosen)] if chosen else None

    def group(self, number: int) -> NaiveGroup:
        return self.world.naive.groups[number]

    # ---- drawing ----------------------------------------------------------------------------------------------

    @rule(skips=st.sampled_from([0, 0, 0, 1]))
    def draw(self, skips: int) -> None:
        world, naive = self.world, self.world.naive
        draw = world.sampler.may_draw(world.p)
        cursor, alive, next_step = len(naive.groups), len(naive.alive()), len(naive.steps) + 1
        if not world.prompts.has(cursor):
            return
        assert draw is not None or alive, "nothing is alive, and nothing may be drawn"
        if draw is None:
            return
        gps, sampler = world.config.trainer.groups_per_step, world.config.sampler
        if sampler.name == "in_order":
            assert draw.train_step is not None
            assert next_step <= draw.train_step <= next_step + sampler.max_lookahead_versions
            assert sum(self.group(n).target == draw.train_step for n in naive.alive()) < gps
        else:
            assert draw.train_step is None
            assert alive < gps * (sampler.max_staleness_versions + 1)
        if alive >= world.config.rollout.max_live_groups and draw.train_step != next_step:
            return
        prompt = world.prompts.draw(cursor + skips)
        if prompt is None:
            return
        rollout, recovery = world.config.rollout, world.config.rollout_recovery
        budget = (rollout.max_infrastructure_retries, rollout.max_data_retries)
        facts = {
            "prompt": prompt,
            "num_generations": rollout.num_generations,
            "granularity": recovery.resolve(agent_name=prompt.agent_name, task_name=prompt.task_name),
            "retry_budget": e.RetryBudget(*budget),
            "train_step": draw.train_step,
        }
        if skips:
            with pytest.raises(TransitionError, match=f"expected draw {cursor}, found {cursor + skips}"):
                decide.reserve_group(world.p, **facts)
            return
        by_task = recovery.task_granularity_overrides.get(prompt.task_name, recovery.default_granularity)
        granularity = recovery.agent_granularity_overrides.get(prompt.agent_name, by_task)
        world.commit(decide.reserve_group(world.p, **facts))
        siblings = [NaiveSibling() for _ in range(rollout.num_generations)]
        naive.groups.append(
            NaiveGroup(
                cursor, granularity == "prompt_group", budget, naive.weights, draw.train_step, siblings
            )
        )

    @precondition(lambda self: not self.world.prompts.has(self.world.p.draw_cursor))
    @rule()
    def exhaust(self) -> None:
        world = self.world
        if not world.prompts.has(world.p.draw_cursor) and not world.naive.exhausted:
            world.commit(e.DatasetExhausted(draw_cursor=world.p.draw_cursor))
            world.naive.exhausted = True

    @when_any("reserved")
    @rule(number=PICK)
    def admit(self, number: int) -> None:
        chosen = self.pick(number, "reserved")
        if chosen is not None:
            self.world.commit(e.GroupAdmitted(group_id=chosen))
            self.group(chosen).status = "admitted"

    # ---- attempts ---------------------------------------------------------------------------------------------

    @when_any("admitted", "generating")
    @rule(number=PICK, all_of_them=st.booleans())
    def dispatch(self, number: int, all_of_them: bool) -> None:
        found = self.pick_sibling(number, WAITING, "admitted", "generating")
        if found is None:
            return
        chosen, which = found
        group = self.group(chosen)
        waiting = [place for place, sibling in enumerate(group.siblings) if sibling.status == WAITING]
        assert not group.whole or len(waiting) == len(group.siblings), "half of a cohort waits"
        sent = waiting if group.whole or all_of_them else [which]
        events = decide.dispatch_siblings(
            self.world.p,
            chosen,
            [decide.Assignment(place, "worker-0", 0) for place in sent],
            max_resumes=MAX_RESUMES,
        )
        self.world.commit(*events)
        self.world.acknowledge()
        self.world.naive.send(chosen, sent)
        told = {event.generation: event.resumes_attempt for event in events}
        assert told == {place: group.siblings[place].goes_on_from for place in sent}

    @when_any(*BEFORE_FINALIZED)
    @rule(number=PICK, status=st.sampled_from([RUNNING, SEALED]))
    def dispatch_what_is_not_waiting(self, number: int, status: str) -> None:
        found = self.pick_sibling(number, status, *BEFORE_FINALIZED)
        if found is None:
            return
        chosen, which = found
        (event, *_) = decide.dispatch_siblings(
            self.world.p,
            chosen,
            [
                decide.Assignment(place, "worker-0", 0)
                for place in (
                    range(len(self.group(chosen).siblings)) if self.group(chosen).whole else [which]
                )
            ],
        )
        self.world.refuses(event, "is sealed|is running|expected phase")

    @precondition(lambda self: self.world.naive.groups)
    @rule(number=PICK, back=st.sampled_from([0, 0, 0, 0, 1, 2]), reward=st.sampled_from([0.5, 1.0]))
    def result_arrives(self, number: int, back: int, reward: float) -> None:
        """Of any attempt of any sibling, whatever has become of it."""
        naive = self.world.naive
        everybody = [
            (n, which) for n, group in enumerate(naive.groups) for which in range(len(group.siblings))
        ]
        if not everybody:
            return
        chosen, which = everybody[number % len(everybody)]
        attempt = naive.groups[chosen].siblings[which].attempt - back
        if attempt > 0:
            self.answer(chosen, which, attempt, reward)

    @precondition(lambda self: self.tried_again())
    @rule(number=PICK, reward=st.sampled_from([0.5, 1.0]))
    def late_result_arrives(self, number: int, reward: float) -> None:
        """Of an attempt that was given up, while the next one waits, runs, or is sealed."""
        everybody = self.tried_again()
        chosen, which = everybody[number % len(everybody)]
        self.answer(chosen, which, self.group(chosen).siblings[which].attempt - 1, reward)

    def tried_again(self) -> list[tuple[int, int]]:
        return [
            (number, which)
            for number in self.world.naive.in_status(*ALIVE)
            for which, sibling in enumerate(self.group(number).siblings)
            if sibling.attempt > 1
        ]

    @when_any_sibling(RUNNING)
    @rule(number=PICK, reward=st.sampled_from([0.5, 1.0]))
    def running_sibling_answers(self, number: int, reward: float) -> None:
        found = self.pick_sibling(number, RUNNING, *ALIVE)
        if found is not None:
            self.answer(*found, self.group(found[0]).siblings[found[1]].attempt, reward)

    def answer(self, number: int, which: int, attempt: int, reward: float) -> None:
        world, group = self.world, self.group(number)
        sibling = group.siblings[which]
        current = sibling.attempt == attempt and group.status in BEFORE_FINALIZED
        calls = 1 + which % 2
        result = sealed_result(
            number, which, attempt, calls=calls, raw_reward=reward, weight_version=world.naive.weights
        )
        if not (sibling.status == SEALED and sibling.attempt == attempt):
            world.put({(number, which, attempt, call) for call in range(calls)})
        try:
            outcome, events = decide.seal_sibling(world.p, result)
        except ResultConflictError:
            assert (sibling.status, sibling.attempt) == (SEALED, attempt)
            assert group.status not in ("dropped", "forgotten")
            return
        except TransitionError:
            assert (group.whole, current, sibling.status) == (True, True, RUNNING)
            return
        if outcome is decide.SealOutcome.ACCEPTED:
            assert current
            assert not group.whole
            world.commit(*events)
            world.naive.seal(
                number,
                which,
                calls=calls,
                reward=reward,
                oldest=result.weight_version,
                newest=result.weight_version,
            )
        elif outcome is decide.SealOutcome.DUPLICATE:
            assert (sibling.status, sibling.attempt, sibling.reward) == (SEALED, attempt, reward)
            assert not events
        else:
            gone = group.status in ("dropped", "forgotten")
            assert gone or attempt < sibling.attempt or sibling.status == WAITING
            world.commit(*events)
            world.naive.late += 1
            for call in range(calls):
                world.plane.pop((number, which, attempt, call), None)

    @when_any_sibling(RUNNING)
    @rule(number=PICK, missing=st.sampled_from([False, False, True]))
    def cohort_answers(self, number: int, missing: bool) -> None:
        world = self.world
        cohorts = [n for n in world.naive.in_status("generating") if self.group(n).whole]
        if not cohorts:
            return
        chosen = cohorts[number % len(cohorts)]
        group, weights = self.group(chosen), world.naive.weights
        results = {
            which: sealed_result(chosen, which, max(1, sibling.attempt), weight_version=weights)
            for which, sibling in enumerate(group.siblings)
        }
        if missing:
            results.popitem()
        whole = not missing and all(sibling.status == RUNNING for sibling in group.siblings)
        try:
            events = decide.seal_cohort(world.p, chosen, results)
        except TransitionError:
            assert not whole
            return
        assert whole
        world.put({(chosen, w, r.attempt, call) for w, r in results.items() for call in range(2)})
        world.commit(*events)
        for which in results:
            world.naive.seal(chosen, which, calls=2, reward=1.0, oldest=weights, newest=weights)

    @when_any_sibling(RUNNING)
    @rule(number=PICK, reason=FAILURES)
    def attempt_fails(self, number: int, reason: Reason) -> None:
        world = self.world
        found = self.pick_sibling(number, RUNNING, "generating")
        if found is None:
            return
        chosen, which = found
        group, state = self.group(chosen), world.p.groups[chosen]
        events: tuple[e.Event, ...] = decide.supersede_attempt(world.p, chosen, which, reason)
        spent = decide.retry_budget_spent(state, state.siblings[which], reason)
        assert spent == world.naive.budget_spent(chosen, which, reason)
        policy = world.config.rollout.spent_retry_budget if spent else "retry"
        if policy == "train_partial" and group.whole:
            policy = "park"
        if policy == "train_partial":
            events = decide.seal_placeholder(world.p, chosen, which, reason)
        elif policy == "park":
            events = (*events, e.GroupParked(group_id=chosen, reason=Reason.RETRY_BUDGET))
        elif policy == "drop":
            events = (*events, e.GroupDropped(group_id=chosen, reason=Reason.RETRY_BUDGET))
        world.commit(*events)
        for place in range(len(group.siblings)) if group.whole else [which]:
            if group.siblings[place].status != WAITING:
                world.naive.give_up(chosen, place, reason if place == which else "cohort_restart")
        if policy == "train_partial":
            weights = world.naive.weights
            world.naive.send(chosen, [which])
            world.naive.seal(chosen, which, calls=0, reward=0.0, oldest=weights, newest=weights)
        elif policy in ("park", "drop"):
            world.naive.leave(chosen, "parked" if policy == "park" else "dropped", "retry_budget")
            world.clear_group(chosen, Reason.RETRY_BUDGET)
