"""Goal: servers whose model is cut into stages answer as any other, also from what another number of stages
has computed or stored. A stage that is killed costs the answers that it was computing, and a server that is
killed leaves no stage behind. Method: real servers as a user starts them."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest
from openai import APIError, OpenAI

from tests.servers import free_port
from tests.wait import until
from tests.whole import test_roles as roles
from tests.whole.process import Server, running
from tests.whole.test_peers import FULL, KEY, PROMPT, stats_of, wait_until_saved
from tests.whole.test_store import MEMORY, generate


def stages_of(server):
    """The processes of its stages."""
    of = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            of[int(each.parent.name)] = int(each.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    return sorted(pid for pid, parent in of.items() if parent == server.process.pid)


def gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_any_number_of_stages_reads_what_another_has_computed_or_stored(tmp_path):
    address, store = f"127.0.0.1:{free_port()}", f"file://{tmp_path}/store?size=1GiB"
    offer = ("--stages", "2", "--share-pages", address, "--store", store)
    read = ("--stages", "3", "--fetch", "wait", "--peer", f"peer://{address}")
    with running(*MEMORY, *KEY, *offer) as two:
        assert re.search(r"stages .* 2 .* a process each for layers 0 to 3, 4 to 5", two.told)
        said, _ = generate(two, PROMPT)
        shorter = {size: generate(two, PROMPT[:size])[0] for size in (1, 128, 129, 400)}
        wait_until_saved(two)
        assert generate(two, PROMPT) == (said, {"device": 640, "host": 0, "storage": 0})
        with running(*MEMORY, *KEY, *read) as three:
            assert generate(three, PROMPT) == (said, FULL), "every logprob, bit for bit"
        left = stages_of(two)
    assert len(left) == 2
    until(lambda: gone(left), "the stages end with their server")
    with running(*MEMORY, "--fetch", "wait", "--store", store) as one:
        assert generate(one, PROMPT) == (said, FULL)
        assert {size: generate(one, PROMPT[:size])[0] for size in shorter} == shorter


def test_stages_go_on_from_prompts_that_other_stages_compute():
    """Pages are pulled while they are computed, with the bytes of a draft that the last stages have."""
    pair = roles.Pair("--stages", "3", offering=("--stages", "2"))
    with running(*roles.MEMORY, "--speculate", "off") as alone:
        for length in (roles.PAGE + 1, 600, 3000):
            tokens = roles.words(length, length)
            _, decode = pair.ask(tokens)
            assert roles.said(decode) == roles.said(roles.asked(alone, tokens))
            assert decode["cached_tokens_details"]["storage"] == (length - 1) // roles.PAGE * roles.PAGE
    pair.close()


@pytest.fixture
def server():
    own = Server(*MEMORY, "--stages", "2")
    yield own
    if own.process.returncode is None:
        own.stop()


def test_a_stage_that_is_killed_costs_the_answers_it_was_computing(server):
    said, _ = generate(server, PROMPT)
    wait_until_saved(server)
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="tiny-v4", prompt=PROMPT, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    first = stages_of(server)
    os.kill(first[1], signal.SIGKILL)
    with pytest.raises(APIError, match=r"stage \d has ended"):
        list(stream)
    answer, cached = generate(server, PROMPT)
    assert answer == said and cached == {"device": 0, "host": 640, "storage": 0}
    assert len(stages_of(server)) == 2 and not set(first) & set(stages_of(server))
    assert stats_of(server)["engine"]["steps_failed"] > 0
    page = httpx.get(f"{server.url}/metrics").text
    busy = re.findall(r'^tiercel_stage_busy_seconds_total\{stage="(\d)"\} (\S+)$', page, re.MULTILINE)
    assert [stage for stage, _ in busy] == ["0", "1"] and all(float(seconds) > 0 for _, seconds in busy)
    last = stages_of(server)
    server.process.send_signal(signal.SIGKILL)
    server.process.communicate(timeout=60)
    until(lambda: gone(last), "nothing is left of a server that was killed")


def test_what_stages_can_not_do_is_refused_by_name():
    with pytest.raises(AssertionError, match=r"stages = 7: is more than the 6 layers that the model has"):
        Server("--stages", "7")
