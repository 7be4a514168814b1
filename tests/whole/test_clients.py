"""Goal: clients of the field work unmodified. Method: SGLang's router, guidellm, litellm and the official
clients talk to a real server (tests/install-clients.sh installs them); what SGLang's own benchmarks send is
replayed."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tests.server.recorded import CHAT, COMPLETIONS, GENERATE
from tests.server.scripted import ScriptedService, served
from tests.servers import free_port
from tests.whole.process import running
from tiercel.server.options import ServerOptions

HOME = Path(sys.prefix) / "clients"
TEXT = "Record: access window. " * 12
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def installed():
    assert (HOME / "installed").exists(), "the clients are not installed: run tests/install-clients.sh"


@pytest.fixture(scope="module")
def server():
    names = ("--served-model-name", "tiny-v4", "--served-model-name", "gpt-4")
    with running("--device-memory", "24MiB", "--host-memory", "128MiB", *names) as own:
        yield own


def environment(**more: str) -> dict[str, str]:
    """Of a client: its own packages, and nothing from the network."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return own | {"HF_HUB_OFFLINE": "1"} | more


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def router_of(*options: str, servers: int):
    """SGLang's router before `servers` servers; its address."""
    port, metrics_port = free_ports(2)
    command = [HOME / "bin/python", "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", port, "--prometheus-port", metrics_port, *options]
    url, told = f"http://127.0.0.1:{port}", ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        try:
            # It registers each server as a workflow of several steps, of which this is the last line.
            while "Workflow completed" not in told or httpx.get(f"{url}/workers").json()["total"] < servers:
                line = process.stdout.readline()
                assert line, f"the router ended: {told}"
                told += line
            threading.Thread(target=process.stdout.read).start()  # it would wait if nobody read
            yield url
        finally:
            process.terminate()


LONG = " ".join(f"The number {i} comes before the number {i + 1}." for i in range(60))

