"""Signals: the first is passed on to the run, the second ends it at once, and afterwards they do what they did."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from kinlog_progress import STATUS

from kinlog.controller import watching
from kinlog.controller.progress_output import ProgressOutput
from kinlog.controller.stop_signals import StopSignals
from kinlog.schemas.errors import CheckpointError, DataPlaneError, PreemptedError


class Call:
    """A call to an actor. It ends after so many looks at it, each of which may be a moment for a signal."""

    def __init__(self, looks: float = 0, answer: object = None, at_look: Callable[[], None] = lambda: None):
        self.looks = looks
        self.answer = answer
        self.at_look = at_look


class Method:
    def __init__(self, actor: "FakeActor", name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, **arguments: object) -> Call:
        self._actor.calls.append((self._name, arguments))
        return self._actor.answers.get(self._name, Call())


class FakeActor:
    """The controller's handle: every call is noted."""

    def __init__(self, **answers: Call) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.answers = {"news": Call(answer=([], STATUS))} | answers

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    @property
    def closed(self) -> list[object]:
        return [arguments["cleanly"] for name, arguments in self.calls if name == "close"]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        (call,) = calls
        call.at_look()
        call.looks -= 1
        return ([], calls) if call.looks >= 0 else (calls, [])

    def get(call: Call) -> object:
        if isinstance(call.answer, BaseException):
            raise call.answer
        return call.answer

    monkeypatch.setattr(watching.ray, "wait", wait)
    monkeypatch.setattr(watching.ray, "get", get)


def watch(actor: Any, begin: Call | None = None) -> int:
    signals = StopSignals()
    with signals.heeded():
        return watching.watch(actor, begin or Call(), signals, ProgressOutput(quiet=False))


def raising(*numbers: signal.Signals) -> Callable[[], None]:
    """Raise one signal at each look, until there are no more."""
    left = list(numbers)
    return lambda: signal.raise_signal(left.pop(0)) if left else None


PREEMPTED = PreemptedError("the run was told to stop, and has")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_passed_on_once_and_the_run_closed_cleanly_when_it_has_stopped(
    number: signal.Signals,
):
    actor = FakeActor(run=Call(3, PREEMPTED, raising(number)))
    with pytest.raises(PreemptedError) as caught:
        watch(actor)
    assert caught.value is PREEMPTED
    assert [name for name, _ in actor.calls].count("preempt") == 1
    assert actor.closed == [True]


@pytest.mark.parametrize("during", ["run", "preempt", "news", "close"])
def test_second_signal_ends_it_at_once_whatever_is_waited_for(during: str):
    first = raising(signal.SIGTERM)
    calls = {"run": Call(1, PREEMPTED, first)}
    calls[during] = Call(float("inf"), None, raising(signal.SIGTERM))
    if during == "run":
        calls["run"] = Call(float("inf"), None, raising(signal.SIGTERM, signal.SIGINT))
    with pytest.raises(PreemptedError):
        watch(FakeActor(**calls))


def test_signal_before_training_begins_ends_it_at_once():
    actor = FakeActor()
    with pytest.raises(PreemptedError, match="SIGTERM ended the run at once"):
        watch(actor, Call(float("inf"), None, raising(signal.SIGTERM)))
    assert actor.calls == []


def test_failure_is_closed_as_one_and_nothing_masks_it():
    failure = DataPlaneError("no storage unit answers")
    actor = FakeActor(run=Call(answer=failure), close=Call(answer=RuntimeError("while closing")))
    with pytest.raises(DataPlaneError) as caught:
        watch(actor)
    assert caught.value is failure
    assert actor.closed == [False]


def test_run_that_ends_well_is_closed_cleanly_and_what_goes_wrong_there_is_raised():
    actor = FakeActor()
    assert watch(actor) == 0
    assert actor.closed == [True]
    with pytest.raises(RuntimeError, match="while closing"):
        watch(FakeActor(close=Call(answer=RuntimeError("while closing"))))


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals().heeded():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_checkpoint_is_taken_on_demand_once_for_each_request():
    actor = FakeActor(run=Call(6, at_look=raising(signal.SIGUSR1)), checkpoint=Call(2))
    assert watch(actor) == 0
    assert [name for name, _ in actor.calls].count("checkpoint") == 1
    assert actor.closed == [True]


def test_checkpoint_that_is_refused_is_said_and_costs_nothing(capsys: pytest.CaptureFixture[str]):
    refused = Call(answer=CheckpointError("checkpointing.enabled is false"))
    assert watch(FakeActor(run=Call(3, at_look=raising(signal.SIGUSR1)), checkpoint=refused)) == 0
    assert "no checkpoint was taken: checkpointing.enabled is false" in capsys.readouterr().out


def test_news_are_said_in_order_and_quiet_says_only_problems(capsys: pytest.CaptureFixture[str]):
    news = [watching.News("step 1/2"), watching.News("checkpoint FAILED", is_problem=True)]
    for quiet, said in ((False, "training\nstep 1/2\ncheckpoint FAILED\n"), (True, "checkpoint FAILED\n")):
        actor = FakeActor(news=Call(answer=(news, STATUS)))
        assert watching.watch(actor, Call(), StopSignals(), ProgressOutput(quiet=quiet)) == 0
        assert capsys.readouterr().out == said
