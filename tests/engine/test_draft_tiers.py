"""Goal: a draft's bytes come back with their prefix, from every tier, and their loss is seen. Method: the
embedded model with each of its drafts, and as its own draft model, on code. Guesses and the logits they were
chosen by are compared, bit by bit, with those of the same text computed from its first token. Prompts end two
tokens behind a page, so hardly anything of the draft is computed again before it guesses."""

import argparse
import inspect
import itertools
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine.drive import PAGE, TEXT, Always, bytes_for, make_ask, settle, tokens_of, words
from tests.peers.inline import offered
from tests.peers.roles import roles
from tests.servers import mooncake_holder, mooncake_master, redis_server
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.guessing import FIRST_TOKENS
from tiercel.engine.loop import plain_steps
from tiercel.engine.offline import answer_all
from tiercel.models.draft_model import DraftModel, WithDraft
from tiercel.models.families import EMBEDDED
from tiercel.policy.resume import Why
from tiercel.storage.record import MAGIC, Flaw, parse
from tiercel.types import Kind

MIB = 1024**2
GUESSES = 3
ANSWER = FIRST_TOKENS + GUESSES
REUSED = 2 * PAGE
CODE = TEXT.encode(inspect.getsource(argparse)[:40_000])
PROMPTS = [[1, *CODE[at : at + REUSED + 1]] for at in range(0, 4 * 800, 800)]


class Guess(NamedTuple):
    tokens: list[int]
    logits: str
    """Digest of all their bits."""


class Begun(NamedTuple):
    """How a text went on: its tokens, and the draft's guesses by the length of the text they follow."""

    tokens: list[int]
    guesses: dict[int, Guess]


class Ear:
    """What the draft of an engine answers, one text at a time."""

    def __init__(self, engine):
        self.guesses: dict[int, Guess] = {}
        self._logits: list[bytes] = []
        drafter, draft = engine.runner._drafter, engine.runner.model.draft
        guess = drafter.guess

        def heard(texts, counts):
            self._logits.clear()
            [text], [made] = texts, guess(texts, counts)
            self.guesses[len(text.tokens)] = Guess(made, sha256(b"".join(self._logits)).hexdigest())
            assert len(self._logits) == len(made)
            return [made]

        drafter.guess = heard
        if isinstance(draft, DraftModel):
            self._hear(draft.model, "forward", lambda told: told)
        else:
            for module in draft.modules:
                self._hear(module, "logits", lambda told: told)

    def _hear(self, owner, name, logits_of):
        answer = getattr(owner, name)

        def heard(*asked, **options):
            told = answer(*asked, **options)
            self._logits.append(logits_of(told).numpy().tobytes())
            return told

        setattr(owner, name, heard)


@contextmanager
def opened(draft, *, device_bytes=16 * MIB, store=None, **settings):
    """An engine that always asks its draft for guesses."""
    settings = {"host_bytes": 64 * MIB, "fetch": "wait"} | settings
    config = EngineConfig(
        cache=CacheConfig(**settings), speculate=draft, running_max=1, draft_tokens_max=GUESSES
    )
    folder = EMBEDDED if draft == "draft" else None
    engine, _ = open_engine(Build(device_bytes=device_bytes, store=store, draft=folder), config)
    engine.cache.compute.observe = lambda *_: None  # what is stored is read, however fast this machine is
    engine.scheduler.guessing.policy = Always(GUESSES)
    with closing(engine.cache):
        yield engine


class Guesser:
    """Continues texts with an engine, one after the other."""

    def __init__(self, engine):
        self.engine, self._numbers = engine, itertools.count()
        self.ear = Ear(engine) if engine.runner._drafter is not None else None
        # as its own draft the model takes twice as long, and every guess is right
        self._prompts = PROMPTS[:3] if isinstance(engine.runner.model, WithDraft) else PROMPTS

    def begin(self, prompt, source, count=ANSWER):
        """How a text goes on whose beginning comes from `source`."""
        if self.ear is not None:
            self.ear.guesses = {}
        name = str(next(self._numbers))
        [answer] = answer_all(self.engine, [make_ask(name, prompt, count)])
        settle(self.engine)
        usage = answer.usage
        came = {"device": usage.device_tokens, "host": usage.host_tokens, "store": usage.store_tokens}
        assert {tier: tokens for tier, tokens in came.items() if tokens} == (
            {} if source == "computed" else {source: REUSED}
        )
        return self.heard(tokens_of(answer))

    def heard(self, tokens):
        return Begun(tokens, self.ear.guesses if self.ear is not None else {})

    def begin_all(self, source):
        return [self.begin(prompt, source) for prompt in self._prompts]

    @property
    def accept_length(self):
        return self.engine.stats().accept_length


