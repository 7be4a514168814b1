"""Goal: texts whose pages are partly on the host have the same tokens and logprobs as if nothing were cached:
with pages that leave and come back in the middle of a text, in all loops, with guesses, shared prefixes,
aborts and preemptions, and nothing is lost or kept.
Method: the embedded model, a device of a few pages, and `sparse` auto or always."""

import asyncio
from random import Random

import pytest

from tests.engine.drive import (
    PAGE,
    logprobs_of,
    make_ask,
    make_engine,
    one_loop,
    run,
    settle,
    steps_of,
    tokens_of,
    truth_of,
    words,
)
from tests.peers.roles import answered, roles
from tiercel.asks.ask import Finish
from tiercel.errors import AskError

PROMPTS = [tuple(words(2500 + 137 * i, i)) for i in range(3)]
PROMPTS.append(PROMPTS[0][:2000] + tuple(words(300, 9)))
COUNT = 40


def sparse_engine(mode="auto", pages=12, guesses=0, host_pages=300, staged=64, **options):
    """Room for one text of so many whole pages. (The longest prompt here has 22.)"""
    options |= {"speculate": "mtp"} if guesses else {}
    cache = {"sparse": mode, "staged_pages": staged}
    shape = {"pages": pages, "host_pages": host_pages, "second": ("c4",), "guesses": guesses}
    return make_engine(**shape, cache=cache, **options)


def check(answers, prompts, count=COUNT):
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = truth_of(prompt, count)
        assert tokens_of(answer) == tokens_of(truth)
        assert logprobs_of(answer) == logprobs_of(truth)


