"""Goal: a program has answers without a server, the same ones. Method: the embedded model."""

import pytest

from tests.engine.drive import PAGE, make_engine, run, tokens_of, words
from tests.engine.drive import make_ask as ask_of
from tiercel import Offline
from tiercel.asks.ask import Finish
from tiercel.engine.offline import answer_all
from tiercel.errors import AskError


def test_texts_and_tokens_are_answered_in_order_and_the_second_time_from_the_cache(tmp_path):
    store = f"file://{tmp_path}/store?size=1GiB"
    prompts = [words(3 * PAGE + 9), words(20, seed=1), "Record: king sword. Which record has king?"]
    how = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with Offline(device_memory="24MiB", host_memory="64MiB", store=store) as model:
        first = model.generate(prompts, **how)
        again = model.generate(prompts, **how)
    assert [len(answer.tokens) for answer in first] == [6, 6, 6] and first[2].text
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    assert again[0].usage.cached_tokens >= 3 * PAGE > first[0].usage.cached_tokens == 0
    truth = run(make_engine(), ask_of("a", prompts[0], 6, logprobs=None))
    assert tokens_of(truth[0]) == tokens_of(first[0])
    with Offline(device_memory="24MiB", host_memory="64MiB", store=store) as later:
        [answer] = later.generate(prompts[:1], **how)
    assert answer.tokens == first[0].tokens and answer.usage.store_tokens > 0


def test_more_prompts_than_may_wait_are_all_answered():
    engine = make_engine(waiting_max=3, running_max=2)
    answers = answer_all(engine, [ask_of(str(i), words(10, i), 2) for i in range(11)])
    assert [answer.finish for answer in answers] == [Finish.LENGTH] * 11


def test_a_prompt_that_can_not_be_served_is_named_before_anything_is_computed():
    engine = make_engine()
    with pytest.raises(AskError, match="prompt"):
        answer_all(engine, [ask_of("a", words(10), 2), ask_of("b", [], 2)])
    assert not engine.tasks and not engine.counters["asks"]
