"""The vocabulary of the conformance suite: given a history, when something happens, then these events and this state.

A history and a happening are both made of *acts*. An act is told the bench, and either decides (it returns events, which
are recorded as one unit), or lives (it returns a coroutine, which is run in virtual time), or begins another life.
Groups are numbered from 0 in the order of their reservations.

Whatever a scenario is about, ``then`` also checks that the log, replayed, is the live projection, and that at no point
of it a drawn prompt is unaccounted for.
"""

from kinlog_acts_of_groups import (
    admitted,
    claimed,
    cohort_results,
    dispatched,
    dropped,
    finalize_answered,
    finalize_started,
    finalized,
    finalizing,
    generating,
    given_up,
    parked,
    placeholder,
    published,
    ready,
    recorded,
    reserved,
    reserving,
    result,
    sealed,
    trained,
)
from kinlog_acts_of_restarts import checkpointed, restarted
from kinlog_acts_of_workers import (
    AnyReady,
    RowKeeper,
    driven,
    finalizer_loses_answers,
    finalizer_rejects,
    living,
    worker_answers,
    worker_answers_late,
    worker_cannot_stage,
    worker_dies,
    worker_fails,
    worker_hangs,
)
from kinlog_scenario import COHORT, SIBLING, Act, Given, Like, Outcome, changed, facts_of

__all__ = [
    "SIBLING",
    "COHORT",
    "Act",
    "Given",
    "Outcome",
    "Like",
    "facts_of",
    "changed",
    "reserved",
    "reserving",
    "admitted",
    "dispatched",
    "generating",
    "ready",
    "finalized",
    "finalizing",
    "finalize_started",
    "finalize_answered",
    "sealed",
    "result",
    "cohort_results",
    "given_up",
    "placeholder",
    "recorded",
    "dropped",
    "parked",
    "published",
    "claimed",
    "trained",
    "checkpointed",
    "restarted",
    "worker_fails",
    "worker_dies",
    "worker_hangs",
    "worker_answers_late",
    "worker_cannot_stage",
    "worker_answers",
    "finalizer_loses_answers",
    "finalizer_rejects",
    "driven",
    "living",
    "RowKeeper",
    "AnyReady",
]
