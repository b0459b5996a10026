"""Reasons: each is given by some scenario, out of what the product does."""

import ast
from pathlib import Path

import pytest
from kinlog_conformance import (
    COHORT,
    Given,
    Outcome,
    checkpointed,
    driven,
    finalized,
    generating,
    living,
    ready,
    reserved,
    restarted,
    trained,
    worker_answers,
    worker_answers_late,
    worker_cannot_stage,
    worker_dies,
    worker_fails,
    worker_hangs,
)
from kinlog_fake_parts import FakeDataset
from kinlog_preemption import preempted

import kinlog.schemas.reasons
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason, Validity
from kinlog.schemas.receipts import staging_key

#: Each ends in an event with its reason, by a decision of the product's own.
SCENARIOS = {
    Reason.INFRASTRUCTURE_FAILURE: lambda: Given(reserved(), worker_cannot_stage(0, 1, 1)).when(driven(0)),
    Reason.DATA_FAILURE: lambda: Given(reserved(), worker_answers(0, 1, 1, Validity.POISONED)).when(
        driven(0)
    ),
    Reason.TIMEOUT: lambda: Given(reserved(), worker_hangs(0, 1, 1)).when(driven(0)),
    Reason.WORKER_LOST: lambda: Given(reserved(), worker_dies(0, 1, 1)).when(driven(0)),
    Reason.CONTROLLER_RESTART: lambda: Given(generating()).when(restarted()),
    Reason.PREEMPTED: lambda: Given(reserved(), worker_hangs(0, 1, 1)).when(
        preempted(lambda p: p.groups[0].siblings[1].running)
    ),
    Reason.COHORT_RESTART: lambda: Given(generating(granularity=COHORT)).when(restarted()),
    Reason.ROWS_MISSING: lambda: Given(ready()).when(restarted()),
    Reason.DIGEST_MISMATCH: lambda: Given(ready()).when(
        restarted(tail_rows=True, alter=[staging_key(0, 1, 1, 0)])
    ),
    Reason.STALE: lambda: Given(
        finalized(), finalized(), trained(1), checkpointed(), sampler__max_staleness_versions=0
    ).when(restarted()),
    Reason.FUTURE_WEIGHTS: lambda: Given(
        checkpointed(), finalized(), trained(0), ready(), rollout_recovery__future_weights="discard"
    ).when(restarted(tail_rows=True)),
    Reason.DISCARDED_BY_REQUEST: lambda: Given(ready(), checkpointed()).when(
        restarted(discard_rollouts=True)
    ),
    Reason.RETRY_BUDGET: lambda: Given(reserved(budget=e.RetryBudget(0, 0)), worker_fails(0, 1, 1)).when(
        driven(0)
    ),
    Reason.LOW_VALID_FRACTION: lambda: Given(
        reserved(siblings=3),
        worker_answers(0, 0, 1, Validity.FAILED),
        worker_answers(0, 1, 1, Validity.FAILED),
        rollout__invalid_siblings="keep_masked",
    ).when(driven(0)),
    Reason.EVICTED: lambda: Given(finalized(), finalized(), reserved(), sampler__max_ready_groups=2).when(
        driven(2)
    ),
    Reason.SHORTFALL: lambda: Given(dataset=FakeDataset(size=1), dataset__max_epochs=1).when(living()),
    Reason.SUPERSEDED_ATTEMPT: lambda: Given(
        reserved(), worker_answers_late(0, 1, 1, after_s=200), rollout__sibling_timeout_s=100.0
    ).when(driven(0, wait_s=300)),
    Reason.UNREFERENCED: lambda: Given(ready(), checkpointed()).when(
        restarted(lose=[staging_key(0, 1, 1, 0)], rollout_recovery__missing_rows="redispatch")
    ),
    Reason.FINALIZED: lambda: Given(ready()).when(driven(0)),
    Reason.STEP_DURABLE: lambda: Given().when(living()),
}


def reasons_of(done: Outcome) -> set[Reason]:
    return {reason for event in done.then().events if (reason := getattr(event, "reason", None)) is not None}


@pytest.mark.parametrize("reason", SCENARIOS)
def test_reason_is_given_by_a_scenario(reason: Reason):
    assert reason in reasons_of(SCENARIOS[reason]())


def test_every_reason_has_a_scenario():
    assert set(SCENARIOS) == set(Reason)


def test_every_reason_is_named_by_the_code_that_gives_it():
    packages = Path(kinlog.schemas.reasons.__file__).parents[1]
    named = {
        node.attr
        for package in ("lineage", "replay", "controller", "workers")
        for path in sorted((packages / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"
    }
    assert {reason for reason in Reason if reason.name not in named} == set()
