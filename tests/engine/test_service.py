"""Goal: an engine behind a thread serves an event loop, and nobody who leaves takes others along. Method: the
embedded model; asks that are cancelled in every phase, names used twice, and the end."""

import asyncio
import socket
from dataclasses import replace

import pytest

from tests.engine.drive import PAGE, deltas_of, make_ask, make_engine, words
from tiercel.asks.ask import Finish, Prefiller
from tiercel.engine.service import EngineService
from tiercel.errors import AskError, QueueFull


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def engine(request):
    return make_engine(host_pages=100, overlap=request.param, waiting_max=4)


def serve(engine, talk):
    """Run a coroutine function on a service, and look whether anything is left behind."""
    service = EngineService(engine, "tiny-v4")
    try:
        return asyncio.run(talk(service))
    finally:
        service.close(10.0)
        assert not engine.tasks and len(engine.scheduler.free_rings) == engine.config.running_max


async def listen(service, ask):
    return [delta async for delta in deltas_of(service, ask)]


def test_many_answers_come_at_once(engine):
    async def talk(service):
        return await asyncio.gather(*(listen(service, make_ask(str(i), words(20 + i), 6)) for i in range(4)))

    for deltas in serve(engine, talk):
        assert sum(len(delta.tokens) for delta in deltas) == 6
        assert [delta.finish for delta in deltas][-1] is Finish.LENGTH


def test_who_leaves_before_he_is_let_in_takes_nobody_along(engine):
    async def talk(service):
        long = asyncio.create_task(listen(service, make_ask("long", words(3 * PAGE), 30)))
        await asyncio.sleep(0)
        for i in range(20):
            leaving = asyncio.create_task(listen(service, make_ask(f"gone{i}", words(50), 30)))
            for _ in range(i % 4):
                await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        assert service.ready
        return await long

    assert serve(engine, talk)[-1].finish is Finish.LENGTH


def test_who_leaves_in_the_middle_is_aborted(engine):
    async def talk(service):
        answer = deltas_of(service, make_ask("a", words(20), 5000))
        await anext(answer)
        await answer.aclose()
        while (await service.stats()).queue.running:
            await asyncio.sleep(0)

    serve(engine, talk)
    assert engine.counters["finished_abort"] == 1


def test_a_name_used_twice_is_refused_and_the_first_goes_on(engine):
    async def talk(service):
        first = deltas_of(service, make_ask("a", words(20), 20))
        await anext(first)
        with pytest.raises(AskError, match="in use"):
            await listen(service, make_ask("a", words(20), 20))
        return [delta async for delta in first]

    assert serve(engine, talk)[-1].finish is Finish.LENGTH


def test_a_name_is_free_again_as_soon_as_its_answer_is_closed(engine):
    async def talk(service):
        answer = deltas_of(service, make_ask("a", words(20), 5000))
        await anext(answer)
        for _ in range(10):
            await answer.aclose()
            answer = deltas_of(service, make_ask("a", words(20), 5000))
            await anext(answer)
        leaving = asyncio.create_task(listen(service, make_ask("b", words(3 * PAGE), 30)))
        for turns in range(5):
            for _ in range(turns):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            leaving = asyncio.create_task(listen(service, make_ask("b", words(3 * PAGE), 30)))
        await answer.aclose()
        return await leaving

    assert serve(engine, talk)[-1].finish is Finish.LENGTH


def test_a_full_queue_refuses_and_what_waits_is_served(engine):
    async def talk(service):
        asks = [listen(service, make_ask(str(i), words(400), 4)) for i in range(40)]
        return await asyncio.gather(*asks, return_exceptions=True)

    outcomes = serve(engine, talk)
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert 0 < len(refused) < 40
    assert all(outcome[-1].finish is Finish.LENGTH for outcome in outcomes if isinstance(outcome, list))


def test_a_flush_waits_for_what_is_in_use(engine):
    async def talk(service):
        asking = asyncio.create_task(listen(service, make_ask("a", words(3 * PAGE), 10)))
        await asyncio.sleep(0)
        stayed = await service.flush(30.0)
        await asking
        return stayed

    assert serve(engine, talk) == 0


def test_the_end_aborts_what_does_not_finish_in_time(engine):
    service = EngineService(engine, "tiny-v4")

    async def talk():
        answer = deltas_of(service, make_ask("a", words(20), 5000))
        await anext(answer)
        finished = await asyncio.to_thread(service.close, 0.05)
        return finished, [delta async for delta in answer][-1].finish

    assert asyncio.run(talk()) == (False, Finish.ABORT)
    assert not service.ready
    assert not engine.tasks and len(engine.scheduler.free_rings) == engine.config.running_max


def test_a_prompt_for_another_server_is_not_refused_where_the_queue_is_full(engine):
    """Its answer is empty, and the other server computes: a router would make an error the client's."""
    own, there = ("127.0.0.1", 9001), socket.create_server(("127.0.0.1", 0))
    named = Prefiller(*own, "room")

    async def talk(service):
        service.offer_pages(there, at=own)
        asks = [replace(make_ask(str(i), words(2 * PAGE, i), 9), prefiller=named) for i in range(40)]
        return await asyncio.gather(*(listen(service, ask) for ask in asks))

    drawn = []
    for deltas in serve(engine, talk):
        assert deltas[-1].finish is Finish.LENGTH
        drawn.append(sum(len(delta.tokens) for delta in deltas))
    assert set(drawn) == {0, 1}, "one token at most, whatever was asked for"
