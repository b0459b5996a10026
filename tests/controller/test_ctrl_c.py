"""Ctrl-C ends what goes on until it comes, whatever Python was doing just then."""

import os
import signal

import pytest

from kinlog.controller.ctrl_c import sleep_until_ctrl_c


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Cleaned:
    def __del__(self) -> None:
        press_ctrl_c()
        sum(range(10))  # the signal is heeded here at the latest


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_python_forgets_ends_the_next_pause():
    with sleep_until_ctrl_c() as sleep:
        cleaned = Cleaned()
        del cleaned  # what is raised in there is printed, and gone
        with pytest.raises(KeyboardInterrupt):
            sleep(3600)


def test_ctrl_c_is_an_interrupt_as_ever():
    with pytest.raises(KeyboardInterrupt), sleep_until_ctrl_c():
        press_ctrl_c()
        sum(range(10))


def test_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with sleep_until_ctrl_c() as sleep:
        sleep(0)
    assert signal.getsignal(signal.SIGINT) is before
