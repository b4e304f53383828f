"""The garbage collector's settings during a run, and after it."""

from __future__ import annotations

import gc
import threading

import pytest

from kvlab.engine.collecting import YOUNG, collecting_seldom


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_it_collects_seldom_and_afterwards_as_before():
    gc.set_threshold(500, 7, 8)
    with collecting_seldom():
        assert gc.get_threshold() == (YOUNG, 7, 8)
    assert gc.get_threshold() == (500, 7, 8)
    with pytest.raises(ZeroDivisionError):
        collecting_seldom()(lambda: 1 / 0)()
    assert gc.get_threshold() == (500, 7, 8)


@pytest.mark.parametrize("young", [0, 10 * YOUNG])
def test_a_collector_that_is_off_or_made_seldom_stays_so(young):
    gc.set_threshold(young, 7, 8)
    with collecting_seldom():
        assert gc.get_threshold() == (young, 7, 8)
    assert gc.get_threshold() == (young, 7, 8)


def test_of_runs_in_two_threads_the_last_one_sets_it_back():
    gc.set_threshold(500, 7, 8)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collecting_seldom():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with collecting_seldom():
        thread.start()
        assert inside.wait(60)
    assert gc.get_threshold() == (YOUNG, 7, 8)
    leave.set()
    thread.join()
    assert gc.get_threshold() == (500, 7, 8)
