"""Whose failure it is: the infrastructure's, or the data's."""

import pytest

from kinlog.schemas.errors import DataPlaneError, DatasetError
from kinlog.schemas.reasons import Reason
from kinlog.workers.failures import classify_failure


class HttpError(Exception):
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class Response:
    def __init__(self, status: int) -> None:
        self.status = status


class ClientError(Exception):
    def __init__(self, status: int) -> None:
        self.response = Response(status)


def raised_from(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (HttpError(503), Reason.INFRASTRUCTURE_FAILURE),
        (HttpError(429), Reason.INFRASTRUCTURE_FAILURE),
        (HttpError(400), Reason.DATA_FAILURE),
        (ClientError(502), Reason.INFRASTRUCTURE_FAILURE),
        (ClientError(422), Reason.DATA_FAILURE),
        (ConnectionResetError("gone"), Reason.INFRASTRUCTURE_FAILURE),
        (DataPlaneError("no answer"), Reason.INFRASTRUCTURE_FAILURE),
        (MemoryError(), Reason.INFRASTRUCTURE_FAILURE),
        (TimeoutError(), Reason.TIMEOUT),
        (DatasetError("no such row"), Reason.DATA_FAILURE),
        (ValueError("reward is nan"), Reason.DATA_FAILURE),
        (KeyError("answer"), Reason.DATA_FAILURE),
    ],
)
def test_failures_are_told_apart(error: Exception, reason: Reason):
    assert classify_failure(error) is reason


def test_the_innermost_cause_that_says_anything_decides():
    wrapped = raised_from(RuntimeError("the client gave up"), raised_from(OSError("pipe"), HttpError(404)))
    assert classify_failure(wrapped) is Reason.DATA_FAILURE
    assert (
        classify_failure(raised_from(ValueError("no answer"), ConnectionError()))
        is Reason.INFRASTRUCTURE_FAILURE
    )


def test_what_says_nothing_is_the_datas():
    class Strange(Exception):
        pass

    assert classify_failure(Strange()) is Reason.DATA_FAILURE


def test_a_suppressed_context_does_not_count():
    error = ValueError("second")
    error.__context__ = ConnectionError("first")
    assert classify_failure(error) is Reason.INFRASTRUCTURE_FAILURE
    error.__suppress_context__ = True
    assert classify_failure(error) is Reason.DATA_FAILURE


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [(ConnectionRefusedError(), Reason.INFRASTRUCTURE_FAILURE), (TimeoutError(), Reason.TIMEOUT)],
)
def test_a_suppressed_context_counts_where_nothing_else_says_anything(hidden: Exception, reason: Reason):
    class ConnectFailed(Exception):
        pass

    error = ConnectFailed()
    error.__context__, error.__suppress_context__ = hidden, True
    assert classify_failure(raised_from(RuntimeError("the client gave up"), error)) is reason


def test_a_cycle_of_causes_ends():
    first, second = ValueError(), ConnectionError()
    first.__cause__, second.__cause__ = second, first
    assert classify_failure(first) is Reason.INFRASTRUCTURE_FAILURE