@one_loop
@pytest.mark.parametrize("guesses", [0, 1, 3])
@pytest.mark.parametrize(("mode", "pages"), [("auto", 12), ("auto", 20), ("always", 14), ("always", 40)])
def test_texts_that_read_the_host_have_the_same_answers(mode, pages, guesses, overlap):
    engine = sparse_engine(mode, pages, guesses)
    asks = [make_ask(f"a{i}", prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    check(run(engine, *asks, overlap=overlap), PROMPTS)
    assert engine.cache.counters["pages_sparse"] > 0
    settle(engine)
    turn = PROMPTS[1] + tuple(words(50, 3))  # a new turn on what is cached
    check(run(engine, make_ask("b", turn, COUNT), overlap=overlap), [turn])
    settle(engine)
    assert engine.cache.pages.free == engine.cache.pages.capacity or engine.cache.tree.index
    engine.cache.flush()
    assert engine.cache.pages.free == engine.cache.pages.capacity, "all places are free again"


def test_a_text_longer_than_the_device_is_computed():
    engine = sparse_engine("auto", pages=9)
    prompt = PROMPTS[0][:2300]
    assert len(prompt) // engine.page_tokens == 17, "twice as many pages as are whole on the device at most"
    check(run(engine, make_ask("a", prompt, COUNT)), [prompt])
    settle(engine)


def test_a_text_too_long_for_the_staging_area_is_refused():
    engine = sparse_engine("auto", pages=12, staged=15)
    assert engine.context_tokens == 15 * engine.page_tokens
    with pytest.raises(AskError, match="1920 fit"):
        run(engine, make_ask("a", PROMPTS[0], 8))


def test_a_short_text_has_few_hot_rows():
    """A text of n sparse pages needs no more hot rows than these pages had."""
    engine = sparse_engine("always", pages=40)
    seen = list[tuple[int, int]]()

    def watch(model):
        take = model.take_hot
        model.take_hot = lambda ring, places: (seen.append((ring, len(places))), take(ring, places))

    watch(engine.runner.model)
    prompt = tuple(words(200))  # one full page
    check(run(engine, make_ask("a", prompt, COUNT)), [prompt])
    assert {count for _, count in seen} == {1}
    settle(engine)


def test_nothing_is_sparse_while_there_is_room():
    engine = sparse_engine("auto", pages=100)
    check(run(engine, *(make_ask(f"a{i}", p, COUNT) for i, p in enumerate(PROMPTS))), PROMPTS)
    assert not engine.cache.counters["pages_sparse"]
    assert set(engine.stats().sparse.values()) == {0}, "the host was not read"
    settle(engine)


def test_hundreds_of_tokens_later_the_host_has_all_that_was_computed():
    """What an answer computes is saved page by page while it is drawn, and leaves. A new turn reads all of it
    on the host."""
    engine, prompt = sparse_engine("always", pages=40), PROMPTS[0][:300]
    truth = truth_of(prompt, 488)
    answer = run(engine, make_ask("a", prompt, 488))[0]
    assert tokens_of(answer) == tokens_of(truth) and logprobs_of(answer) == logprobs_of(truth)
    settle(engine)
    turn = (*prompt, *tokens_of(answer), *words(50, 3))
    assert engine.cache.leave_device(engine.cache.chain(turn)) == 0
    check(run(engine, make_ask("b", turn, COUNT)), [turn])
    reused = engine.explain("b").reuse
    assert reused.host_tokens == 768 and engine.explain("b").sparse_pages == 6
    assert engine.cache.flights.parts_loaded[1] == 0
    settle(engine)


def test_places_of_each_tier_may_be_given_out_in_any_order():
    random = Random(18)
    shuffled = lambda count: random.sample(range(count), count)  # noqa: E731
    engine = sparse_engine("auto", 12, order=shuffled)
    asks = [make_ask(f"a{i}", prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    check(run(engine, *asks), PROMPTS)
    assert engine.cache.counters["pages_sparse"] > 0
    settle(engine)


def test_who_finds_no_room_on_the_host_waits():
    """The host has room for one of the texts at a time, and none of them is whole on the device."""
    engine = sparse_engine("auto", pages=9, host_pages=26)
    prompts = [prompt[:2300] for prompt in PROMPTS[:3]]
    asks = [make_ask(f"a{i}", prompt, COUNT) for i, prompt in enumerate(prompts)]
    check(run(engine, *asks), prompts)
    assert engine.cache.counters["pages_sparse"] > 3 * 8
    settle(engine)


def test_a_text_that_gave_way_goes_on_with_the_first_parts_of_its_pages():
    """It is not computed again, and the second pool is not touched: the host has kept all of it."""
    engine = sparse_engine("always", pages=40)
    steps, ask = steps_of(engine, False, None), make_ask("a", PROMPTS[0], COUNT)
    engine.add(ask)
    outs = [out for _ in range(8) for delta in next(steps) for out in delta.tokens]
    assert len(outs) < COUNT and engine.stats().sparse["pages_sparse"] >= 17
    while engine.cache.busy:
        engine.cache.step()
    (task,) = engine.scheduler.running
    engine.scheduler.admission.preempt(task)
    engine.cache.leave_device(engine.cache.chain(PROMPTS[0]))
    while not engine.idle:
        outs += [out for delta in next(steps) for out in delta.tokens]
    truth = truth_of(PROMPTS[0], COUNT).tokens
    assert [(out.token, out.logprob) for out in outs] == [(out.token, out.logprob) for out in truth]
    first, second = engine.cache.flights.parts_loaded
    assert first >= 18 and second == 0
    assert engine.counters["tokens_computed"] < len(PROMPTS[0]) + 2 * engine.page_tokens
    settle(engine)


def test_two_texts_read_the_same_pages_on_the_host():
    """They share a prefix of 16 pages: the host has it once, and both answer as if they were alone."""
    engine = sparse_engine("always", pages=60)
    prefix = PROMPTS[2][: 16 * engine.page_tokens]
    prompts = [prefix + tuple(words(150, seed)) for seed in (31, 32, 33)]
    check(run(engine, make_ask("a", prompts[0], COUNT)), prompts[:1])
    settle(engine)
    free = engine.cache.host_pages.free
    check(run(engine, *(make_ask(f"b{i}", each, COUNT) for i, each in enumerate(prompts[1:]))), prompts[1:])
    assert [engine.explain(f"b{i}").sparse_pages for i in range(2)] == [16, 16]
    own = 2 * (1 + 2 * engine.cache.spec.places_per_tail)  # each has a page of its own, and tails
    settle(engine)
    assert free - engine.cache.host_pages.free <= own


def test_a_step_reads_no_more_of_the_host_than_it_can_stage():
    """Two new turns at the same time: the staging area has room for one of them."""
    engine = sparse_engine("always", pages=60, staged=22)
    prompts = [PROMPTS[0], PROMPTS[1]]
    check(run(engine, *(make_ask(f"a{i}", each, COUNT) for i, each in enumerate(prompts))), prompts)
    settle(engine)
    staged, arrange = list[int](), engine.runner.model.apart.arrange

    def watch(spans):
        found = arrange(spans)
        staged.append(0 if found[1] is None else len(found[1]))
        return found

    engine.runner.model.apart.arrange = watch
    turns = [prompt + tuple(words(60, 3)) for prompt in prompts]
    check(run(engine, *(make_ask(f"b{i}", turn, COUNT) for i, turn in enumerate(turns))), turns)
    assert [each for each in staged if each] == [19, 20], "one after the other"
    settle(engine)


def test_a_prompt_that_another_server_computes_is_read_on_the_host():
    """Its pages land there while a text runs. Nothing of it takes a place in the second pool."""
    first, second = make_engine(host_pages=100), sparse_engine("always", pages=60, host_pages=200)
    prompt = PROMPTS[1]
    with roles(first, second) as both:

        async def ask():
            running = asyncio.ensure_future(answered(both.decode, make_ask("running", PROMPTS[0], 60)))
            named = both.named(make_ask("pulled", prompt, COUNT))
            _, answer = await asyncio.gather(answered(both.prefill, named), answered(both.decode, named))
            return answer, await running

        pulled, running = asyncio.run(ask())
        assert pulled.usage.store_tokens == len(prompt) // PAGE * PAGE
        check([pulled], [prompt])
        check([running], PROMPTS[:1], 60)
        assert second.explain("pulled").sparse_pages == len(prompt) // PAGE
        assert second.cache.flights.parts_loaded == [len(prompt) // PAGE, 0]


def test_without_a_host_tier_nothing_is_sparse():
    engine = sparse_engine("auto", pages=24, host_pages=0)
    assert engine.cache.residency is None
    check(run(engine, make_ask("a", PROMPTS[0], COUNT)), PROMPTS[:1])


def test_pages_come_back_where_there_is_room(monkeypatch):
    monkeypatch.setattr("tiercel.cache.residency.CALM_STEPS", 4)
    engine = sparse_engine("auto", pages=40)
    asks = [make_ask(f"a{i}", prompt, 8) for i, prompt in enumerate(PROMPTS)]
    long = make_ask("long", PROMPTS[2], 200)
    answers = run(engine, *asks, long)
    check(answers[:-1], PROMPTS, 8)
    check(answers[-1:], PROMPTS[2:3], 200)
    assert engine.cache.counters["pages_sparse"] >= engine.cache.counters["pages_back"] > 0
    settle(engine)


@pytest.mark.rotate("seed")
@pytest.mark.parametrize("seed", range(0, 8, 2))
@pytest.mark.parametrize("odd", range(2))
def test_aborts_and_preemptions_at_any_moment_lose_nothing(odd, seed):
    """Short and urgent asks come and go; whoever reaches its end has the right answer."""
    random = Random(seed + odd)
    mode, guesses = random.choice(["auto", "always"]), random.choice([0, 2])
    engine = sparse_engine(mode, random.choice([11, 14, 24]), guesses, host_pages=random.choice([60, 300]))
    steps = steps_of(engine, False, None)
    asked, ended = {}, {}
    for number in range(14):
        prompt = random.choice(PROMPTS)[: random.randrange(300, 2700)]
        ask = make_ask(f"{number}", prompt, random.randrange(1, 30), priority=random.randrange(3))
        asked[ask.request_id] = ask, []
        engine.add(ask)
        for _ in range(random.randrange(12)):
            for delta in next(steps):
                asked[delta.request_id][1].extend(delta.tokens)
                if delta.finish is not None:
                    ended[delta.request_id] = delta.finish
            engine.cache.check()
        if random.random() < 0.3:
            engine.abort(random.choice(list(asked)))
    for _ in range(4000):
        if engine.idle:
            break
        for delta in next(steps):
            asked[delta.request_id][1].extend(delta.tokens)
            if delta.finish is not None:
                ended[delta.request_id] = delta.finish
    assert len(ended) == len(asked), "every ask ended"
    for name, (ask, outs) in asked.items():
        if ended[name] is Finish.LENGTH:
            truth = truth_of(ask.prompt, ask.sampling.max_tokens)
            assert [(o.token, o.logprob) for o in outs] == [(o.token, o.logprob) for o in truth.tokens]
    settle(engine)


def test_the_statistics_tell_what_is_sparse_and_what_was_read_on_the_host():
    engine = sparse_engine("always", pages=40)
    assert set(engine.stats().sparse.values()) == {0}
    engine.add(make_ask("a", PROMPTS[0], COUNT))
    steps, now = steps_of(engine, False, None), []
    while not engine.idle:
        next(steps)
        now.append(engine.stats())
    full = len(PROMPTS[0]) // engine.page_tokens
    most = max(now, key=lambda each: each.sparse["pages_sparse"])
    assert full - 2 <= most.sparse["pages_sparse"] <= full
    assert most.sparse["pages_sparse"] + most.sparse["pages_whole"] in (full + 1, full + 2)
    assert 0 < most.sparse["places_hot"] <= most.sparse["pages_sparse"]

    turn = PROMPTS[0] + tuple(words(50, 3))
    run(engine, make_ask("b", turn, COUNT))
    stats, (stream,) = engine.stats(), engine.cache.spec.pools[1]
    sparse = stats.sparse
    assert sparse["pages_whole"] == sparse["pages_sparse"] == sparse["places_hot"] == 0, "nothing runs"
    assert sparse["entries_hit"] > 0 and sparse["entries_missed"] > 0
    assert sparse["bytes_gathered"] == sparse["entries_missed"] * stream.bytes_per_entry
    rows, rest = divmod(sparse["bytes_staged"], engine.cache.spec.row_bytes(stream))
    assert rows >= full - 2 and not rest, "a turn is a long span: it reads staged rows"
    assert stats.counters["pages_sparse"] >= full - 2 and stats.counters["pages_back"] == 0
    assert [engine.explain(name).sparse_pages for name in "ab"] == [0, most.sparse["pages_sparse"]]
    settle(engine)


def test_bytes_on_the_device_are_those_that_are_there():
    engine = sparse_engine("always", pages=40)
    run(engine, make_ask("a", PROMPTS[0], COUNT))
    settle(engine)
    stats, spec, sparse = engine.stats(), engine.cache.spec, engine.cache.counters["pages_sparse"]
    held, pages = stats.cached_bytes["device"], stats.cached_items["device"]["pages"]
    assert held["c4"] == (pages - sparse) * spec.bytes_of(spec.stream("c4")) < pages * spec.page_bytes
    assert held["c4_index"] == pages * spec.bytes_of(spec.stream("c4_index"))
    assert sum(held.values()) <= stats.capacity_bytes["device"]


def test_whole_pages_have_no_such_statistics():
    assert make_engine(pages=9).stats().sparse is None
