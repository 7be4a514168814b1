"""Goal: what a user starts with one command answers as documented, under load and to its end. Method: a
real server process on the embedded model, the official client, SGLang's calls, 64 clients, signals."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading

import httpx
import openai
import pytest

from tests.terminal import shown_by
from tests.whole.process import Server, running
from tiercel.kernels import native

CHAT = [
    {"role": "system", "content": "You read the records and answer. " * 20},
    {"role": "user", "content": "Which record has the key? " * 20},
]


@pytest.fixture(scope="module")
def server():
    with running("--device-memory", "24MiB", "--host-memory", "128MiB", as_user=True) as own:
        yield own


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as own:
        yield own


def test_the_start_tells_what_was_chosen_and_why(server):
    for word in (
        "tiny-v4",
        "kernels",
        f"native:{native.level()}",
        "exact",
        "share",
        "device tier",
        "host tier",
        "pages",
    ):
        assert word in server.told


def test_the_second_turn_of_a_chat_is_served_from_the_cache(client, server):
    first = client.chat.completions.create(model="tiny-v4", messages=CHAT, max_tokens=40, temperature=0)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    turn = [*CHAT, said, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(model="tiny-v4", messages=turn, max_tokens=5, temperature=0)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 128 * 128 > 0
    told = httpx.get(f"{server.url}/v1/cache/explain/{second.id}").json()
    assert told["reused_tokens"]["device"] == second.usage.prompt_tokens_details.cached_tokens
    assert told["why_not_more"]


def test_a_stream_says_what_the_whole_answer_says(client):
    ask = {"model": "tiny-v4", "messages": CHAT, "max_tokens": 30, "temperature": 0.8, "seed": 7}
    whole = client.chat.completions.create(**ask)
    events = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_async_client_gets_many_answers_at_once(server):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asks = [
                client.completions.create(model="tiny-v4", prompt=f"Number {i}", max_tokens=8, temperature=0)
                for i in range(20)
            ]
            return await asyncio.gather(*asks)

    answers = asyncio.run(ask_all())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for i, answer in enumerate(answers):
            alone = client.completions.create(
                model="tiny-v4", prompt=f"Number {i}", max_tokens=8, temperature=0
            )
            assert answer.choices[0].text == alone.choices[0].text


def test_several_answers_to_one_prompt_share_its_pages(client):
    answers = client.completions.create(
        model="tiny-v4", prompt=list(range(300, 800)), n=4, max_tokens=6, seed=3, temperature=1.0
    )
    assert len({choice.text for choice in answers.choices}) > 1
    assert [choice.index for choice in answers.choices] == [0, 1, 2, 3]


def test_the_native_call_tells_tiers_and_logprobs(server):
    httpx.post(f"{server.url}/flush_cache?timeout=10").raise_for_status()
    body = {
        "input_ids": list(range(500, 900)),
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    cold = httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status().json()
    body |= {"logprob_start_len": -1}
    warm = httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status().json()
    assert cold["meta_info"]["cached_tokens"] == 0 and len(cold["meta_info"]["input_token_logprobs"]) == 400
    assert warm["meta_info"]["cached_tokens"] == 384 == warm["meta_info"]["cached_tokens_details"]["device"]
    assert warm["output_ids"] == cold["output_ids"]
    assert warm["meta_info"]["output_token_logprobs"] == cold["meta_info"]["output_token_logprobs"], (
        "bit by bit"
    )
    prefill = body | {"sampling_params": {"max_new_tokens": 0}}
    none = httpx.post(f"{server.url}/generate", json=prefill, timeout=60).raise_for_status().json()
    assert none["output_ids"] == [] and none["meta_info"]["completion_tokens"] == 0


def test_metrics_count_hits_by_tier_and_bytes_by_stream(server):
    body = {"text": "the sea", "sampling_params": {"max_new_tokens": 1}}
    httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
    page = httpx.get(f"{server.url}/metrics").raise_for_status().text
    for name in (
        'tiercel_hit_tokens_total{tier="device"}',
        'tiercel_cached_bytes{stream="c4",tier="device"}',
        'tiercel_moved_bytes_total{direction="saved",stream="window"}',
        "tiercel_moved_seconds_total",
        "tiercel_queue_running",
        "tiercel_time_to_first_token_seconds_bucket",
    ):
        assert name in page, name


def test_chat_in_the_terminal_shows_what_each_turn_reused(server):
    said = "Tell me of the sea and of the ships. " * 12
    command = [sys.executable, "-m", "tiercel.cli", "chat", "--url", server.url, "--max-tokens", "8"]
    told = subprocess.run(
        command, input=f"{said}\n{said}\n/exit\n", capture_output=True, text=True, timeout=120, check=True
    ).stdout
    turns = [line for line in told.splitlines() if "tokens cached" in line]
    assert len(turns) == 2 and turns[0].startswith("0 of") and not turns[1].startswith("0 of")
    assert "first token after" in turns[0]


# Load


ASKS_EACH = int(os.environ.get("TIERCEL_ASKS_EACH", "5"))
CLIENTS, KINDS = 64, 260
"""260 different asks: everything below repeats with a divisor of it."""


def load_prompt(number):
    """Of a few beginnings, each continued in many ways; short ones and long ones."""
    dice = random.Random(number % 20)
    begin = [300 + (number % 5) * 50 + i % 40 for i in range(dice.choice((10, 150, 400)))]
    return begin + [dice.randrange(200, 4000) for _ in range(dice.choice((3, 60, 300)))]


def load_body(number):
    seeded = {"temperature": 1.0, "seed": number % 20, "top_p": 0.95} if number % 2 else {"temperature": 0}
    return {"model": "tiny-v4", "prompt": load_prompt(number), "max_tokens": 3 + number % 13, **seeded}


def test_64_clients_with_aborts_leave_nothing_behind_and_change_no_answer(server):
    """`make soak` has each client ask for minutes."""
    answers, errors, aborted, lock = {}, [], [0], threading.Lock()

    async def ask(client, number):
        body = load_body(number)
        if number % 7 == 3:  # leave in the middle of a stream
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                async for _ in response.aiter_lines():
                    break
            aborted[0] += 1
            return
        response = await client.post("/v1/completions", json=body)
        if response.status_code == 429:
            return
        assert response.status_code == 200, response.text
        text = response.json()["choices"][0]["text"]
        with lock:
            answers.setdefault(number % KINDS, set()).add(text)

    async def one(client, first):
        for number in range(first, first + ASKS_EACH * (CLIENTS + 1), CLIENTS + 1):
            try:
                await ask(client, number)
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                errors.append(repr(error))

    async def everyone():
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(one(client, i) for i in range(CLIENTS)))

    asyncio.run(everyone())
    assert not errors, errors[:3]
    assert aborted[0] > 10 and len(answers) > 100
    assert sum(map(len, answers.values())) == len(answers), "the same ask, the same answer"
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number in random.Random(1).sample(sorted(answers), 25):  # a quiet run
            quiet = client.post("/v1/completions", json=load_body(number)).json()["choices"][0]["text"]
            assert answers[number] == {quiet}, number
        client.post("/flush_cache?timeout=30").raise_for_status()
        stats = client.get("/v1/cache/stats").json()
    assert all(pool["free"] == pool["capacity"] for pool in stats["pools"].values()), stats["pools"]
    assert not any(stats["queue"].values()), stats["queue"]


# Ends


def test_a_signal_lets_a_running_answer_finish():
    server = Server("--shutdown-s", "30")
    said = {}

    def ask():
        body = {"model": "tiny-v4", "prompt": [300, 301], "max_tokens": 150, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        lines = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()
        said["last"] = [line for line in lines if line][-1]
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        said["tokens"] = pieces[-1]["usage"]["completion_tokens"]

    begun = threading.Event()
    asking = threading.Thread(target=ask)
    asking.start()
    begun.wait(30)
    code, rest = server.stop()
    asking.join(30)
    assert code == 0 and "Traceback" not in rest, rest
    assert said["last"] == "data: [DONE]" and said["tokens"] == 150


def test_a_deadline_ends_what_would_take_too_long_and_says_so():
    server = Server("--shutdown-s", "1", "--device-memory", "64MiB")
    begun = threading.Event()
    said = {}
    body = {"model": "tiny-v4", "prompt": [300], "max_tokens": 16_000, "ignore_eos": True}

    def ask_stream():
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
        ) as response:
            for line in response.iter_lines():
                begun.set()
                said["stream"] = line or said["stream"]

    def ask_whole():
        said["whole"] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    asking = [threading.Thread(target=each) for each in (ask_whole, ask_stream)]
    for each in asking:
        each.start()
    assert begun.wait(30)
    while httpx.get(f"{server.url}/v1/cache/stats").json()["queue"]["running"] < 2:
        pass
    code, rest = server.stop()
    for each in asking:
        each.join(30)
    assert code == 0 and "Traceback" not in rest, rest
    assert json.loads(said["stream"].removeprefix("data: "))["error"]["code"] == "aborted"
    assert (said["whole"].status_code, said["whole"].json()["error"]["code"]) == (503, "aborted")


@pytest.mark.parametrize("share", ["bits", "numbers"])
def test_a_server_tells_with_whom_it_shares_its_pages(share):
    with running("--share", share, "--device-memory", "24MiB", "--host-memory", "64MiB") as own:
        identity = httpx.get(f"{own.url}/get_server_info").json()["stats"]["identity"]
        assert identity["share"] == share and bool(identity["kernels"]) == (share == "bits")
        ask = {"model": "tiny-v4", "prompt": "One", "max_tokens": 1}
        answer = httpx.post(f"{own.url}/v1/completions", json=ask, timeout=60).json()
        assert httpx.get(f"{own.url}/v1/cache/explain/{answer['id']}").json()["share"] == share
    assert ("last bits may differ" in own.told) == (share == "numbers")


MISTAKES = [
    (["--device-memory", "1KiB"], "device_bytes"),
    (["--device-memory", "much"], "--device-memory"),
    (["--layout", "sideways"], "layout"),
    (["--kernels", "magic"], "kernels"),
    (["--exact", "--kernels", "reference"], "exact"),
    (["--share", "everything"], "share"),
    (["--exact", "--share", "numbers"], "share"),
    (["/no/such/folder"], "/no/such/folder"),
    (["--device", "rocm"], "device"),
]
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from tiercel.cli import main
for options in json.loads(sys.argv.pop()):
    sys.argv[1:] = ["serve", "--port", "0", *options]
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, told.getvalue()]))
"""


