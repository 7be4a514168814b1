"""Goal: a trace says which pages a request shares with which others, and what is wrong with a file is
named. Method: files of a few lines."""

import gzip
import json
from contextlib import contextmanager

import pytest

from tests.replay.traffic import conversations, trace_of
from tiercel.errors import TraceError
from tiercel.replay import formats, trace
from tiercel.replay.formats import read_trace
from tiercel.replay.trace import Text, _with_answers
from tiercel.tree.keys import KeyChain


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def mooncake(time_ms, tokens, out, ids):
    return {"timestamp": time_ms, "input_length": tokens, "output_length": out, "hash_ids": ids}


def test_a_block_of_mooncake_is_two_pages_and_a_page_that_is_not_full_has_no_name(tmp_path):
    file = write(tmp_path / "m.jsonl", mooncake(0, 800, 0, [7, 8]), mooncake(500, 1024, 0, [7, 9]))
    first, second = read_trace([file], 256).requests
    assert (len(first.keys), len(second.keys)) == (3, 4)
    assert first.keys[:2] == second.keys[:2] and not set(first.keys[2:]) & set(second.keys)
    assert (first.time_s, second.time_s) == (0.0, 0.5)


def test_an_answer_has_the_names_of_the_request_that_goes_on_from_it(tmp_path):
    rows = mooncake(0, 1024, 512, [1, 2]), mooncake(1, 1024, 0, [1, 2]), mooncake(2, 2048, 0, [1, 2, 3, 4])
    first, again, following = read_trace([write(tmp_path / "m.jsonl", *rows)], 256).requests
    assert first.keys == following.keys[:6] and again.keys == following.keys[:4]


def test_an_answer_that_nobody_goes_on_from_has_names_of_its_own(tmp_path):
    rows = mooncake(0, 1024, 512, [1, 2]), mooncake(1, 1024, 512, [1, 2])
    first, second = read_trace([write(tmp_path / "m.jsonl", *rows)], 256).requests
    assert first.keys[:4] == second.keys[:4] and not set(first.keys[4:]) & set(second.keys[4:])


def test_a_prompt_that_is_only_what_many_begin_with_does_not_tell_who_goes_on(tmp_path):
    rows = mooncake(0, 512, 512, [1]), mooncake(1, 2048, 0, [1, 2, 3, 4])
    first, second = read_trace([write(tmp_path / "m.jsonl", *rows)], 256).requests
    assert first.keys[:2] == second.keys[:2] and not set(first.keys[2:]) & set(second.keys)


def test_sessions_of_agents_share_nothing_and_their_sub_agents_belong_to_them(tmp_path):
    inner = {"t": 2, "in": 128, "out": 0, "hash_ids": [1, 2]}
    requests = [{"t": 1.0, "in": 128, "out": 0, "hash_ids": [1, 2]}, {"t": 2, "requests": [inner]}]
    files = []
    for name in "ab":
        file = tmp_path / f"{name}.json.gz"
        file.write_bytes(
            gzip.compress(json.dumps({"id": name, "block_size": 64, "requests": requests}).encode())
        )
        files.append(file)
    one, sub, other, _ = read_trace(files, 128, session_every_s=10).requests
    assert one.keys == sub.keys and not set(one.keys) & set(other.keys)
    assert [each.time_s for each in (one, sub, other)] == [1.0, 2.0, 11.0]


def test_names_of_token_ids_are_equal_where_the_keys_of_the_cache_are(tmp_path):
    asked = conversations(3, 40)
    named = {}
    for request, (prompt, answer) in zip(trace_of(tmp_path, asked, 4).requests, asked, strict=True):
        chain = KeyChain(b"x", (), 4)
        chain.extend([*prompt, *answer])
        assert len(chain.keys) == len(request.keys)
        for key, name in zip(chain.keys, request.keys, strict=True):
            assert named.setdefault(key, name) == name
    assert len(set(named.values())) == len(named)


