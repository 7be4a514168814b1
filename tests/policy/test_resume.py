"""Goal: never resume further than exactness allows, never compute more than needed."""

from hypothesis import given
from hypothesis import strategies as st

from tiercel.policy.resume import Resume, Reuse, Why, choose_resume, tokens_by_tier


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


@given(st.integers(0, 4), st.lists(st.booleans(), max_size=4), st.integers(1, 3), st.data())
def test_tokens_that_are_computed_again_are_taken_from_the_end_of_the_text(near, fetched, page_tokens, data):
    """The stupid model: the tier of each token in a list, which is cut."""
    tiers = ["device"] * near + ["store" if each else "host" for each in fetched]
    tokens = [tier for tier in tiers for _ in range(page_tokens)]
    replayed = data.draw(st.integers(0, len(tokens)))
    left = tokens[: len(tokens) - replayed]
    supplied = tokens_by_tier(near, fetched, page_tokens=page_tokens, replay_tokens=replayed)
    assert supplied == tuple(left.count(tier) for tier in ("device", "host", "store"))


def test_a_token_is_supplied_by_a_tier_or_replayed_or_computed():
    """The request of the issue: 512 tokens on the device, 128 on the host, 378 of them computed again."""
    supplied = tokens_by_tier(4, [False], page_tokens=128, replay_tokens=378)
    assert supplied == (262, 0, 0)
    reuse = Reuse(648, *supplied, 640, 378, 378, Why.REPLAYED)
    assert (reuse.cached_tokens, reuse.computed_tokens, reuse.tokens) == (262, 386, 640)
    assert str(reuse).startswith("reused 262 of 648 tokens (262 device, 0 host, 0 store), replayed 378; ")
    assert "replayed" not in str(Reuse(648, 512, 128, 0, 640, 0, 378, Why.COMPLETE))
