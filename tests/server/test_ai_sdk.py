"""Goal: Vercel's AI SDK works unmodified. Method: its requests were recorded (tests/ai_sdk) and are sent
again; where there is node, the SDK itself talks to a server, and sends what was recorded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import ScriptedService, call, served, talking
from tests.server.test_tools import ARGUMENTS, CALL, THOUGHT
from tests.text.test_deepseek_v4 import v4_folder
from tiercel.asks.ask import Ask
from tiercel.server.calls.responses import ResponsesRequest
from tiercel.server.options import ServerOptions
from tiercel.text.text import Text

HOME = Path(sys.prefix) / "clients" / "ai_sdk"
TESTS = Path(__file__).parents[1] / "ai_sdk"
RECORDED: list[dict[str, Any]] = json.loads((TESTS / "recorded.json").read_text())
TASKS = {each["task"]: each["requests"] for each in RECORDED}
STRICT = ServerOptions(loopback=True, strict=True)


def said_to(text: Text, ask: Ask) -> str:
    return b"".join(map(text.piece_bytes, ask.prompt)).decode()


class Assistant(ScriptedService):
    """Calls two tools where there are some, and answers in words where it was told what came of it."""

    async def submit(self, ask, put):
        told = said_to(self.text, ask)
        last = told.rpartition("<｜User｜>")[2]
        if "<tool_result>" in last:
            self.script = ("Done", ".", "</think>", "Warm", ".")
        elif "weather" in told and "Weather?" in last:
            self.script = (*THOUGHT, "Let me", " see.", *CALL)
        else:
            self.script = (*THOUGHT, "Hello", " world")
        await super().submit(ask, put)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(v4_folder(tmp_path_factory.mktemp("v4") / "model"))


@pytest.mark.parametrize(
    ("task", "index"),
    [
        (task, index)
        for task, bodies in TASKS.items()
        if task not in ("conversation", "generateObject", "outputObject")
        for index in range(len(bodies))
    ],
)
def test_what_it_sends_is_answered(text: Text, task: str, index: int) -> None:
    service = Assistant(text=text)
    response = call("POST", "/v1/responses", service, STRICT, json=TASKS[task][index])
    assert response.status_code == 200, response.text
    told = said_to(text, service.ask)
    assert "Weather?" in told
    assert ("<tool_result>noon</tool_result>" in told) is (index == 1)


LAST_TURN = (
    "Hello?<｜Assistant｜><think>I ask.</think>Hello world<｜end▁of▁sentence｜><｜User｜>Weather?"
    "<｜Assistant｜><think>I ask.</think>Let me see.\n\n<｜DSML｜tool_calls>"
)
"""How the prompt of the conversation's last turn begins."""


def test_its_conversation_refers_to_earlier_answers_by_the_ids_of_their_items(text: Text) -> None:
    """The answers of this server have ids of their own: references are changed to these, in their order."""
    service = Assistant(text=text)
    items: list[str] = []
    ids: dict[str, str] = {}
    with talking(service, STRICT) as talk:
        for body in TASKS["conversation"]:
            for item in body["input"]:
                if item.get("type") == "item_reference":
                    recorded = item["id"]
                    if recorded not in ids:
                        ids[recorded] = items.pop(0)
                        assert recorded[:3] == ids[recorded][:3]
            named = json.dumps(body)
            for recorded, own in ids.items():
                named = named.replace(recorded, own)
            response = talk("POST", "/v1/responses", json=json.loads(named))
            assert response.status_code == 200, response.text
            items += [item["id"] for item in response.json()["output"] if item["type"] != "function_call"]
    assert len(ids) == 6
    told = said_to(text, service.asks[-1])
    assert told.partition("<｜User｜>")[2].startswith(LAST_TURN)
    assert told.endswith("</think>Warm.<｜end▁of▁sentence｜><｜User｜>Thanks<｜Assistant｜><think>")


@pytest.mark.parametrize("task", ["generateObject", "outputObject"])
def test_an_object_is_asked_for_by_its_schema(task: str) -> None:
    (body,) = TASKS[task]
    (asked,) = (ResponsesRequest.model_validate(body).translated().fields["response_format"],)
    assert asked["type"] == "json_schema"
    assert asked["json_schema"] | {"schema": 0} == {"name": "response", "strict": True, "schema": 0}
    assert asked["json_schema"]["schema"]["required"] == ["name", "days", "sky"]


needs_sdk = pytest.mark.skipif(
    not (HOME / "installed").exists() or shutil.which("node") is None,
    reason="tests/install-clients.sh did not install the AI SDK",
)


def talked(url: str, model: str, *tasks: str) -> dict[str, Any]:
    """What came of each task, and what the SDK sent."""
    script = (TESTS / "talk.mjs").read_text()
    command = ["node", "--input-type=module", "--eval", script, "--", f"{url}/v1", model, *tasks]
    ran = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return {task["name"]: task for task in json.loads(ran.stdout)}


@needs_sdk
def test_the_sdk_itself_understands_the_answers(text: Text) -> None:
    service = Assistant(text=text)
    with served(service, STRICT) as url:
        tasks = talked(url, "scripted")
    outcomes = {name: task["outcome"] for name, task in tasks.items()}
    calls = [{"toolName": "weather", "input": ARGUMENTS}, {"toolName": "clock", "input": {}}]

    assert outcomes["generateText"]["text"] == outcomes["streamText"]["text"] == "Hello world"
    assert outcomes["generateText"]["usage"]["outputTokenDetails"] == {"textTokens": 2, "reasoningTokens": 4}
    assert outcomes["streamText"]["pieces"] == 2
    assert outcomes["streamText"]["reasoningText"] == "I ask."
    for name in ("tools", "streamTools"):
        assert outcomes[name]["calls"] == calls
        assert (outcomes[name]["text"], outcomes[name]["finishReason"]) == ("Warm.", "stop")
    assert outcomes["conversation"]["text"] == "Hello world | Warm. | Hello world"
    assert outcomes["conversation"]["calls"] == calls
    (thanked,) = [told for ask in service.asks if "Thanks" in (told := said_to(text, ask))]
    assert thanked.partition("<｜User｜>")[2].startswith(LAST_TURN)

    sent = [
        {"task": name, "requests": [each["body"] for each in task["sent"]]} for name, task in tasks.items()
    ]
    assert _without_ids(sent) == _without_ids(RECORDED)


def _without_ids(recorded: Any) -> Any:
    return json.loads(re.sub(r'"(call|msg|rs|fc)_[0-9a-f]+"', r'"\1"', json.dumps(recorded)))
