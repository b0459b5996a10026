"""Watching a run from outside its actor: its news are printed, signals are passed on, and it is closed as it ended."""

import sys
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayTaskError

from kinlog.controller.progress import restart_line, status_line
from kinlog.controller.progress_output import ProgressOutput
from kinlog.controller.stop_signals import StopSignals
from kinlog.replay.recovery.report import render_report
from kinlog.schemas.errors import KinlogError, PreemptedError, WorkerLostError

__all__ = ["News", "watch"]

_POLL_S = 0.5
_CLOSE_LIMIT_S = 60.0


class News(NamedTuple):
    """A line about what happened."""

    text: str
    is_problem: bool = False


def watch(actor: Any, begin: Any, signals: StopSignals, output: ProgressOutput) -> int:
    """Watch a run to its end, and close it. Returns the exit code.

    Parameters
    ----------
    actor:
        The handle of the controller's actor.
    begin:
        Reference of what its start, or its restart, answers: a restart's is the report.
    signals:
        Heeded by the caller.
    output:
        Where to say what happens.

    Raises
    ------
    PreemptedError
        It was told to stop by a signal, and has; or a second one ended it at once, in whatever state.
    """
    try:
        report = _answer(begin, signals, allowed=0)
        if report is not None:
            output.say(render_report(report))
            output.insist(restart_line(report))
        output.say("training")
        _watch_training(actor, signals, output)
    except _EndedAtOnceError:
        raise PreemptedError(
            f"{signals.first} ended the run at once. Nothing sealed is lost: resume it, or start it again if it had not begun"
        ) from None
    except PreemptedError:
        _close(actor, signals, output, cleanly=True)
        raise
    except BaseException:
        _close(actor, signals, output, cleanly=False)
        raise
    _close(actor, signals, output, cleanly=True)
    return 0


def _watch_training(actor: Any, signals: StopSignals, output: ProgressOutput) -> None:
    running = actor.run.remote()
    told = False
    asked, saving = 0, []
    done: list[Any] = []
    while not done:
        done, _ = ray.wait([running], timeout=_POLL_S)
        if signals.count > 1:
            raise _EndedAtOnceError
        if signals.count and not told:
            told = True
            output.insist(f"{signals.first}: finishing what is under way. Once more, and it ends at once.")
            _answer(actor.preempt.remote(), signals)
        if signals.checkpoints > asked:
            asked = signals.checkpoints
            saving.append(actor.checkpoint.remote())
        saving = [reference for reference in saving if not _said_why_not(reference, output)]
        news, status = _answer(actor.news.remote(), signals)
        for line in news:
            (output.insist if line.is_problem else output.say)(line.text)
        output.show(status_line(status))
    _get(running)


def _said_why_not(saving: Any, output: ProgressOutput) -> bool:
    """Whether a checkpoint that was asked for has come to something: news tell of one that was tried."""
    if not ray.wait([saving], timeout=0)[0]:
        return False
    try:
        _get(saving)
    except KinlogError as error:
        output.insist(f"no checkpoint was taken: {error}")
    return True


class _EndedAtOnceError(Exception):
    """More signals came than there is time to wait for anything."""


def _answer(reference: Any, signals: StopSignals, *, allowed: int = 1) -> Any:
    """Return an actor's answer, waiting for it through so many signals and no more."""
    while not ray.wait([reference], timeout=_POLL_S)[0]:
        if signals.count > allowed:
            raise _EndedAtOnceError
    return _get(reference)


def _close(actor: Any, signals: StopSignals, output: ProgressOutput, *, cleanly: bool) -> None:
    """Close a run, without masking the failure that is on its way to the user."""
    failing = sys.exc_info()[0] is not None
    deadline_s = time.monotonic() + _CLOSE_LIMIT_S
    closing = actor.close.remote(cleanly=cleanly)
    while not ray.wait([closing], timeout=_POLL_S)[0]:
        if signals.count > 1 or time.monotonic() > deadline_s:
            output.insist("it does not close: left as it is, which a resume puts right")
            return
    try:
        _get(closing)
    except Exception as error:
        if not failing:
            raise
        output.insist(f"while closing: {error!r}")


def _get(reference: Any) -> Any:
    """Return an actor's answer, and raise what it raised as itself, without Ray's traceback around it."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, KinlogError):
            raise cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise WorkerLostError(
            "the controller died. Resume the run: with the row journal on, nothing sealed is lost."
        ) from error
