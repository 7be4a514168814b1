"""Goal: the trace that a server writes replays to what the server reused, and tells nothing of the texts.
Method: the embedded model's engine, its asks one after the other."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.engine.drive import SPEC, make_ask, make_engine, run, settle, words
from tiercel.cli.commands import app
from tiercel.errors import ConfigError, TraceError
from tiercel.replay.formats import read_trace, servers_of
from tiercel.replay.record import Recorder, open_trace
from tiercel.replay.run import Serving, replay_places
from tiercel.replay.server import TracedServer
from tiercel.spec import load


def record(file, engine, prompts, count=4):
    recorder = Recorder(open_trace(file), TracedServer.of("tiny", engine.cache, engine.config))
    engine.scheduler.finished = recorder.ended
    answers = []
    for number, prompt in enumerate(prompts):
        ask = make_ask(str(number), prompt, count, turn_ends=(150,), namespace=("somebody",))
        answers += run(engine, ask)
        settle(engine)
    recorder.close()
    return [answer.usage for answer in answers]


BASE = words(300)
PROMPTS = [
    BASE,
    words(700, 1),
    [*BASE, *words(200, 2)],
    words(600, 3),
    BASE,
    [*BASE, *words(90, 4)],
    words(700, 1),
]


def test_a_replay_of_a_servers_trace_reuses_what_the_server_did(tmp_path):
    file = tmp_path / "out.jsonl"
    engine = make_engine(pages=6, host_pages=40)
    usages = record(file, engine, PROMPTS)
    trace = read_trace([file], SPEC.page_tokens)
    serving = Serving(one_at_a_time=True, batch=8, step_tokens=512, cache=engine.cache.config)
    report = replay_places(trace, SPEC, serving)
    reused = {tier: sum(getattr(each, f"{tier}_tokens") for each in usages) for tier in report.hit_tokens}
    assert report.hit_tokens == reused and reused["host"] and reused["device"]
    said = [each.recorded for each in trace.requests]
    assert [(each.device_tokens, each.host_tokens) for each in said] == [
        (usage.device_tokens, usage.host_tokens) for usage in usages
    ]
    assert all(each.prefill_s > 0 for each in said) and trace.requests[0].turn_ends == (128,)


def test_a_trace_names_what_its_server_served_and_how(tmp_path):
    file = tmp_path / "out.jsonl"
    engine = make_engine(pages=6, host_pages=40)
    record(file, engine, [BASE])
    (server,) = servers_of([file])
    assert server == TracedServer.of("tiny", engine.cache, engine.config)
    assert server.spec == replace(SPEC, model="tiny") and server.spec.form == SPEC.form
    assert server.places.device_pages and server.host_bytes == engine.cache.config.host_bytes > 0


def test_a_declaration_with_a_draft_and_two_pools_comes_back_as_it_was(tmp_path):
    spec = load("deepseek-v4-flash", draft=True).apart
    assert spec.second and any(stream.draft for stream in spec.streams)
    file = tmp_path / "out.jsonl"
    Recorder(open_trace(file), TracedServer("flash", 256, spec)).close()
    (server,) = servers_of([file])
    assert server.spec == spec
    assert [each.draft for each in server.spec.streams] == [each.draft for each in spec.streams]
    assert server.spec.units == spec.units and server.spec.selective


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"step_tokens": 0}, "step_tokens = 0"),
        ({"host_bytes": -1}, "host_bytes = -1"),
        ({"spec": {"model": "x"}}, "its spec or its places can not be read"),
        ({"places": [1, 2]}, "its spec or its places can not be read"),
        ({"tiercel_trace": 9}, "version 9"),
    ],
)
def test_a_first_line_that_can_not_be_is_named(tmp_path, field, why):
    file = tmp_path / "out.jsonl"
    file.write_text(json.dumps({"tiercel_trace": 1, "page_tokens": 256, "model": "x", **field}))
    with pytest.raises(TraceError, match=why) as caught:
        servers_of([file])
    assert caught.value.line == 1


def test_the_commands_replay_a_trace_as_its_server_was(tmp_path):
    """Model, page size, steps and sizes are the server's, unless an option says otherwise."""
    file = tmp_path / "out.jsonl"
    engine = make_engine(pages=6, host_pages=40)
    usages = record(file, engine, PROMPTS)
    told = replayed(file, "--one-at-a-time")
    assert told["serving"] == {
        "model": "tiny",
        "model_named_by": "the trace names them",
        "page_tokens": SPEC.page_tokens,
        "batch": engine.config.running_max,
        "step_tokens": 512,
        "context_tokens": engine.config.context_tokens,
        "stages": 1,
    }
    assert told["hit_tokens"]["host"] == sum(each.host_tokens for each in usages) > 0
    assert told["hit_tokens"]["device"] == sum(each.device_tokens for each in usages) > 0
    other = ("--device-memory", "1GiB", "--host-memory", 0, "--model", "deepseek-v4-flash")
    told = replayed(file, *other, "--step-tokens", 100, "--context-tokens", 650, "--draft", "mtp")
    assert told["serving"] == {
        "model": "deepseek-v4-flash+mtp",
        "model_named_by": "--model",
        "page_tokens": SPEC.page_tokens,
        "batch": engine.config.running_max,
        "step_tokens": 100,
        "context_tokens": 650,
        "stages": 1,
    }
    assert told["refused"] == 2, "two prompts have 700 tokens"
    assert told["sizes"] == {"device_bytes": 2**30, "host_bytes": 0, "store_bytes": 0}


