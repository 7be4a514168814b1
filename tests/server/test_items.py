"""Goal: later requests of `/v1/responses` may refer to earlier answers, and only to one's own. Method: the
memory alone, filled to its limit; then conversations with a server, by references and by response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.scripted import LOOPBACK, ScriptedService, served, talking
from tests.server.test_responses import named_events
from tests.server.test_tenants import table
from tests.server.test_tools import CALL, THOUGHT, service_of
from tests.text.test_deepseek_v4 import v4_folder
from tiercel.server.calls.items import TURN_BYTES, Items, Turn, Whose
from tiercel.server.http.tenants import Tenants
from tiercel.server.options import ServerOptions
from tiercel.text.text import Text

PATH = "/v1/responses"
ANN, BOB = Whose("ann", ""), Whose("bob", "")


def turn(*said: str, before: str | None = None, size: int = 0) -> Turn:
    return Turn(before, b"x" * size, {each: each.encode() for each in said})


# The memory alone


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    items = Items(3 * turn("1").size)
    for name in "123":
        items.add(ANN, f"r{name}", turn(name))
    assert items.item(ANN, "1") == b"1"
    items.add(ANN, "r4", turn("4"))
    assert [items.item(ANN, name) is not None for name in "1234"] == [True, False, True, True]
    assert items.bytes_used == items.bytes_max
    assert items.turns(ANN, "r2") is None and items.turns(ANN, "r1") is not None


def test_who_has_most_makes_room_for_others() -> None:
    items = Items(10 * TURN_BYTES)
    items.add(BOB, "r", turn("bob's"))
    for number in range(50):
        items.add(ANN, f"r{number}", turn(f"ann's {number}"))
    assert items.item(BOB, "bob's") is not None
    assert items.item(ANN, "ann's 49") is not None and items.item(ANN, "ann's 0") is None
    assert items.bytes_used <= items.bytes_max


def test_a_turn_that_is_too_long_is_not_kept_and_leaves_all_others() -> None:
    items = Items(4 * TURN_BYTES)
    items.add(ANN, "r1", turn("1"))
    items.add(ANN, "r2", turn("2", size=4 * TURN_BYTES))
    assert items.item(ANN, "1") is not None and items.item(ANN, "2") is None


def test_a_conversation_is_all_of_its_turns_or_nothing() -> None:
    items = Items(1 << 20)
    items.add(ANN, "r1", turn("1"))
    items.add(ANN, "r2", turn("2", before="r1"))
    items.add(ANN, "r3", turn("3", before="r2"))
    assert [list(each.said) for each in items.turns(ANN, "r3") or ()] == [["1"], ["2"], ["3"]]
    items.add(ANN, "r5", turn("5", before="r4"))
    assert items.turns(ANN, "r5") is None, "r4 is not known"


def test_a_turn_that_continues_itself_is_no_conversation() -> None:
    """A client chooses the ids of its requests."""
    items = Items(1 << 20)
    items.add(ANN, "r1", turn("1"))
    items.add(ANN, "r2", turn("2", before="r1"))
    items.add(ANN, "r1", turn("3", before="r2"))
    assert items.turns(ANN, "r2") is None
    assert items.item(ANN, "1") is None and items.item(ANN, "3") == b"3"
    assert items.bytes_used == turn("1").size * 2


# Conversations with a server


def asked(talk: Any, *items: Any, key: str = "", status: int = 200, **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = talk("POST", PATH, json={"input": list(items)} | body, headers=headers)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reference(answer: dict[str, Any], index: int = -1) -> dict[str, Any]:
    return {"type": "item_reference", "id": answer["output"][index]["id"]}


def prompts_of(service: ScriptedService) -> list[str]:
    return [service.text.decode(ask.prompt) for ask in service.asks]


def test_a_reference_is_the_item_itself() -> None:
    service = ScriptedService()
    with talking(service) as talk:
        first = asked(talk, user("a"))
        asked(talk, user("a"), reference(first), user("b"))
        asked(talk, user("a"), {"role": "assistant", "content": "Hello world!"}, user("b"), store=False)
    _, referred, sent = prompts_of(service)
    assert referred == sent == "user:a\nassistant:Hello world!\nuser:b\nassistant:"


def test_a_streamed_answer_can_be_referred_to_when_its_last_event_is_there() -> None:
    service = ScriptedService()
    with talking(service) as talk:
        body = {"input": "a", "stream": True, "top_logprobs": 1, "model": "scripted"}
        _, last = named_events(talk("POST", PATH, json=body))[-1]
        assert last["response"]["store"] is True
        asked(talk, reference(last["response"]), user("b"))
    assert prompts_of(service)[1] == "assistant:Hello world!\nuser:b\nassistant:"


def test_a_conversation_goes_on_after_a_response() -> None:
    service = ScriptedService()
    with talking(service) as talk:
        first = asked(talk, user("a"), instructions="only here")
        second = asked(talk, reference(first), user("b"), previous_response_id=first["id"])
        third = asked(talk, user("c"), previous_response_id=second["id"], store=False)
        assert (second["previous_response_id"], third["store"]) == (first["id"], False)
        refused = asked(talk, user("d"), previous_response_id=third["id"], status=400)
    said = "assistant:Hello world!\n"
    assert prompts_of(service)[2] == f"user:a\n{said}{said}user:b\n{said}user:c\nassistant:"
    assert refused["error"]["message"] == f"Previous response with id '{third['id']}' not found."
    assert refused["error"]["param"] == "previous_response_id"
    assert refused["error"]["code"] == "previous_response_not_found"


def test_an_item_that_is_not_known_is_told_as_openai_does() -> None:
    with talking(ScriptedService()) as talk:
        unkept = asked(talk, user("a"), store=False)
        for wanted in (reference(unkept), {"type": "item_reference", "id": "rs_1"}):
            error = asked(talk, wanted, user("b"), status=404)["error"]
            assert error["message"].startswith(f"Item with id '{wanted['id']}' not found.")
            assert (error["param"], error["type"]) == ("input", "invalid_request_error")
    with talking(ScriptedService(), ServerOptions(loopback=True, items_bytes_max=0)) as talk:
        unkept = asked(talk, user("a"))
        assert unkept["store"] is False
        asked(talk, reference(unkept), status=404)


def test_nobody_finds_what_was_said_to_another(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("ann") + table("bob"))
    options = ServerOptions(tenants=Tenants(path), api_key=("own",))
    with talking(ScriptedService(), options) as talk:
        to_ann = asked(talk, user("a"), key="ann")
        salted = asked(talk, user("a"), key="ann", cache_salt="s")
        asked(talk, reference(to_ann), key="ann")
        asked(talk, user("b"), key="ann", previous_response_id=to_ann["id"])
        asked(talk, reference(salted), key="ann", cache_salt="s")
        for key, answer, salt in (
            ("bob", to_ann, None),
            ("own", to_ann, None),
            ("ann", to_ann, "s"),
            ("ann", salted, None),
            ("bob", salted, "s"),
        ):
            asked(talk, reference(answer), key=key, cache_salt=salt, status=404)
            body = {"cache_salt": salt, "previous_response_id": answer["id"]}
            asked(talk, user("b"), key=key, **body, status=400)


def test_a_request_can_not_become_longer_than_a_body_by_references() -> None:
    options = ServerOptions(loopback=True, body_bytes_max=4000)
    with talking(ScriptedService(script=("Hello",) * 100), options) as talk:
        first = asked(talk, user("a"))
        error = asked(talk, *[reference(first)] * 20, status=413)["error"]
        assert error["message"] == "what the request refers to is longer than 4,000 B"


def test_openais_client_holds_a_conversation_with_a_tool_by_response(tmp_path: Path) -> None:
    text = Text(v4_folder(tmp_path / "model"))
    service = service_of(text, *THOUGHT, "Let me", " see.", *CALL)
    tools: Any = [{"type": "function", "name": name, "parameters": None} for name in ("weather", "clock")]
    with (
        served(service, LOOPBACK) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        first = client.responses.create(model="scripted", input="Weather?", tools=tools)
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "warm"}
            for item in first.output
            if item.type == "function_call"
        ]
        service.script = ("So.", "</think>", "Warm.")
        second = client.responses.create(
            model="scripted", input=results, tools=tools, previous_response_id=first.id
        )
        third = client.responses.create(
            model="scripted", input="Thanks", tools=tools, previous_response_id=second.id
        )
        assert third.previous_response_id == second.id
        with pytest.raises(openai.NotFoundError) as refused:
            wanted: Any = [{"type": "item_reference", "id": "msg_1"}]
            client.responses.create(model="scripted", input=wanted)
        assert refused.value.param == "input"
    said = b"".join(map(text.piece_bytes, service.asks[-1].prompt)).decode()
    assert "<think>I ask.</think>Let me see.\n\n<｜DSML｜tool_calls>" in said
    assert "<tool_result>warm</tool_result>\n\n<tool_result>warm</tool_result>" in said
    assert said.endswith("Warm.<｜end▁of▁sentence｜><｜User｜>Thanks<｜Assistant｜><think>")
