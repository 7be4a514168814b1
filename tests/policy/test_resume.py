"""Goal: never resume further than exactness allows, never compute more than needed."""

from tiercel.policy.resume import Resume, Reuse, Why, choose_resume


def choose(found, boundary, *, replay_cost=100):
    return choose_resume(found=found, boundary=boundary, page_tokens=64, replay_cost=replay_cost)


def test_the_tail_is_used_when_it_is_at_the_end():
    assert choose(5, 5) == Resume(5)


def test_replay_is_taken_only_where_it_computes_less():
    assert choose(5, 4) == Resume(4)
    assert choose(5, 3) == Resume(5, by_replay=True, replay_tokens=100)


def test_replay_is_taken_only_where_it_is_allowed_and_possible():
    assert choose(5, 0, replay_cost=None) == Resume(0)


def test_a_replay_never_goes_beyond_the_start_of_the_text():
    assert choose(1, 0, replay_cost=64) == Resume(0)


def test_the_answer_says_what_a_replay_would_cost():
    reuse = Reuse(900, 256, 0, 0, 768, 0, 508, Why.NO_TAIL)
    assert "reused 256 of 900" in str(reuse) and "768 tokens found" in str(reuse) and "508" in str(reuse)


def test_a_replay_that_computes_nothing_is_still_a_replay():
    assert choose(4, 2, replay_cost=0) == Resume(4, by_replay=True)
