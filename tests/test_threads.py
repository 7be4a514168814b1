"""Goal: a call that never returns harms nobody else. Method: calls that wait for an event nobody sets."""

import subprocess
import sys
from threading import Event

import pytest

from tiercel.threads import GROW_MOST, Crew, start


def test_what_a_call_answers_or_raises_is_in_its_future():
    assert start(lambda: 3, "test").result(5) == 3
    with pytest.raises(ZeroDivisionError):
        start(lambda: 1 // 0, "test").result(5)
    crew = Crew(1, "test")
    assert crew.submit(divmod, 7, 2).result(5) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        crew.submit(divmod, 7, 0).result(5)
    crew.shutdown()


def test_a_thread_that_hangs_is_replaced():
    crew, free = Crew(1, "test"), Event()
    stuck = crew.submit(free.wait)
    waiting = crew.submit(int, 5)
    crew.grow()
    assert waiting.result(5) == 5 and not stuck.done()
    free.set()
    crew.shutdown()
    assert stuck.done()


def test_not_every_thread_is_replaced():
    crew, free = Crew(1, "test"), Event()
    stuck = [crew.submit(free.wait) for _ in range(3 * GROW_MOST)]
    for _ in stuck:
        crew.grow()
    assert len(crew._threads) == 1 + GROW_MOST
    free.set()
    crew.shutdown()


def test_what_was_submitted_is_done_before_the_end_and_nothing_after():
    crew = Crew(2, "test")
    results = [crew.submit(int, number) for number in range(50)]
    crew.shutdown()
    assert [result.result(0) for result in results] == list(range(50))
    with pytest.raises(RuntimeError):
        crew.submit(int)
    crew.grow()
    crew.shutdown()


def test_each_ends_when_all_have_ended():
    crew, done = Crew(2, "test"), []
    crew.each(done.append, [])
    crew.each(done.append, range(5))
    assert sorted(done) == [0, 1, 2, 3, 4]

    def divide(number):
        done.append(1 // number)

    done.clear()
    for numbers in ([1, 0, 1], [0, 1, 1]):
        with pytest.raises(ZeroDivisionError):
            crew.each(divide, numbers)
    assert done == [1] * 4
    crew.shutdown()


def test_a_process_ends_although_calls_hang():
    code = """
from threading import Event
from tiercel.threads import Crew, start
Crew(1, "test").submit(Event().wait)
start(Event().wait, "test")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
