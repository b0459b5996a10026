"""Whose failure a chain or a group of exceptions is: causes count, what was merely being handled does not."""

import pytest

from kinlog.schemas.errors import DataPlaneError, DatasetError
from kinlog.schemas.reasons import Reason
from kinlog.workers.failures import classify_failure


def raised_while_handling(outer: BaseException, handled: BaseException) -> BaseException:
    outer.__context__ = handled
    return outer


def raised_from(outer: BaseException, cause: BaseException) -> BaseException:
    outer.__cause__ = cause
    return outer


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize(
    ("outer", "handled", "reason"),
    [
        (ConnectionError("refused"), KeyError("cache miss"), Reason.INFRASTRUCTURE_FAILURE),
        (TimeoutError(), ValueError("not in the cache"), Reason.TIMEOUT),
        (HttpError(503), LookupError(), Reason.INFRASTRUCTURE_FAILURE),
        (HttpError(404), ConnectionResetError("a mirror"), Reason.DATA_FAILURE),
        (DatasetError("no such row"), OSError("no local copy"), Reason.DATA_FAILURE),
    ],
)
def test_what_was_being_handled_is_no_cause_of_a_specific_failure(outer, handled, reason):
    assert classify_failure(raised_while_handling(outer, handled)) is reason


@pytest.mark.parametrize("generic", [ValueError("bad answer"), TypeError(), RuntimeError("gave up")])
def test_what_was_being_handled_is_asked_when_the_failure_itself_is_generic(generic):
    broken = raised_while_handling(generic, ConnectionResetError("gone"))
    assert classify_failure(broken) is Reason.INFRASTRUCTURE_FAILURE


def test_a_generic_cause_does_not_hide_a_specific_failure():
    error = raised_from(DataPlaneError("no answer"), ValueError("empty reply"))
    assert classify_failure(error) is Reason.INFRASTRUCTURE_FAILURE


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([ConnectionResetError("gone")], Reason.INFRASTRUCTURE_FAILURE),
        ([TimeoutError()], Reason.TIMEOUT),
        ([ValueError("a consequence"), ConnectionError("refused")], Reason.INFRASTRUCTURE_FAILURE),
        ([DatasetError("no such row"), ConnectionError("refused")], Reason.DATA_FAILURE),
        ([ValueError("bad"), KeyError("bad")], Reason.DATA_FAILURE),
        ([ExceptionGroup("inner", [HttpError(429)])], Reason.INFRASTRUCTURE_FAILURE),
        ([raised_from(RuntimeError("client"), HttpError(502))], Reason.INFRASTRUCTURE_FAILURE),
    ],
)
def test_a_group_is_judged_by_its_first_specific_member(members, reason):
    assert classify_failure(ExceptionGroup("unhandled errors in a TaskGroup", members)) is reason


def test_a_group_that_caused_a_failure_is_looked_into():
    error = raised_from(RuntimeError("rollout failed"), ExceptionGroup("tools", [ConnectionError()]))
    assert classify_failure(error) is Reason.INFRASTRUCTURE_FAILURE


def test_a_chain_longer_than_the_stack_is_judged():
    error: BaseException = ConnectionError("the first")
    for _ in range(5_000):
        error = raised_from(RuntimeError("again"), error)
    assert classify_failure(error) is Reason.INFRASTRUCTURE_FAILURE
