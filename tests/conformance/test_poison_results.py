"""Results that no event can hold: they cost their sibling an attempt, and no life of the run."""

import pytest
from kinlog_conformance import COHORT, SIBLING, Act, Given, Like, driven, living, reserved, restarted
from msgspec.structs import replace

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.orders import RolloutFailed, RolloutOrder
from kinlog.schemas.reasons import Granularity, Reason, Validity
from kinlog.schemas.receipts import ModelCall, Receipt


def answers(attempt: int, change) -> Act:
    """What sibling 0/1 answers at an attempt."""
    return lambda bench: bench.pool.answers.__setitem__(
        (0, 1, attempt), lambda order: change(bench.pool.seal(order), order)
    )


def of_many_calls(calls: int):
    def change(sealed: e.SiblingSealed, order: RolloutOrder) -> e.SiblingSealed:
        first = sealed.receipt.calls[0]
        more = [ModelCall(n, n - 1, 5 + n, 7, 0, 0, bytes([n % 256] * 16)) for n in range(1, calls)]
        return replace(sealed, receipt=Receipt((first, *more)))

    return change


def failing(detail: str):
    def change(sealed: e.SiblingSealed, order: RolloutOrder) -> RolloutFailed:
        return RolloutFailed(
            group_id=order.group_id,
            generation=order.generation,
            attempt=order.attempt,
            reason=Reason.DATA_FAILURE,
            detail=detail,
        )

    return change


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
def test_result_whose_receipt_no_event_can_hold_is_a_failure_of_its_sibling(granularity: Granularity):
    given = Given(reserved(siblings=3, granularity=granularity), answers(1, of_many_calls(200)))
    done = given.when(driven(0)).then(state={0: GroupPhase.FINALIZED})
    superseded = next(event for event in done.of(e.AttemptSuperseded) if event.generation == 1)
    assert superseded.reason is Reason.DATA_FAILURE
    assert "receipt of 200 model calls is too large" in superseded.detail
    assert done.p.groups[0].siblings[1].attempt == 2
    staged = [key for key in done.bench.data_plane.rows["staging"] if key.startswith("g0.s1.a1")]
    assert staged == [], "nobody refers to its rows"


def test_rollout_that_is_always_too_large_spends_its_own_budget_over_all_lives():
    given = Given(
        reserved(siblings=3, budget=e.RetryBudget(5, 2)),
        *[answers(attempt, of_many_calls(200)) for attempt in range(1, 5)],
    )
    done = given.when(
        living(until=lambda p: p.groups[0].siblings[1].data_failures == 1), restarted(tail_rows=True)
    )
    done.when(living()).then(state={0: {"phase": GroupPhase.PARKED}, "train_step": 4})


@pytest.mark.parametrize(
    "detail", ["ValueError: bad \udcff", "\ud800" * 400, "x" * 10_000, "\U0001f600" * 3_000]
)
def test_failure_with_any_text_in_it_is_recorded_and_the_run_goes_on(detail: str):
    given = Given(reserved(siblings=3), answers(1, failing(detail)))
    done = given.when(driven(0)).then(
        events=[Like(e.AttemptSuperseded, generation=1, reason=Reason.DATA_FAILURE)],
        only=(e.AttemptSuperseded,),
        state={0: GroupPhase.FINALIZED},
    )
    recorded = done.of(e.AttemptSuperseded)[0].detail
    assert recorded.encode()
    assert recorded[:10] == detail.encode(errors="backslashreplace").decode()[:10]


@pytest.mark.parametrize("policy", ["park", "drop", "train_partial"])
def test_text_that_cannot_be_recorded_as_it_is_ends_a_group_and_no_run(policy: str):
    given = Given(
        reserved(siblings=3, budget=e.RetryBudget(0, 0)),
        answers(1, failing("no \udcff")),
        rollout__spent_retry_budget=policy,
    )
    done = given.when(driven(0)).then()
    assert all("\udcff" not in getattr(event, "detail", "") for event in done.events)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda sealed, order: replace(sealed, receipt=None), "valid and has no receipt"),
        (
            lambda sealed, order: replace(sealed, validity=Validity.PLACEHOLDER),
            "placeholder and has a receipt",
        ),
        (
            lambda sealed, order: replace(sealed, receipt=None, validity=Validity.POISONED),
            "poisoned and has no receipt",
        ),
    ],
)
def test_result_without_a_receipt_is_a_placeholder_and_nothing_else(change, found: str):
    given = Given(reserved(siblings=3), answers(1, change), rollout__invalid_siblings="keep_masked")
    done = given.when(living())
    done.then(raises=(TransitionError, found), events=done.events)