@dataclass
class Truth:
    """What a draft does on texts that are computed from their first tokens."""

    draft: str
    cold: Guesser
    begun: Sequence[Begun]
    accept_length: float

    def opened(self, source, **options):
        """An engine with this draft, whose texts come from `source` when they are asked for again: for the
        host, its device has room for little more than one text."""
        small = {"device_bytes": bytes_for(4, self.cold.engine.cache.spec)} if source == "host" else {}
        return opened(self.draft, **small, **options)


@pytest.fixture(scope="module")
def truths():
    """What each draft does, computed when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def truth_of(draft):
            cold = Guesser(stack.enter_context(opened(draft, force_miss=True)))
            begun = cold.begin_all("computed")
            assert all(len(each.guesses) > 1 for each in begun)
            return Truth(draft, cold, begun, cold.accept_length["computed"])

        yield truth_of


@pytest.fixture(params=["mtp", "draft"])
def truth(request, truths):
    return truths(request.param)


def file_url(folder):
    return f"file://{folder}/store?size=64MiB"


OWN = pytest.mark.parametrize("truth", ["mtp"], indirect=True)


def cases(names, *ways):
    """The model's own draft each way, a draft model, which takes longer, the last way."""
    each = [*(("mtp", way) for way in ways), ("draft", ways[-1])]
    return pytest.mark.parametrize(names, each, indirect=["truth"])


@pytest.fixture
def url(kind, tmp_path):
    if kind == "file":
        yield file_url(tmp_path)
    elif kind == "redis":
        with redis_server(unix=True) as server:
            yield server.url
    else:
        with mooncake_master() as master, mooncake_holder(master, 64 * MIB):
            yield master.url


@cases("truth, source", "device", "host")
def test_a_draft_guesses_the_same_after_a_resume(truth, source):
    with truth.opened(source) as engine:
        warm = Guesser(engine)
        assert warm.begin_all("computed") == truth.begun
        assert warm.begin_all(source) == truth.begun
        assert warm.accept_length == dict.fromkeys(("computed", source), truth.accept_length)


@OWN
def test_a_draft_guesses_at_once_where_only_the_last_token_of_a_prompt_is_computed(truth):
    """Nothing was drawn yet: the first guesses follow the prompt, right behind the end of a page. Those that
    a cold text gets, too, are the same."""
    with truth.opened("device") as engine:
        warm = Guesser(engine)
        for prompt in (prompt[: REUSED + 1] for prompt in PROMPTS[:2]):
            cold = warm.begin(prompt, "computed")
            begun = warm.begin(prompt, "device")
            assert begun.tokens == cold.tokens
            assert min(begun.guesses) == len(prompt) and min(cold.guesses) == len(prompt) + 1
            both = begun.guesses.keys() & cold.guesses.keys()
            for length in both:
                assert begun.guesses[length] == cold.guesses[length], length


@cases("truth, kind", "redis", "mooncake", "file")
def test_a_draft_guesses_the_same_after_a_restart_from_the_store(truth, kind, url):
    with opened(truth.draft, store=url) as engine:
        Guesser(engine).begin_all("computed")
    with opened(truth.draft, store=url) as engine:
        again = Guesser(engine)
        assert again.begin_all("store") == truth.begun
        assert again.accept_length == {"store": truth.accept_length}


@OWN
def test_a_draft_guesses_the_same_from_another_servers_pages(truth):
    with opened(truth.draft) as first:
        Guesser(first).begin_all("computed")
        with offered(first.cache) as url, opened(truth.draft, store=url) as second:
            pulled = Guesser(second)
            assert pulled.begin_all("store") == truth.begun
            assert pulled.accept_length == {"store": truth.accept_length}


@OWN
def test_a_draft_guesses_the_same_where_another_server_computed_the_prompt(truth):
    with opened(truth.draft) as first, opened(truth.draft) as second, roles(first, second) as pair:
        pulled = Guesser(second)
        for number, (prompt, expected) in enumerate(zip(PROMPTS, truth.begun, strict=True)):
            pulled.ear.guesses = {}
            answer = pair.ask(make_ask(str(number), prompt, ANSWER))
            assert answer.usage.store_tokens == REUSED
            assert pulled.heard(tokens_of(answer)) == expected
        assert pulled.accept_length == {"store": truth.accept_length}


