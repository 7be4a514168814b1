"""Goal: what `tiercel bench` tells of a server is what the server says itself. Method: the command in this
process, on a real server with three tiers."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from tests.servers import free_port
from tests.wait import until
from tests.whole.process import Server, running
from tiercel.cli.commands import app
from tiercel.errors import ConfigError

LOAD = ("--conversations", "6", "--turns", "3", "--prompt-tokens", "150-300", "--answer-tokens", "4")
LOAD += ("--shared-tokens", "256", "--concurrency", "3")
OPTIONS = ("--device-memory", "3MiB", "--host-memory", "24MiB", "--waiting-max", "64")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(*OPTIONS, "--store", f"file://{tmp_path_factory.mktemp('store')}/s?size=128MiB") as own:
        yield own


def bench(*words, code=0):
    """Returns the figures and what is printed."""
    done = CliRunner().invoke(app, ["bench", *words])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def figures_of(*words, code=0):
    return json.loads(bench(*words, "--json", "-", code=code))


def counted(figures, name, **labels):
    inner = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return figures["counters"].get(f"{name}{{{inner}}}" if inner else name, 0)


def test_it_tells_what_the_server_tells(server):
    """Tokens by tier, answers, and times that no server can have before its client."""
    runs, seconds = [], [first_token_seconds(server)]
    for _ in range(2):
        runs.append(figures_of(server.url, *LOAD))
        seconds.append(first_token_seconds(server))
    for told, before, after in zip(runs, seconds, seconds[1:], strict=False):
        assert sum(row["ttft_s"] for row in told["rows"]) > after - before > 0
        assert (told["requests"], told["answered"], told["errors"], told["short"]) == (18, 18, {}, 0)
        assert told["answer_tokens"] == 18 * 4 == counted(told, "tiercel_engine_tokens_drawn_total")
        assert told["prompt_tokens"] == counted(told, "tiercel_tokens_asked_total")
        for tier in ("device", "host", "store"):
            tokens = told["sources"].get(tier, {"tokens": 0})["tokens"]
            assert tokens == counted(told, "tiercel_hit_tokens_total", tier=tier)
        assert sum(each["tokens"] for each in told["sources"].values()) == told["prompt_tokens"]
        assert sum(each["requests"] for each in told["sources"].values()) == 18
        for row in told["rows"]:
            assert 0 < row["ttft_s"] <= row["ttft_s"] + 3 * row["tpot_s"] <= row["e2e_s"] + 1e-6
            assert row["e2e_s"] <= told["seconds"]
            slowest = [tier for tier in ("store", "host", "device") if tier in row["reused_tokens"]]
            assert row["source"] == [*slowest, "computed"][0]
    cold, warm = runs
    assert cold["sent_sha256"] == warm["sent_sha256"]
    assert [row["prompt_tokens"] for row in sorted_rows(cold)] == [
        row["prompt_tokens"] for row in sorted_rows(warm)
    ]
    assert cold["hit_ratio"] < warm["hit_ratio"]
    assert figures_of(server.url, *LOAD, "--seed", "1")["sent_sha256"] != cold["sent_sha256"]
    row = warm["rows"][-1]
    explained = httpx.get(f"{server.url}/v1/cache/explain/{row['request_id']}").json()
    assert {tier: n for tier, n in explained["reused_tokens"].items() if n} == row["reused_tokens"]


def first_token_seconds(server):
    """Of all its requests, as the server sees them: from the first byte that came to the first token."""
    name = 'tiercel_time_to_first_token_seconds_sum{call="/v1/completions"} '
    return float(httpx.get(f"{server.url}/metrics").text.partition(name)[2].split()[0])


def sorted_rows(figures):
    return sorted(figures["rows"], key=lambda row: (row["conversation"], row["turn"]))


def test_chats_and_texts_go_on_from_what_was_said(server, tmp_path):
    few = "--conversations", "2", "--turns", "3", "--prompt-tokens", "60", "--answer-tokens", "3"
    for form in ("chat", "text"):
        told = figures_of(server.url, *few, "--send", form, "--plot", f"{tmp_path}/{form}.svg")
        assert told["answered"] == 6
        lengths = [row["prompt_tokens"] for row in sorted_rows(told)]
        assert all(a < b < c for a, b, c in zip(lengths[::3], lengths[1::3], lengths[2::3], strict=True))
        assert told["hit_ratio"] > 0.2
        assert (tmp_path / f"{form}.svg").exists()


def test_a_trace_is_asked_at_its_times(server, tmp_path):
    rows = [
        {"timestamp": 150 * n, "input_length": 600 + n, "output_length": 3, "hash_ids": [1]} for n in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = figures_of(server.url, "--trace", str(trace), "--speed", "2", "--flush")
    assert [row["prompt_tokens"] for row in told["rows"]] == [600, 601, 602, 603]
    assert all(
        row["began_s"] >= 0.075 * n and row["late_s"] is not None for n, row in enumerate(told["rows"])
    )
    at_once = figures_of(server.url, "--trace", str(trace), "--speed", "inf", "--concurrency", "1")
    begins = [(row["began_s"], row["began_s"] + row["e2e_s"]) for row in at_once["rows"]]
    assert all(end <= begin for (_, end), (begin, _) in zip(begins, begins[1:], strict=False)), (
        "one at a time"
    )


def test_errors_are_counted_and_end_nothing(server, tmp_path):
    rows = [{"timestamp": 0, "input_length": n, "output_length": 2, "hash_ids": []} for n in (20, 20_000, 30)]
    (tmp_path / "trace.jsonl").write_text(
        "".join(
            json.dumps(row | {"hash_ids": [n] * (row["input_length"] // 512)}) + "\n"
            for n, row in enumerate(rows)
        )
    )
    told = figures_of(server.url, "--trace", str(tmp_path / "trace.jsonl"))
    assert (told["answered"], told["errors"]) == (2, {"400 context_length_exceeded": 1})
    wrong = bench(server.url, *LOAD, "--model", "nobody", code=1)
    assert "6 requests ended with 404 model_not_found" in wrong and "12 requests were not sent" in wrong


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["http://127.0.0.1:{port}"], "no server answers"),
        (["--trace", "t", "--turns", "2"], "--turns"),
        (["--speed", "2"], "is for a trace"),
        (["--send", "smoke"], "ids, text, chat"),
        (["--json", "/nowhere/at/all"], "--json"),
        (["--plot", "/nowhere/at/all.svg"], "--plot"),
    ],
)
def test_what_can_not_be_run_is_said_before_anything_is_sent(words, why):
    with pytest.raises(ConfigError, match=why):
        bench(*(word.format(port=free_port()) for word in words))


def test_a_run_that_is_ended_tells_what_it_has():
    """By Ctrl-C, and by the server, which needs a key and is killed while it answers."""
    server = Server(*OPTIONS, "--api-key", "sesame")
    with pytest.raises(ConfigError, match="401"):
        bench(server.url)
    command = [sys.executable, "-m", "tiercel.cli", "bench", server.url, "--api-key", "sesame", "--json", "-"]
    command += ["--conversations", "900", "--turns", "1", "--prompt-tokens", "16", "--answer-tokens", "4"]
    for end in (lambda: process.send_signal(signal.SIGINT), lambda: server.stop(signal.SIGKILL)):
        with httpx.Client(base_url=server.url) as client:
            before = answered(client)
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                until(lambda: answered(client) > before, "the first answers have come")  # noqa: B023
                end()
                told = json.loads(process.communicate(timeout=60)[0])
        assert process.returncode == 0
        assert 0 < told["answered"] < 900
        assert sum(told["errors"].values()) == told["requests"] - told["answered"]
        assert told["interrupted"] == (not told["errors"])


def answered(client):
    return float(re.search(r'call="/v1/completions",status="200"} (\S+)', client.get("/metrics").text)[1])