def test_a_server_that_is_told_to_end_as_soon_as_it_listens_ends():
    with running():
        pass


def test_a_mistake_at_the_start_is_one_line_that_names_it():
    """The first in a process as a user starts it, then all in one process: a start takes seconds."""
    command = [sys.executable, "-m", "tiercel.cli", "serve", "--port", "0", *MISTAKES[0][0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    outcomes = [(done.returncode, done.stderr)]
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps([options for options, _ in MISTAKES])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    outcomes += [json.loads(line) for line in done.stdout.splitlines()]
    for (code, told), (_, named) in zip(outcomes, [MISTAKES[0], *MISTAKES], strict=True):
        assert code == 2 and named in told and len(told.strip().splitlines()) == 1, told


FEWER = (
    ""
    if os.environ.get("TIERCEL_ALL")
    else "verify.GROUPS = verify.BRANCHES = verify.TURNS = 2; verify.EXAMS = 4"
)
VERIFY = f"from tiercel import cli, progress, verify; progress.PROGRESS_S = 0.0; {FEWER}; cli.main()"


def test_verify_finds_no_difference_and_says_so_for_programs():
    """`make soak` has as many conversations as users have."""
    done, shown = shown_by([sys.executable, "-c", VERIFY, "verify", "--json", "--share", "numbers"])
    assert done.returncode == 0, shown
    for number, step in enumerate(("cold", "replay", "device", "host", "store"), 1):
        assert f"{step} ({number} of 5)" in shown, "how far it is"
    assert shown.rfind("weights") < shown.rfind("store (5 of 5)"), "opening is a part of a step"
    report = json.loads(done.stdout)
    assert report["share"] == "numbers"
    assert (report["kl"], report["max_abs_dlogprob"], report["tokens_equal"]) == (0.0, 0.0, True)
    assert report["recall"]["cold"] == report["recall"]["device"] == report["recall"]["host"] >= 0.9
    assert report["cached_tokens"]["device"] > 1000 and report["cached_tokens"]["host"] > 1000


def test_verify_finds_no_difference_between_texts_that_are_read_on_the_host_and_whole_ones():
    command = [sys.executable, "-c", VERIFY, "verify", "--sparse", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["kl"], report["max_abs_dlogprob"], report["tokens_equal"]) == (0.0, 0.0, True)
    assert report["recall"]["cold"] == report["recall"]["sparse"] >= 0.9
    assert report["cached_tokens"].keys() == {"sparse"} and report["cached_tokens"]["sparse"] > 1000


def test_verify_needs_a_host_tier_for_texts_that_are_read_there():
    command = [sys.executable, "-m", "tiercel.cli", "verify", "--sparse", "--host-memory", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "sparse = 'always': needs entries" in done.stderr