GOOD = mooncake(0, 512, 1, [1])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (mooncake(-1, 512, 1, [1]), "timestamp = -1"),
        (mooncake(0, 0, 1, []), "input_length = 0"),
        (mooncake(0, 512, 1.5, [1]), "output_length = 1.5"),
        (mooncake(0, 5000, 1, [1]), "1 hash_ids for 5,000 tokens"),
        (mooncake(0, 512, 1, ["a"]), "hash_ids"),
        ({"timestamp": 0}, "has no input_length"),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, why):
    file = write(tmp_path / "m.jsonl", GOOD, bad)
    with pytest.raises(TraceError, match=why) as caught:
        read_trace([file], 256)
    assert caught.value.line == 2 and str(file) in str(caught.value)


AGENT = {"t": 0, "in": 64, "out": 1, "hash_ids": [1]}
OWN = {"time_s": 0, "pages": [], "prompt_tokens": 1, "output_tokens": 1, "device": 0, "host": 0, "store": 0}
FORMS = {
    "input_length": lambda most: [GOOD, {**GOOD, "input_length": most}],
    "output_length": lambda most: [GOOD, {**GOOD, "output_length": most}],
    "in": lambda most: [{"block_size": 64, "requests": [{**AGENT, "in": most}]}],
    "out": lambda most: [{"block_size": 64, "requests": [{**AGENT, "out": most}]}],
    "prompt_tokens": lambda most: [HEAD, {**OWN, "prompt_tokens": most}],
    "output_tokens": lambda most: [HEAD, {**OWN, "output_tokens": most}],
    "output_len": lambda most: [{"input_ids": [1], "output_len": most}],
}
HEAD = {"tiercel_trace": 1, "page_tokens": 256, "began_s": 0}


@pytest.mark.parametrize("field", FORMS)
def test_a_length_that_no_text_has_is_refused_with_its_line_and_the_limit(tmp_path, field):
    rows = FORMS[field](10**12)
    file = write(tmp_path / "m.jsonl", *rows)
    with pytest.raises(TraceError, match=rf"{field} = 1000000000000: .* at most 16,777,216") as caught:
        read_trace([file], 256)
    assert caught.value.line == len(rows) and str(file) in str(caught.value)


def test_a_thousand_equal_prompts_are_looked_through_once_not_by_each_of_them():
    class Counted(list):
        seen = 0

        def __getitem__(self, at):
            self.seen += 1
            return super().__getitem__(at)

    texts = Counted(Text(at, "m", [1, 2], 512, 1024, 1) for at in range(1000))
    _with_answers(texts)
    assert texts.seen < 5 * len(texts)


def test_what_takes_long_is_told_while_it_is_read(tmp_path, monkeypatch):
    parts = []

    @contextmanager
    def progress(what, size, *, counted):
        yield lambda more: parts.append((what, size, counted, more))

    for room in (formats, trace):
        monkeypatch.setattr(room, "progress", progress)
    read_trace([write(tmp_path / "m.jsonl", *[GOOD] * 2500)], 256)
    assert (
        parts
        == [("reading m.jsonl", 2500, "lines", 1000)] * 2 + [("naming pages", 2500, "requests", 1000)] * 2
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "begins with no JSON object"),
        ("time,tokens\n1,2", "begins with no JSON object"),
        ('{"prompt": "x"}', "fields: prompt"),
        (json.dumps(GOOD) + "\n{broken", "line 2: is not JSON"),
        ('{"request_throughput": 3, "input_lens": [1], "ttfts": [0.1]}', "no token ids of the prompts"),
        ('{"block_size": 64, "requests": [3]}', "requests must be a list"),
        ('{"tiercel_trace": 9}', "version 9"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_what_it_lacks(tmp_path, content, why):
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    with pytest.raises(TraceError, match=why):
        read_trace([file], 256)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.jsonl: can not be read"):
        read_trace([tmp_path / "none.jsonl"], 256)
