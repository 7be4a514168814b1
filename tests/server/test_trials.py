"""Goal: each owner has one trial at a time, and what a trial said is remembered. Method: a process that is
not one, whose answers the test writes."""

from __future__ import annotations

import asyncio
import json
import select
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.server.scripted import ScriptedService, ScriptedText, client_of, post, served
from tests.wait import until
from tiercel.asks.ask import Finish
from tiercel.errors import QueueFull
from tiercel.server import listen
from tiercel.server.calls import trials
from tiercel.server.calls.trials import Outcome, Trials
from tiercel.server.http.errors import ApiError
from tiercel.text.grammar import Grammar, Grammars
from tiercel.text.trial import receive, send, source_of


class Scripted:
    """Trials that wait for the test."""

    def __init__(self):
        self.alive, self.begun = True, []

    def hand_over(self, connection):
        self.begun.append(connection.dup())

    def recipe(self, number):
        return json.loads(receive(self.begun[number]))

    def tell(self, number, **told):
        """What a trial says; without an argument, the source."""
        recipe = self.recipe(number)
        send(self.begun[number], json.dumps(told or {"source": source_of(recipe), "bytes": 5}).encode())
        self.begun[number].close()


@pytest.fixture
def process(monkeypatch):
    own = Scripted()
    monkeypatch.setattr(trials, "TrialProcess", lambda _: own)
    yield own
    for each in own.begun:
        each.close()


@contextmanager
def opened(grammars=None):
    yield Trials(grammars or Grammars(ScriptedText()), asyncio.to_thread)


def choice(*texts):
    return {"make": "choice", "given": [texts], "how": {}}


def source(text):
    return source_of(choice(text))


async def count(process, number):
    """Wait for `number` trials that each know what to try."""
    async with asyncio.timeout(30):
        while len(process.begun) < number or not select.select(process.begun[number - 1 :], (), (), 0)[0]:
            await asyncio.sleep(0.001)


def test_an_outcome_is_remembered_good_or_bad(process):
    async def talk(own):
        first = asyncio.create_task(own.grammar(choice("a"), "me"))
        await count(process, 1)
        process.tell(0)
        outcome, compiled = await first
        assert (outcome, compiled is not None) == (Outcome(source("a"), 5), True)
        assert await own.grammar(choice("a"), "you") == (outcome, compiled)
        second = asyncio.create_task(own.grammar(choice("b"), "me"))
        await count(process, 2)
        process.tell(1, error="no", part=3)
        assert await second == await own.grammar(choice("b"), "you") == (Outcome(error="no", part=3), None)

    with opened() as own:
        asyncio.run(talk(own))
    assert len(process.begun) == 2


def test_an_owner_has_one_trial_at_a_time_and_others_do_not_wait_for_it(process):
    async def talk(own):
        mine = [asyncio.create_task(own.grammar(choice(text), "me")) for text in "ab"]
        await count(process, 1)
        yours = asyncio.create_task(own.grammar(choice("c"), "you"))
        await count(process, 2)
        process.tell(1)
        assert (await yours)[0].source == source("c")
        assert len(process.begun) == 2
        process.tell(0)
        await count(process, 3)
        process.tell(2)
        assert [each.source for each, _ in await asyncio.gather(*mine)] == [source("a"), source("b")]

    with opened() as own:
        asyncio.run(talk(own))


def test_too_many_of_one_owner_are_refused(process, monkeypatch):
    monkeypatch.setattr(trials, "WAITING_MOST", 2)

    async def talk(own):
        mine = [asyncio.create_task(own.grammar(choice(text), "me")) for text in "ab"]
        await count(process, 1)
        with pytest.raises(QueueFull):
            await own.grammar(choice("c"), "me")
        for each in mine:
            each.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

    with opened() as own:
        asyncio.run(talk(own))


def test_a_trial_that_nobody_waits_for_is_ended_and_the_next_has_its_turn(process):
    async def talk(own):
        left = asyncio.create_task(own.grammar(choice("a"), "me"))
        await count(process, 1)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        stayed = asyncio.create_task(own.grammar(choice("b"), "me"))
        await count(process, 2)
        receive(process.begun[0])
        assert process.begun[0].recv(1) == b""
        process.tell(1)
        assert (await stayed)[0].source == source("b")

    with opened() as own:
        asyncio.run(talk(own))


