"""Goal: what fails is left alone and tried again, ever less often. Method: a clock by hand."""

from tiercel.policy.breaker import FAILURES, WAIT_FIRST_S, WAIT_MOST_S, Breaker, BreakerState


def off():
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    return breaker


def test_a_failure_now_and_then_changes_nothing():
    breaker = Breaker()
    for _ in range(10):
        breaker.failed(0.0)
        breaker.worked()
        assert breaker.state is BreakerState.WORKING and breaker.allows(0.0)


def test_failures_in_a_row_turn_it_off_until_some_time_has_passed():
    breaker = off()
    assert breaker.state is BreakerState.OFF
    assert not breaker.allows(WAIT_FIRST_S - 0.01)
    assert breaker.allows(WAIT_FIRST_S) and breaker.state is BreakerState.TRYING


def test_one_tries_and_the_others_wait_for_how_it_ends():
    breaker = off()
    assert breaker.allows(WAIT_FIRST_S)
    assert not breaker.allows(WAIT_FIRST_S + 100)
    breaker.worked()
    assert breaker.allows(0.0)


def test_each_trial_that_fails_doubles_the_wait_up_to_a_most():
    breaker, now = off(), WAIT_FIRST_S
    waits = []
    for _ in range(10):
        assert breaker.allows(now)
        breaker.failed(now)
        began = now
        while not breaker.allows(now):
            now += WAIT_FIRST_S
        waits.append(now - began)
        breaker.state = BreakerState.OFF
    assert waits[:3] == [2 * WAIT_FIRST_S, 4 * WAIT_FIRST_S, 8 * WAIT_FIRST_S] and waits[-1] == WAIT_MOST_S
