"""Goal: what goes wrong with one text ends that text; what nobody can place ends every answer, and says so.
Method: the embedded model, with one part at a time made to raise."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from tests.engine.drive import (
    LOOPS,
    PAGE,
    deltas_of,
    make_ask,
    make_engine,
    run,
    settle,
    steps_of,
    tokens_of,
    words,
)
from tiercel.asks.ask import Finish
from tiercel.engine.sampling import Sampler
from tiercel.engine.service import EngineService
from tiercel.errors import EngineError
from tiercel.models.frame import Frame
from tiercel.text.stream import TextStream


class Broken(Exception):
    """What the test makes go wrong."""


def broken(*args, **kwargs):
    raise Broken("the test broke this")


def ends_of(engine, overlap, *asks):
    """How each ask ended, and with which error: all ends of each, for there must be one."""
    ends = {ask.request_id: [] for ask in asks}
    for ask in asks:
        engine.add(ask)
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, overlap, executor)
        while engine.tasks or not all(ends.values()):
            for delta in next(steps):
                if delta.finish is not None:
                    ends[delta.request_id].append((delta.finish, delta.error))
        next(steps)
    return ends


def answer_both(engine, overlap, **options):
    """One ask with these options, and one that takes the best token each time."""
    plain = {"logprobs": None}
    return ends_of(
        engine, overlap, make_ask("a", words(9), 4, **options), make_ask("b", words(9, 1), 4, **plain)
    )


@LOOPS
def test_a_token_that_can_not_be_drawn_ends_its_text_alone(overlap):
    engine = make_engine()
    with patch.object(Sampler, "draw", broken):  # the logits of a are adjusted, b takes the best token
        ends = answer_both(engine, overlap, presence_penalty=1.0)
    assert ends == {"a": [(Finish.ERROR, "the test broke this")], "b": [(Finish.LENGTH, "")]}
    settle(engine)


@LOOPS
def test_a_text_that_can_not_be_told_ends_alone_and_only_once(overlap):
    engine, real = make_engine(), TextStream.decode

    def decode(stream, token):
        a = engine.tasks.get("a")
        return (broken if a and a.stream is stream else real)(stream, token)

    with patch.object(TextStream, "decode", decode):
        ends = answer_both(engine, overlap)
    assert ends == {"a": [(Finish.ERROR, "the test broke this")], "b": [(Finish.LENGTH, "")]}
    settle(engine)


@LOOPS
def test_a_tail_that_can_not_be_restored_ends_its_text_alone(overlap):
    engine, text = make_engine(), words(2 * PAGE + 5)
    [first] = run(engine, make_ask("first", text, 4))
    resume = Frame.resume
    with patch.object(Frame, "resume", lambda *args: broken() if args[2] else resume(*args)):
        ends = ends_of(engine, overlap, make_ask("a", text, 4), make_ask("b", words(9, 1), 4))
    assert ends == {"a": [(Finish.ERROR, "the test broke this")], "b": [(Finish.LENGTH, "")]}
    settle(engine)
    [again] = run(engine, make_ask("again", text, 4), overlap=overlap)
    assert tokens_of(again) == tokens_of(first) and again.usage.cached_tokens == 2 * PAGE


@LOOPS
def test_a_step_that_can_not_be_computed_ends_its_texts_and_the_next_are_served(overlap):
    engine = make_engine()
    with patch.object(Frame, "forward", broken):
        ends = answer_both(engine, overlap)
    assert ends == {name: [(Finish.ERROR, "the test broke this")] for name in ("a", "b")}
    assert answer_both(engine, overlap) == {name: [(Finish.LENGTH, "")] for name in ("a", "b")}
    settle(engine)


@LOOPS
def test_scores_that_can_not_be_made_end_their_text_alone(overlap):
    engine = make_engine()
    with patch("tiercel.engine.runner.token_logprobs", broken):
        ends = answer_both(engine, overlap, prompt_logprobs_from=0)
    assert ends == {"a": [(Finish.ERROR, "the test broke this")], "b": [(Finish.LENGTH, "")]}
    settle(engine)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("part", ["plan", "advance", "emit"])
def test_a_failure_nobody_can_place_ends_every_answer_and_refuses_the_next_at_once(overlap, part):
    engine = make_engine(overlap=overlap)
    service = EngineService(engine, "tiny-v4")

    async def listen(name):
        return [delta async for delta in deltas_of(service, make_ask(name, words(20), 5000))]

    async def talk():
        answers = [asyncio.create_task(listen(name)) for name in ("a", "b")]
        while not engine.counters["tokens_drawn"]:
            await asyncio.sleep(0)
        with patch.object(engine if part == "emit" else engine.scheduler, part, broken):
            for deltas in await asyncio.gather(*answers):
                assert deltas[-1].finish is Finish.ERROR and "failed" in deltas[-1].error
        assert not service.ready and isinstance(service.failure, EngineError)
        for late in (listen("c"), service.stats(), service.flush(1.0), service.detach_store()):
            with pytest.raises(EngineError):
                await late

    asyncio.run(asyncio.wait_for(talk(), 60))
    assert not service.close(60.0), "two answers did not finish"
