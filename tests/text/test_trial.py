"""Goal: whatever a grammar does, it does it to its own trial. Method: recipes tried here, and hostile ones
in a real trial process with the embedded model's vocabulary."""

import json
import os
import socket
from pathlib import Path

import pytest
from benchmarks.hostile import beginnings, chain, pairs

from tests.wait import until
from tiercel.models.families import EMBEDDED, folder_of
from tiercel.server.calls.trials import TrialProcess
from tiercel.text.answer import CallFormat
from tiercel.text.grammar import Grammars
from tiercel.text.text import Text
from tiercel.text.trial import pieces_of, receive, send, tried

TEXT = Text(Path(folder_of(EMBEDDED)))
PIECES = pieces_of(TEXT)
UNIQUE = {"type": "array", "uniqueItems": True}


def recipe(make, *given, **how):
    return {"make": make, "given": given, "how": how}


def test_the_vocabulary_of_a_trial_makes_up_every_text():
    said = "Once upon a time, naïve 日本 🙂\n"
    assert b"".join(map(PIECES.piece_bytes, PIECES.tokens_within(said))) == said.encode()
    assert (PIECES.token_ids, PIECES.eos) == (TEXT.token_ids, TEXT.eos)


@pytest.mark.parametrize(
    ("asked", "source"),
    [
        (recipe("regex", "a+"), "a+"),
        (recipe("choice", ["yes", "no"]), 'TEXT: "yes" | "no"'),
        (recipe("ebnf", 'root ::= "a"'), 'start: "a"'),
        (recipe("json", '{"type": "integer"}'), "%json"),
        (recipe("forced_calls", CallFormat.JSON.value, [{"name": "f"}], several=False), "<tool_call>"),
        (recipe("free_calls", CallFormat.DSML.value, [{"name": "f"}], answer={}), "answer: %json"),
    ],
    ids=str,
)
def test_a_recipe_becomes_a_source(asked, source):
    told = tried(json.loads(json.dumps(asked)), Grammars(PIECES))
    assert source in told["source"] and told["bytes"] >= 0


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (recipe("json", "{"), "not JSON"),
        (recipe("json", "[1]"), "must be an object"),
        (recipe("json", "[" * 100_000), "nested too deeply"),
        (recipe("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "recursion"),
        (recipe("regex", "(a"), "unclosed group"),
        (recipe("regex", "(([a-z]{1,500}[0-9]?){1,500}x?){1,500}"), "too many expressions"),
        (recipe("ebnf", 'start: s\ns: s s s | s s | /[a-z ]/ | ""'), "take too long"),
        (recipe("json", UNIQUE), "uniqueItems"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_what_is_wrong_is_told(asked, why):
    assert why in tried(asked, Grammars(PIECES))["error"]


def test_the_part_that_is_wrong_is_told():
    functions = [{"name": "f"}, {"name": "g", "parameters": UNIQUE, "strict": True}]
    whole = recipe("forced_calls", CallFormat.JSON.value, functions, several=True)
    told = tried({**whole, "parts": [recipe("json", {}), recipe("json", UNIQUE)]}, Grammars(PIECES))
    assert told["part"] == 1 and "uniqueItems" in told["error"]


@pytest.fixture(scope="module")
def process():
    return TrialProcess(PIECES)


def begun(process, asked):
    ours, theirs = socket.socketpair()
    with theirs:
        process.hand_over(theirs)
    send(ours, json.dumps(asked).encode())
    return ours


def told(connection):
    with connection:
        return json.loads(receive(connection))


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_each_limit_ends_its_own_trial(process):
    hostile = {
        "it takes more than 1 s to compile": recipe("ebnf", chain(3000)),
        "it is nested too deeply": recipe("json", pairs(1000)),
        "it needs more than 128 MiB to compile": recipe("regex", r"\w" * 30_000),
    }
    open_trials = [begun(process, each) for each in hostile.values()]
    good = begun(process, recipe("choice", ["yes"]))
    assert told(good)["source"] == 'start: TEXT\nTEXT: "yes"'
    assert [told(each)["error"] for each in open_trials] == list(hostile)
    until(lambda: not children(process.pid), "every trial has ended")


def test_a_trial_ends_with_the_one_who_waits_for_it(process):
    connection = begun(process, recipe("json", beginnings(60)))
    until(lambda: children(process.pid), "the trial has begun")
    connection.close()
    until(lambda: not children(process.pid), "the trial has ended")


def test_a_trial_has_a_low_priority_and_one_core_and_ends_with_its_server():
    own = TrialProcess(PIECES)
    pid = own.pid
    connection = begun(own, recipe("json", beginnings(60)))
    (trial,) = trials = until(lambda: children(pid), "the trial has begun")

    def is_limited():
        low = os.getpriority(os.PRIO_PROCESS, trial) > os.getpriority(os.PRIO_PROCESS, 0)
        return low and len(os.sched_getaffinity(trial)) == 1

    until(is_limited, "it has a low priority and one core")
    del own
    with connection:
        until(lambda: not any(Path(f"/proc/{each}").exists() for each in (pid, *trials)), "all have ended")
