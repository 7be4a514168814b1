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

from tests.server.scripted import ScriptedService, call, served
from tests.server.test_tools import ARGUMENTS, CALL, THOUGHT
from tests.text.test_deepseek_v4 import v4_folder
from tiercel.server.options import ServerOptions
from tiercel.server.responses import ResponsesRequest
from tiercel.text.text import Text

HOME = Path(sys.prefix) / "clients" / "ai_sdk"
TESTS = Path(__file__).parents[1] / "ai_sdk"
RECORDED: list[dict[str, Any]] = json.loads((TESTS / "recorded.json").read_text())
TASKS = {each["task"]: each["requests"] for each in RECORDED}
STRICT = ServerOptions(loopback=True, strict=True)


class Assistant(ScriptedService):
    """Calls two tools where there are some, and answers in words where it was told what came of it."""

    async def submit(self, ask, put):
        told = b"".join(map(self.text.piece_bytes, ask.prompt)).decode()
        if "<tool_result>" in told.rpartition("<｜User｜>")[2]:
            self.script = ("Done", ".", "</think>", "Warm", ".")
        elif "weather" in told:
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
        if task != "generateObject"
        for index in range(len(bodies))
    ],
)
def test_what_it_sends_is_answered(text: Text, task: str, index: int) -> None:
    service = Assistant(text=text)
    response = call("POST", "/v1/responses", service, STRICT, json=TASKS[task][index])
    assert response.status_code == 200, response.text
    told = b"".join(map(text.piece_bytes, service.ask.prompt)).decode()
    assert "Weather?" in told
    assert ("<tool_result>noon</tool_result>" in told) is (index == 1)


def test_an_object_is_asked_for_by_its_schema() -> None:
    (body,) = TASKS["generateObject"]
    (asked,) = (ResponsesRequest.model_validate(body).translated().fields["response_format"],)
    assert asked["type"] == "json_schema"
    assert asked["json_schema"] | {"schema": 0} == {"name": "response", "strict": True, "schema": 0}
    assert asked["json_schema"]["schema"]["required"] == ["city", "days"]


@pytest.mark.skipif(
    not (HOME / "installed").exists() or shutil.which("node") is None,
    reason="tests/install-clients.sh did not install the AI SDK",
)
def test_the_sdk_itself_understands_the_answers(text: Text) -> None:
    script = (TESTS / "talk.mjs").read_text()
    with served(Assistant(text=text), STRICT) as url:
        command = ["node", "--input-type=module", "--eval", script, "--", f"{url}/v1"]
        ran = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    tasks = {task["name"]: task for task in json.loads(ran.stdout)}
    outcomes = {name: task["outcome"] for name, task in tasks.items()}
    calls = [{"toolName": "weather", "input": ARGUMENTS}, {"toolName": "clock", "input": {}}]

    assert outcomes["generateText"]["text"] == outcomes["streamText"]["text"] == "Hello world"
    assert outcomes["generateText"]["usage"]["outputTokenDetails"] == {"textTokens": 2, "reasoningTokens": 4}
    assert outcomes["streamText"]["pieces"] == 2
    assert outcomes["streamText"]["reasoningText"] == "I ask."
    for name in ("tools", "streamTools"):
        assert outcomes[name]["calls"] == calls
        assert (outcomes[name]["text"], outcomes[name]["finishReason"]) == ("Warm.", "stop")

    sent = [
        {"task": name, "requests": [each["body"] for each in task["sent"]]} for name, task in tasks.items()
    ]
    assert _without_ids(sent) == _without_ids(RECORDED)


def _without_ids(recorded: Any) -> Any:
    return json.loads(re.sub(r'"(call|msg|rs|fc)_[0-9a-f]+"', r'"\1"', json.dumps(recorded)))
