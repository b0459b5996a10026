"""Telling failures apart: the infrastructure's, which another worker may not have, and the data's, which it will."""

from collections.abc import Iterator

from kinlog.schemas.errors import DataPlaneError, DatasetError, KinlogError
from kinlog.schemas.reasons import Reason

__all__ = ["classify_failure"]

#: Statuses of an HTTP service that say "not now" rather than "not this".
_PASSING_STATUSES = frozenset({408, 409, 425, 429})


def classify_failure(error: BaseException) -> Reason:
    """Say whose failure an exception is, by itself and everything it was raised from.

    The innermost cause that says anything decides: a client library's own error usually wraps a broken connection or a
    status code. An HTTP status counts wherever it is kept (``status``, ``status_code``, or ``response.status_code``).
    What says nothing is the data's: it would happen again, and the smaller budget ends it.
    """
    verdict: Reason | None = None
    for cause in _chain(error):
        verdict = _verdict(cause) or verdict
    return verdict or Reason.DATA_FAILURE


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _verdict(error: BaseException) -> Reason | None:
    status = _http_status(error)
    if status is not None:
        passing = status >= 500 or status in _PASSING_STATUSES
        return Reason.INFRASTRUCTURE_FAILURE if passing else Reason.DATA_FAILURE
    if isinstance(error, TimeoutError):
        return Reason.TIMEOUT
    if isinstance(error, DatasetError):
        return Reason.DATA_FAILURE
    if isinstance(error, DataPlaneError | OSError | MemoryError):
        return Reason.INFRASTRUCTURE_FAILURE
    if isinstance(
        error, KinlogError | ValueError | TypeError | ArithmeticError | LookupError | AssertionError
    ):
        return Reason.DATA_FAILURE
    return None


def _http_status(error: BaseException) -> int | None:
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
                return value
    return None