@cases("truth, source", "device", "host")
def test_a_draft_guesses_the_same_after_a_preemption(truth, source):
    """A text is preempted right behind the end of a page that it has decoded. Urgent texts take its place,
    and on a small device its pages, too."""
    before_page = 6
    with truth.opened(source, evict="lru") as engine, opened(truth.draft, force_miss=True) as other:
        warm, cold = Guesser(engine), Guesser(other)
        for i, prompt in enumerate(PROMPTS[:2]):
            name, count = f"text {i}", 2 * before_page + ANSWER
            engine.add(make_ask(name, prompt[: REUSED - before_page], count))
            steps, task = plain_steps(engine), engine.scheduler.tasks[name]
            while len(task.tokens) <= REUSED + 1:
                next(steps)
            for seed in (2 * i, 2 * i + 1):
                engine.add(make_ask(f"urgent {seed}", words(4 * PAGE - 1, seed), 1, priority=1))
            while engine.counters["preemptions"] == i:  # it goes on until there is room for the first of them
                next(steps)
            begin, warm.ear.guesses = len(task.tokens), {}
            while engine.scheduler.tasks:
                next(steps)
            settle(engine)
            assert engine.counters["preemptions"] == i + 1
            left = count - begin + REUSED - before_page
            expected = cold.begin(task.tokens[:begin], "computed", count=left)
            assert warm.heard(task.tokens[begin:]) == expected
        assert warm.accept_length[source] == cold.accept_length["computed"]


@cases("truth, source", "device", "store")
def test_a_draft_that_lost_its_bytes_guesses_worse_and_the_statistics_show_it(truth, source, tmp_path):
    """The control: the target is restored, the draft is not. Its rings keep what the text before left there.
    Answers are the same."""
    store = file_url(tmp_path) if source == "store" else None
    if store:
        with opened(truth.draft, store=store) as engine:
            Guesser(engine).begin_all("computed")
    with truth.opened(source, store=store) as engine:
        warm, draft = Guesser(engine), engine.runner.model.draft
        if not store:
            warm.begin_all("computed")
        if isinstance(draft, DraftModel):
            draft.model.resume = lambda *_: None
        else:
            draft.restore = lambda *_: None
        begun = warm.begin_all(source)
        assert [each.tokens for each in begun] == [each.tokens for each in truth.begun]
        assert warm.accept_length[source] < 0.9 * truth.accept_length
        assert warm.accept_length.get("computed", truth.accept_length) == truth.accept_length


def damage_draft(folder, kind, page_key):
    """Flips a bit in the draft's part of this record. Answers how many records of it there were."""
    damaged = 0
    for file in filter(Path.is_file, folder.rglob("*")):
        data, at = bytearray(file.read_bytes()), -1
        while (at := data.find(MAGIC, at + 1)) >= 0:
            header = parse(data[at : at + 64 * 1024])
            if isinstance(header, Flaw) or (header.kind, header.page_key) != (kind, page_key):
                continue
            rows = [row for row in json.loads(header.table) if row["name"].startswith("draft_")]
            size = sum(len(row["layers"]) * row["row_bytes"] for row in rows)
            assert 0 < size < header.payload_bytes
            # the draft's layer is behind those of the target, so its bytes are the last
            data[at + header.header_bytes + header.payload_bytes - size // 2] ^= 1
            damaged += 1
        file.write_bytes(data)
    return damaged


@OWN
def test_a_record_whose_draft_part_is_damaged_is_not_used_at_all(truth, tmp_path):
    """It is computed and stored again. MTP layers have no bytes in pages."""
    prompt, expected = PROMPTS[0], truth.begun[0]
    for kind in [Kind.TAIL] if truth.draft == "mtp" else [Kind.PAGE, Kind.TAIL]:
        folder = tmp_path / kind.name
        store = file_url(folder)
        with opened(truth.draft, store=store) as engine:
            assert Guesser(engine).begin(prompt, "computed") == expected
            page_key = engine.cache.chain(prompt).keys[1]
        assert damage_draft(folder, kind, page_key) == 1
        with opened(truth.draft, store=store) as engine:
            assert Guesser(engine).begin(prompt, "computed") == expected
            assert engine.explain("0").reuse.why is Why.STORE_DAMAGED
        with opened(truth.draft, store=store) as engine:
            assert Guesser(engine).begin(prompt, "store") == expected


def test_servers_with_and_without_a_draft_do_not_read_each_others_records(truth, tmp_path):
    """Their pages have the same keys, since the model is the same; their records have other forms."""
    prompt, tokens, seen = PROMPTS[0], truth.begun[0].tokens, []
    url = file_url(tmp_path)
    for source in ("computed", "store"):
        for draft in ("off", truth.draft):
            with opened(draft, store=url) as engine:
                assert Guesser(engine).begin(prompt, source).tokens == tokens
                seen.append((engine.cache.identity, engine.cache.spec.form))
    (identity, plain), (same, drafted), *again = seen
    assert identity == same and plain != drafted and again == seen[:2]
