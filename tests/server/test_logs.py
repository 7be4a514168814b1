"""Goal: every line of the log says when, how bad and for whom. Method: lines are logged and read, of a server
that answers, fails and is probed."""

import io
import json
import logging
import re

import pytest

from tests.server.scripted import ScriptedService, talking
from tiercel.asks.ask import Finish
from tiercel.server.http.logs import JsonFormat, LineWriter, TextFormat
from tiercel.server.http.tenants import Tenants, digest_of
from tiercel.server.options import ServerOptions


@pytest.fixture
def lines():
    """Yields a function that answers what was logged so far."""
    stream = io.StringIO()
    writer = LineWriter(stream)
    root = logging.getLogger("tiercel")
    before = root.level
    root.addHandler(writer)
    root.setLevel("INFO")

    def read(form):
        writer.setFormatter(form)
        return lambda: (writer.close(), stream.getvalue().splitlines())[1]

    yield read
    root.removeHandler(writer)
    root.setLevel(before)


def test_a_line_for_people_has_time_level_logger_request_and_tenant(lines, tmp_path):
    read = lines(TextFormat())
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[team]\nsha256 = "{digest_of(b"key")}"')
    options = ServerOptions(loopback=True, tenants=Tenants(keys))
    with talking(ScriptedService(), options) as talk:
        named = {"x-request-id": "mine", "authorization": "Bearer key"}
        talk("POST", "/generate", json={"text": "x"}, headers=named)
        talk("POST", "/generate", json={"text": "x"}, headers=named)
    first, second = read()
    head = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO tiercel\.access \[mine team\] POST /generate 200, "
    assert re.fullmatch(head + r"[\d.]+ ms, 1 tokens in, 0 cached, 3 out", first)
    assert second.endswith(" 1 tokens in, 0 cached, 3 out")


def test_a_line_for_programs_has_the_same_as_members(lines):
    read = lines(JsonFormat())
    with talking(ScriptedService()) as talk:
        talk("POST", "/v1/completions", json={"prompt": "Hello", "n": 2}, headers={"x-request-id": "mine"})
        talk("GET", "/nothing%0D%0Aelse?secret=1")
    first, second = map(json.loads, read())
    assert first.pop("time").endswith("Z") and first.pop("ms") > 0
    assert first.pop("message").startswith("POST /v1/completions 200")
    assert first == {
        "level": "info",
        "logger": "tiercel.access",
        "request_id": "mine",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "tokens_in": 1,
        "tokens_cached": 0,
        "tokens_replayed": 0,
        "tokens_out": 6,
    }
    assert (second["status"], second["path"]) == (404, "/nothing%0D%0Aelse")


def test_probes_that_are_well_are_not_logged_and_those_that_fail_are(lines):
    read = lines(JsonFormat())
    with talking(ScriptedService(ready=False)) as talk:
        for path in ("/health", "/metrics", "/ready"):
            talk("GET", path)
    (only,) = map(json.loads, read())
    assert (only["path"], only["status"]) == ("/ready", 503)


def test_a_bug_in_a_request_is_logged_with_its_id_and_traceback(lines):
    read = lines(JsonFormat())
    with talking(ScriptedService(fail_first=ValueError("a bug"))) as talk:
        talk("POST", "/generate", json={"text": "x"}, headers={"x-request-id": "mine"})
    bug, _ = map(json.loads, read())
    assert (bug["level"], bug["request_id"]) == ("error", "mine") and "ValueError: a bug" in bug["error"]


def test_an_answer_that_the_client_left_or_the_engine_failed_has_a_line_too(lines):
    read = lines(JsonFormat())
    with talking(ScriptedService(end=Finish.ERROR)) as talk:
        talk("POST", "/generate", json={"text": "x"})
    assert json.loads(read()[-1])["status"] == 500


def test_the_engines_ids_are_shown_as_the_client_knows_them():
    record = logging.makeLogRecord({"msg": "x", "request_id": "0123abcd/mine", "tenant": "team"})
    assert "[mine team]" in TextFormat().format(record)
    assert json.loads(JsonFormat().format(record))["request_id"] == "mine"


def test_without_an_access_log_there_is_none(lines):
    read = lines(JsonFormat())
    with talking(ScriptedService(), ServerOptions(loopback=True, access_log=False)) as talk:
        talk("POST", "/generate", json={"text": "x"})
    assert read() == []


class Stuck(io.StringIO):
    """A reader of the log that does not read."""

    def __init__(self, let_go):
        super().__init__()
        self.let_go = let_go

    def write(self, text):
        self.let_go.wait()
        return super().write(text)


def test_nobody_waits_for_a_reader_of_the_log_and_what_was_dropped_is_told(monkeypatch):
    import threading

    monkeypatch.setattr("tiercel.server.http.logs.LINES_MOST", 3)
    let_go = threading.Event()
    stream = Stuck(let_go)
    writer = LineWriter(stream)
    writer.setFormatter(JsonFormat())
    for number in range(20):
        writer.emit(logging.makeLogRecord({"msg": f"line {number}"}))
    let_go.set()
    writer.close()
    said = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    told = [int(line.split()[0]) for line in said if "dropped" in line]
    assert sum(told) + len(said) - len(told) == 20 and sum(told) >= 16