def test_an_older_trace_names_a_model_that_is_known_or_must_be_told(tmp_path):
    """It has no declaration."""
    file = tmp_path / "out.jsonl"
    record(file, make_engine(), PROMPTS[:2])
    head, *rows = file.read_text().splitlines()
    old = {name: json.loads(head)[name] for name in ("tiercel_trace", "page_tokens", "began_s")}
    file.write_text("\n".join([json.dumps(old | {"model": "tiny-v4"}), *rows]))
    told = replayed(file, "--device-memory", "64MiB", "--host-memory", 0)["serving"]
    assert (told["model"], told["page_tokens"]) == ("tiny_v4", SPEC.page_tokens)
    file.write_text("\n".join([json.dumps(old | {"model": "mine"}), *rows]))
    with pytest.raises(ConfigError, match="the trace names 'mine', which is no preset"):
        replayed(file)
    file.write_text("\n".join([json.dumps(old | {"model": name}) for name in ("mine", "yours")] + rows))
    with pytest.raises(ConfigError, match="the trace names mine and yours: choose"):
        replayed(file)


def replayed(file, *words):
    words = [str(word) for word in ("replay", file, *words, "--json")]
    return json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)


def test_an_answer_of_one_token_has_its_times_too(tmp_path):
    file = tmp_path / "out.jsonl"
    record(file, make_engine(), [words(20)], count=1)
    (request,) = read_trace([file], SPEC.page_tokens).requests
    assert request.recorded.prefill_s > 0


def test_a_trace_holds_no_keys_no_tokens_and_no_namespace(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        engine = make_engine()
        record(file, engine, [BASE])
        keys = [key.hex() for key in engine.cache.tree.index]
        content = file.read_text()
        assert keys and not any(key[:16] in content for key in keys) and "somebody" not in content
    one, two = (json.loads(file.read_text().splitlines()[1]) for file in files)
    assert one["prompt_tokens"] == two["prompt_tokens"] and not set(one["pages"]) & set(two["pages"])


def test_each_start_appends_a_run_that_shares_nothing_with_the_one_before(tmp_path):
    file = tmp_path / "out.jsonl"
    for _ in range(2):
        record(file, make_engine(), [BASE])
    first, second = read_trace([file], SPEC.page_tokens).requests
    assert len(first.keys) == 2 and not set(first.keys) & set(second.keys)
    assert first.time_s <= second.time_s


def test_a_file_that_can_not_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="can not be written"):
        open_trace(tmp_path / "none" / "out.jsonl")


def test_a_trace_that_fails_later_fails_no_request(tmp_path, caplog):
    engine = make_engine()
    recorder = Recorder(open_trace(tmp_path / "out.jsonl"), TracedServer("tiny", engine.page_tokens))
    recorder._file.close()
    engine.scheduler.finished = recorder.ended
    assert run(engine, make_ask("a", BASE, 2), make_ask("b", BASE, 2))[1].finish is not None
    recorder.close()
    assert caplog.text.count("the trace lacks requests") == 1
