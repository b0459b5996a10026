"""Acts of a scenario: the life of a group, from its reservation to its step."""

from collections.abc import Mapping

from kinlog_bench import Bench
from kinlog_builders import sealed_result
from kinlog_scenario import (
    SIBLING,
    Act,
    Decided,
    told,
)
from msgspec.structs import replace

from kinlog.lineage import decide
from kinlog.schemas import events as e
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import Granularity, Reason


def reserved(**facts: object) -> Act:
    """``siblings``, ``granularity``, ``budget``, ``train_step``: as ``Story.reserve``."""
    return lambda bench: told(bench.story.reserve(**facts))  # type: ignore[arg-type]


def reserving(prompt: PromptRef, *, granularity: Granularity = SIBLING) -> Act:
    """The decision to reserve a group for exactly this prompt."""
    return lambda bench: decide.reserve_group(
        bench.p,
        prompt=prompt,
        num_generations=2,
        granularity=granularity,
        retry_budget=e.RetryBudget(1, 1),
        train_step=None,
    )


def admitted(group_id: int) -> Act:
    return lambda bench: e.GroupAdmitted(group_id=group_id)


def dispatched(group_id: int, *generations: int) -> Act:
    """The next attempt of these generations, or of all that wait."""
    return lambda bench: told(bench.story.dispatch(group_id, *generations))


def generating(**facts: object) -> Act:
    """A new group, all of whose siblings run."""

    def act(bench: Bench) -> None:
        group_id = bench.story.reserve(**facts)  # type: ignore[arg-type]
        bench.story.admit(group_id)
        bench.story.dispatch(group_id)

    return act


def ready(**facts: object) -> Act:
    """A new group, all of whose siblings are sealed."""
    return lambda bench: told(bench.story.ready(**facts))  # type: ignore[arg-type]


def finalized(*, train_step: int | None = None, siblings: int = 2, **facts: object) -> Act:
    """A new group with its canonical rows."""

    def act(bench: Bench) -> None:
        story = bench.story
        group_id = story.reserve(siblings=siblings, train_step=train_step)
        story.admit(group_id)
        story.dispatch(group_id)
        story.seal(group_id, **facts)
        story.start_finalize(group_id)
        story.finish_finalize(group_id)

    return act


def finalizing(**facts: object) -> Act:
    """A new group whose finalizer was called, and has not answered."""
    return lambda bench: told(bench.story.start_finalize(bench.story.ready(**facts)))  # type: ignore[arg-type]


def finalize_started(group_id: int) -> Act:
    return lambda bench: e.FinalizeStarted(group_id=group_id)


def finalize_answered(group_id: int) -> Act:
    return lambda bench: bench.story.finalized_event(group_id)


def sealed(group_id: int, *generations: int, **facts: object) -> Act:
    """Results of these generations, or of all that run, as they are decided about."""
    return lambda bench: told(bench.story.seal(group_id, *generations, **facts))


def result(group_id: int, generation: int, attempt: int, **facts: object) -> Act:
    """One result arrives, of any attempt; facts beyond those of ``sealed_result`` are set as they are."""
    own = {name: fact for name, fact in facts.items() if name in e.SiblingSealed.__struct_fields__}
    others = {name: fact for name, fact in facts.items() if name not in own}

    def act(bench: Bench) -> Decided:
        arrived = replace(sealed_result(group_id, generation, attempt, **others), **own)  # type: ignore[arg-type]
        return decide.seal_sibling(bench.p, arrived)[1]

    return act


def cohort_results(group_id: int, attempts: Mapping[int, int]) -> Act:
    """The results of a whole cohort arrive: generation -> attempt."""

    def act(bench: Bench) -> Decided:
        results = {g: sealed_result(group_id, g, attempt) for g, attempt in attempts.items()}
        return decide.seal_cohort(bench.p, group_id, results)

    return act


def given_up(group_id: int, generation: int, reason: Reason) -> Act:
    """An attempt is superseded."""
    return lambda bench: decide.supersede_attempt(bench.p, group_id, generation, reason)


def placeholder(group_id: int, generation: int, reason: Reason = Reason.DATA_FAILURE) -> Act:
    """A sibling is given up for good, with a placeholder in its place."""
    return lambda bench: decide.seal_placeholder(bench.p, group_id, generation, reason)


def recorded(*events: e.Event) -> Act:
    """These very events."""
    return lambda bench: events


def dropped(group_id: int, reason: Reason = Reason.STALE) -> Act:
    return recorded(e.GroupDropped(group_id=group_id, reason=reason))


def parked(group_id: int) -> Act:
    return recorded(e.GroupParked(group_id=group_id, reason=Reason.RETRY_BUDGET))


def published(weight_version: int) -> Act:
    return recorded(e.WeightsPublished(weight_version=weight_version, train_step=0))


def claimed(*group_ids: int) -> Act:
    return lambda bench: bench.story.claim(*group_ids)


def trained(*group_ids: int) -> Act:
    return lambda bench: bench.story.train(*group_ids)
