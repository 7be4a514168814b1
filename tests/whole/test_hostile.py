"""Goal: a client whose grammars are hostile keeps nobody from their answers. Method: a real server; attacks
of `benchmarks/hostile.py` are under way while others ask."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from benchmarks.hostile import GRAMMARS, memory_bytes, renewed

from tests.wait import until
from tests.whole.process import Server, running

OPTIONS = ("--device-memory", "24MiB", "--host-memory", "24MiB")


@pytest.fixture(scope="module")
def server():
    with running(*OPTIONS) as own:
        yield own


def ask(url, **more):
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0} | more
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def children(pid):
    """The processes that any thread of a process has started. A thread may end meanwhile."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, task.read_text().split())
    return found


def trials(server):
    """The processes in which grammars are tried now."""
    return [each for process in children(server.process.pid) for each in children(process)]


def test_a_server_that_has_seen_no_grammar_has_no_other_process(server):
    assert ask(server.url).status_code == 200
    assert not children(server.process.pid)


def test_hostile_grammars_are_refused_and_others_are_answered_meanwhile(server):
    """The other client's answers come while a trial is under way."""
    assert ask(server.url, regex="[a-z]{4}").status_code == 200
    before = memory_bytes(server.process.pid)
    names = ("beginnings", "pairs", "beginnings")
    hostile = [renewed(GRAMMARS[name], number) for number, name in enumerate(names)]
    with ThreadPoolExecutor(len(hostile)) as clients:
        asked = [clients.submit(ask, server.url, **each) for each in hostile]
        until(lambda: trials(server), "a trial is under way")
        for more in ({}, {"regex": "[a-z]{4}"}):
            assert ask(server.url, **more).status_code == 200
        assert not all(each.done() for each in asked)
        answers = [each.result() for each in asked]
    for answer in answers:
        error = answer.json()["error"]
        refused = (400, "json_schema", "invalid_grammar")
        busy = (503, None, "busy")  # on a machine that has no time for a trial
        assert (answer.status_code, error["param"], error["code"]) in (refused, busy), answer.text
    assert memory_bytes(server.process.pid) - before < 100 << 20


def test_a_client_that_leaves_ends_its_trial(server):
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "Once", **renewed(GRAMMARS["beginnings"], 100)}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.2)
    until(lambda: not trials(server), "its trial has ended", 20)
    assert ask(server.url, regex="[0-9]{4}").status_code == 200


def test_a_server_ends_while_a_grammar_is_tried():
    """The client is told: that its grammar is refused, or that there was no time for the trial."""
    server = Server(*OPTIONS)
    with ThreadPoolExecutor(1) as clients:
        try:
            asked = clients.submit(ask, server.url, **GRAMMARS["beginnings"])
            (trial,) = until(lambda: trials(server), "a trial is under way")
            code, told = server.stop(signal.SIGTERM, timeout_s=60)
            assert code == 0 and "Traceback" not in told, told
            until(lambda: not Path(f"/proc/{trial}").exists(), "its trial has ended")
            assert asked.result(60).json()["error"]["code"] in ("invalid_grammar", "aborted", "busy")
        finally:
            server.process.kill()
            server.process.stderr.close()
