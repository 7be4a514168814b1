"""Goal: the trace that a server writes replays to what the server reused, and tells nothing of the texts.
Method: the embedded model's engine, its asks one after the other."""

import json

import pytest

from tests.engine.drive import SPEC, make_ask, make_engine, run, settle, words
from tiercel.errors import ConfigError
from tiercel.replay.formats import read_trace
from tiercel.replay.record import Recorder, open_trace
from tiercel.replay.run import Serving, replay_places
from tiercel.replay.server import Server


def record(file, engine, prompts, count=4):
    recorder = Recorder(open_trace(file), Server.of("tiny", engine.cache, engine.config))
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
    recorder = Recorder(open_trace(tmp_path / "out.jsonl"), Server("tiny", engine.page_tokens))
    recorder._file.close()
    engine.scheduler.finished = recorder.ended
    assert run(engine, make_ask("a", BASE, 2), make_ask("b", BASE, 2))[1].finish is not None
    recorder.close()
    assert caplog.text.count("the trace lacks requests") == 1