CALLS = {
    GENERATE: {"text": TEXT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
    COMPLETIONS: {"model": "tiny-v4", "prompt": TEXT, "max_tokens": 8, "temperature": 0},
    CHAT: {"model": "tiny-v4", "messages": MESSAGES, "max_tokens": 8, "temperature": 0},
}


def text_of(path: str, answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, done = _events(answer)
        assert done == "[DONE]"
    else:
        events = [answer.json()]
    if path == GENERATE:
        return events[-1]["text"]  # every event holds all text so far
    choices = [event["choices"][0] for event in events]
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join((choice.get("message") or choice["delta"]).get("content", "") for choice in choices)


def answered(url: str, path: str) -> float:
    """How many such calls a server has answered."""
    page = httpx.get(f"{url}/metrics").text
    return sum(
        float(count) for count in re.findall(rf'requests_total{{call="{path}",status="200"}} (\S+)', page)
    )


@pytest.mark.usefixtures("installed")
def test_through_sglangs_router_answers_are_the_same(server):
    with (
        running("--device-memory", "24MiB", "--host-memory", "128MiB") as other,
        router_of("--worker-urls", server.url, other.url, "--policy", "round_robin", servers=2) as url,
    ):
        for path, body in CALLS.items():
            direct = text_of(path, httpx.post(server.url + path, json=body, timeout=120))
            before = [answered(each, path) for each in (server.url, other.url)]
            for stream in (False, True):
                for _ in range(2):  # one for each server
                    answer = httpx.post(url + path, json=body | {"stream": stream}, timeout=120)
                    assert text_of(path, answer) == direct != ""
            after = [answered(each, path) for each in (server.url, other.url)]
            assert after == [count + 2 for count in before]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.chat.completions.create(**CALLS[CHAT], stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == direct
        assert httpx.get(f"{url}/get_model_info").json() == httpx.get(f"{server.url}/get_model_info").json()
        assert [each["load"] for each in httpx.get(f"{url}/get_loads").json()["workers"]] == [0, 0]
        assert httpx.get(f"{url}/engine_metrics").text.count("tiercel_queue_tokens{worker_addr=") == 2
        flushed = httpx.post(f"{url}/flush_cache").json()
        assert (flushed["status"], flushed["workers_flushed"]) == ("success", 2)


@pytest.mark.usefixtures("installed")
def test_through_sglangs_router_one_server_computes_prompts_for_two_others(server):
    """In its PD mode. Prompts are longer than a page: their pages come from the first server."""
    port = free_port()
    memory = ("--device-memory", "24MiB", "--host-memory", "64MiB", "--share-key", "a key for tests")
    read = (*memory, "--role", "decode", "--peer", f"peer://127.0.0.1:{port}")
    messages = [{"role": "user", "content": LONG}]
    calls = {path: dict(body) for path, body in CALLS.items()}
    calls[GENERATE]["text"] = calls[COMPLETIONS]["prompt"] = LONG
    calls[CHAT]["messages"] = messages
    with (
        running(*memory, "--role", "prefill", "--share-pages", f"127.0.0.1:{port}") as first,
        running(*read) as second,
        running(*read) as third,
        router_of(
            *("--pd-disaggregation", "--prefill", first.url, str(port), "--decode", second.url),
            *("--decode", third.url, "--decode-policy", "round_robin"),
            servers=3,
        ) as url,
    ):
        for path, body in calls.items():
            direct = text_of(path, httpx.post(server.url + path, json=body, timeout=120))
            for stream in (False, True):
                for _ in range(2):
                    answer = httpx.post(url + path, json=body | {"stream": stream}, timeout=120)
                    assert text_of(path, answer) == direct != ""
        for each in (second, third):
            stats = httpx.get(f"{each.url}/v1/cache/stats", timeout=30).json()
            assert stats["engine"]["prompts_elsewhere"] == 6
            assert stats["counters"]["tokens_store"] > 0


@pytest.mark.usefixtures("installed")
def test_sglangs_router_names_the_server_that_computes_a_prompt():
    """In its PD mode both servers get the same request, and the client the answer of the second. Here the
    router was told no port."""
    own = ServerOptions(loopback=True, strict=True, pages_address="127.0.0.1:9001")
    other = ServerOptions(loopback=True, strict=True, prefillers=("127.0.0.1:9001",))
    prefill, decode = ScriptedService(script=("Hello",)), ScriptedService()
    with served(prefill, own) as first, served(decode, other) as second:
        pair = ("--pd-disaggregation", "--prefill", first, "none", "--decode", second, "--disable-retries")
        with router_of(*pair, servers=2) as url:
            for path, body in CALLS.items():
                for stream in (False, True):
                    body |= {"stream": stream} | ({} if path == GENERATE else {"model": "scripted"})
                    assert text_of(path, httpx.post(url + path, json=body, timeout=60)) == "Hello world!"
    assert len(prefill.asks) == len(decode.asks) == 6
    named = [ask.prefiller for ask in decode.asks]
    assert named == [ask.prefiller for ask in prefill.asks]
    assert {(each.host, each.port) for each in named} == {("127.0.0.1", 9001)}
    assert len({each.room for each in named}) == 6


@pytest.mark.usefixtures("installed")
def test_guidellm_measures_a_server(server, tmp_path):
    report = tmp_path / "report.json"
    tokenizer = httpx.get(f"{server.url}/model_info").json()["tokenizer_path"]
    command = [HOME / "bin/guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={server.url},request_format={CHAT}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    command += ["--output", f"kind=json,path={report}"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=environment(GUIDELLM__MAX_WORKER_PROCESSES="1"),
    )
    assert ran.returncode == 0, ran.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (6, [], [])
    for request in requests["successful"]:
        assert request["output_tokens"] == 8
        assert request["output_tokens_per_iteration"] == 1  # from the usage of each piece


LITELLM = """
import sys, litellm
ask = dict(model="openai/tiny-v4", api_base=sys.argv[1], api_key="none", max_tokens=8, temperature=0)
messages = [{"role": "user", "content": sys.argv[2]}]
first = litellm.completion(messages=messages, **ask)
messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And now?"}]
second = litellm.completion(messages=messages, **ask)
assert None in messages[1].values()
print(second.usage.prompt_tokens_details.cached_tokens)
"""


@pytest.mark.usefixtures("installed")
def test_litellm_sends_its_answer_back_with_all_its_nulls(server):
    command = [HOME / "bin/python", "-c", LITELLM, f"{server.url}/v1", TEXT * 2]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 128


OFFICIAL = """
import sys, anthropic, openai
ours = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
theirs = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
ask = dict(model="tiny-v4", input=sys.argv[2], max_output_tokens=8, temperature=0)
events = list(ours.responses.create(**ask, stream=True))
words = "".join(event.delta for event in events if event.type == "response.output_text.delta")
assert events[-1].response.output_text == words
assert ours.responses.create(**ask).usage.input_tokens_details.cached_tokens >= 128
text = {"type": "text", "text": sys.argv[2], "cache_control": {"type": "ephemeral"}}
messages = [{"role": "user", "content": [text]}]
ask = dict(model="tiny-v4", messages=messages, max_tokens=8, extra_body={"temperature": 0})
with theirs.messages.stream(**ask) as stream:
    said, usage = "".join(stream.text_stream), stream.get_final_message().usage
count = theirs.messages.count_tokens(model="tiny-v4", messages=messages).input_tokens
assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == count
print(said == words, usage.cache_read_input_tokens)
"""


@pytest.mark.usefixtures("installed")
def test_the_clients_of_openai_and_anthropic_find_the_same_prompt_in_the_cache(server):
    """Two calls, one conversation: what the first has computed, the second reads."""
    command = [HOME / "bin/python", "-c", OFFICIAL, server.url, LONG]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert ran.returncode == 0, ran.stderr
    same, cached = ran.stdout.split()
    assert same == "True"
    assert int(cached) >= 128


def test_a_client_finds_the_tokenizer_where_the_server_says(server):
    info = httpx.get(f"{server.url}/get_model_info").json()
    tokens = AutoTokenizer.from_pretrained(info["tokenizer_path"])(TEXT)["input_ids"]
    ask = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    by_text = httpx.post(f"{server.url}/generate", json=ask | {"text": TEXT}).json()
    by_tokens = httpx.post(f"{server.url}/generate", json=ask | {"input_ids": tokens}).json()
    assert by_text["meta_info"]["prompt_tokens"] == len(tokens)
    assert by_text["output_ids"] == by_tokens["output_ids"]


def test_bench_multiturn_of_sglang_finds_what_its_first_round_cached(server):
    """Both forms of its requests, as it grows a conversation; the model is named by its path."""
    path = httpx.get(f"{server.url}/get_model_info").json()["model_path"]
    page = httpx.get(f"{server.url}/server_info").json()["page_size"]
    httpx.post(f"{server.url}/flush_cache").raise_for_status()

    def chat(messages):
        body = {"model": path, "messages": messages, "max_tokens": 16, "temperature": 0.0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, done = _events(httpx.post(server.url + CHAT, json=body, timeout=120))
        assert done == "[DONE]"
        said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        return said, chunks[-1]["usage"]

    messages = [{"role": "user", "content": TEXT * 3}]
    said, first = chat(messages)
    _, second = chat([*messages, {"role": "assistant", "content": said}, *MESSAGES])
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] // page * page > 0

    def generate(tokens):
        sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, "stream": True, "lora_path": ""}
        body |= {"stream_options": {"include_usage": True}, "return_logprob": False, "logprob_start_len": -1}
        *chunks, done = _events(httpx.post(server.url + GENERATE, json=body, timeout=120))
        assert done == "[DONE]"
        return chunks[-1]

    tokens = list(range(100, 400))
    answer = generate(tokens)
    again = generate([*tokens, *answer["output_ids"], *range(500, 550)])
    assert again["meta_info"]["cached_tokens"] == (len(tokens) + 16 - 1) // page * page


def _events(response: httpx.Response) -> list:
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [*map(json.loads, data[:-1]), data[-1]]


def test_aliases_are_names_of_the_one_model(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [card.id for card in client.models.list()] == ["tiny-v4", "gpt-4"]
        answers = [
            client.completions.create(model=name, prompt=TEXT, max_tokens=4, temperature=0)
            for name in ("tiny-v4", "gpt-4")
        ]
        assert [answer.model for answer in answers] == ["tiny-v4", "gpt-4"]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        with pytest.raises(openai.NotFoundError, match="has the names 'tiny-v4', 'gpt-4'"):
            client.completions.create(model="gpt-5", prompt=TEXT)