def test_a_trial_without_an_answer_fails_one_request_and_is_not_remembered(process, monkeypatch):
    async def talk(own):
        for number in range(2):
            asked = asyncio.create_task(own.grammar(choice("a"), "me"))
            await count(process, number + 1)
            process.begun[number].close()
            with pytest.raises(ApiError) as caught:
                await asked
            assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
        monkeypatch.setattr(trials, "DEADLINE_S", 0.0)
        with pytest.raises(ApiError, match="within 0 s"):
            await own.grammar(choice("a"), "me")

    with opened() as own:
        asyncio.run(talk(own))


def test_a_process_that_has_ended_is_started_again(process, monkeypatch):
    started = []
    monkeypatch.setattr(trials, "TrialProcess", lambda _: started.append(process) or process)

    async def talk(own):
        for number in range(2):
            asked = asyncio.create_task(own.grammar(choice(str(number)), "me"))
            await count(process, number + 1)
            process.tell(number)
            await asked
            process.alive = False

    with opened() as own:
        asyncio.run(talk(own))
    assert len(started) == 2


def test_after_slow_masks_their_owner_waits_before_new_grammars_and_the_grammar_is_refused(process):
    now = [100.0]
    grammars = Grammars(ScriptedText(), lambda: now[0])

    async def talk(own):
        asked = asyncio.create_task(own.grammar(choice("a"), "me"))
        await count(process, 1)
        process.tell(0)
        await asked
        matcher = grammars.matcher(Grammar(source("a"), owner="me"), frozenset())
        matcher.time.add(1.0)
        outcome, compiled = await own.grammar(choice("a"), "you")
        assert compiled is None and "take too long" in outcome.error
        with pytest.raises(ApiError, match="no new grammar now; try again in 10 s") as caught:
            await own.grammar(choice("b"), "me")
        assert caught.value.status == 429
        now[0] += 11
        asked = asyncio.create_task(own.grammar(choice("b"), "me"))
        await count(process, 2)
        process.tell(1)
        assert (await asked)[1] is not None

    with opened(grammars) as own:
        asyncio.run(talk(own))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (["x" * 200_000], "longer than 131,072 B"),
        ([["x"] * 100] * 10_000, "longer than 131,072 B"),
        ([{"name" * 100: 1}] * 1000, "longer than 131,072 B"),
    ],
    ids=["text", "list", "names"],
)
def test_what_must_become_too_long_is_not_tried(process, value, why):
    async def talk(own):
        return await own.grammar({"make": "json", "given": value, "how": {}}, "me")

    with opened() as own:
        outcome, _ = asyncio.run(talk(own))
    assert why in outcome.error and not process.begun


def test_a_call_waits_for_its_trial_in_no_thread_that_serves_calls(process):
    """More trials than threads wait, and another call is answered."""

    async def talk():
        service = ScriptedService()
        async with client_of(service) as client:
            held = [
                asyncio.create_task(client.post("/v1/completions", json={"prompt": "one", "regex": f"a{i}"}))
                for i in range(8)
            ]
            await count(process, 1)
            assert (await client.post("/v1/completions", json={"prompt": "one"})).status_code == 200
            for each in held:
                each.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    asyncio.run(talk())


def test_the_answer_of_a_grammar_that_can_not_be_followed_is_a_400():
    response = post("/v1/completions", ScriptedService(end=Finish.GRAMMAR), prompt="one")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_grammar")


def test_a_server_that_ends_answers_the_request_whose_grammar_is_tried(process, monkeypatch):
    """The trial says nothing in the time that the server has."""
    monkeypatch.setattr(listen, "FAREWELL_S", 0.1)
    with ThreadPoolExecutor(1) as clients:
        with served(ScriptedService()) as url:
            body = {"prompt": "one", "regex": "a"}
            asked = clients.submit(httpx.post, f"{url}/v1/completions", json=body)
            until(lambda: process.begun, "its trial is under way")
        answer = asked.result(30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
