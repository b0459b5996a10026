"""Telling failures apart: the infrastructure's, which another worker may not have, and the data's, which it will."""

from typing import NamedTuple

from kinlog.schemas.errors import DataPlaneError, DatasetError, KinlogError
from kinlog.schemas.reasons import Reason

__all__ = ["classify_failure"]

#: Statuses of an HTTP service that say "not now" rather than "not this".
_PASSING_STATUSES = frozenset({408, 409, 425, 429})


class _Verdict(NamedTuple):
    reason: Reason
    specific: bool
    """Whether the exception can mean nothing else. A ``ValueError`` can: it is what is raised when something else has
    gone wrong, too."""


def classify_failure(error: BaseException) -> Reason:
    """Say whose failure an exception is, by itself, everything it was raised from, and everything it groups.

    The innermost specific cause decides: a client library's own error usually wraps a broken connection or a status
    code. What was merely being handled when it was raised is no cause, and is asked only as long as nothing specific
    has been found: after a cache miss (``KeyError``) a refused connection is still a refused connection. Where it was
    suppressed (``from None``) it is asked only as long as nothing at all has been found: what is below OpenAI's client
    hides in this way which error of the system its own stands for. Of a group the first specific member counts: the
    others are often its consequences.

    An HTTP status counts wherever it is kept (``status``, ``status_code``, or ``response.status_code``). What says
    nothing is the data's: it would happen again, and the smaller budget ends it.
    """
    found = _judge(error, set())
    return found.reason if found is not None else Reason.DATA_FAILURE


def _judge(error: BaseException, seen: set[int]) -> _Verdict | None:
    found: _Verdict | None = None
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = _stronger(found, _verdict(current, seen))
        if current.__cause__ is not None:
            current = current.__cause__
        elif found is not None and (found.specific or current.__suppress_context__):
            break
        else:
            current = current.__context__
    return found


def _stronger(outer: _Verdict | None, inner: _Verdict | None) -> _Verdict | None:
    """Return the inner verdict, unless it is weaker."""
    if inner is None or (outer is not None and outer.specific and not inner.specific):
        return outer
    return inner


def _verdict(error: BaseException, seen: set[int]) -> _Verdict | None:
    if isinstance(error, BaseExceptionGroup):
        verdicts = [verdict for member in error.exceptions if (verdict := _judge(member, seen)) is not None]
        return min(verdicts, key=lambda verdict: not verdict.specific, default=None)
    status = _http_status(error)
    if status is not None:
        passing = status >= 500 or status in _PASSING_STATUSES
        return _Verdict(Reason.INFRASTRUCTURE_FAILURE if passing else Reason.DATA_FAILURE, specific=True)
    if isinstance(error, TimeoutError):
        return _Verdict(Reason.TIMEOUT, specific=True)
    if isinstance(error, DatasetError):
        return _Verdict(Reason.DATA_FAILURE, specific=True)
    if isinstance(error, DataPlaneError | OSError | MemoryError):
        return _Verdict(Reason.INFRASTRUCTURE_FAILURE, specific=True)
    if isinstance(
        error, KinlogError | ValueError | TypeError | ArithmeticError | LookupError | AssertionError
    ):
        return _Verdict(Reason.DATA_FAILURE, specific=False)
    return None


def _http_status(error: BaseException) -> int | None:
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
                return value
    return None
