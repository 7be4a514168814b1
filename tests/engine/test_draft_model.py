"""Goal: a small model guesses for another one and changes no bit of an answer; one that can not is refused by
name. Method: the embedded model as its own draft, whose greedy guesses are all right; random models of both
families as drafts of each other, resumed from every kind of boundary."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.drive import (
    LOOPS,
    PAGE,
    TEXT,
    Always,
    bytes_for,
    logprobs_of,
    make_ask,
    make_engine,
    run,
    settle,
    tokens_of,
    words,
)
from tests.engine.test_build import make_folder
from tests.models.qwen3 import write_qwen3
from tests.models.spans import one_pool
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.errors import ConfigError
from tiercel.kernels.choice import make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import NO_GUESS
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.draft_model import DraftModel
from tiercel.models.opening import DraftFolder, check_memory, open_model
from tiercel.models.wish import Wish

MIB = 1024**2
GUESSES = 3
PROMPTS = [[1, *TEXT.encode("the harbour of the small town was quiet ")], words(PAGE - 6, seed=3)]
SAMPLED = {"temperature": 0.8, "seed": 5, "logprobs": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models with the embedded tokenizer. `small` has fewer tokens than the others, and `v4` windows,
    entries of all kinds and tails."""
    root = tmp_path_factory.mktemp("models")
    size = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    return {
        "qwen3": write_qwen3(root / "qwen3"),
        "small": write_qwen3(root / "small", vocab_size=4000, **size),
        "other": write_qwen3(root / "other", vocab_size=4000, **size, rms_norm_eps=1e-4),
        "v4": make_folder(root / "v4"),
    }


def open_with(draft, model="tiny-v4", *, device_bytes=16 * MIB, cache=None, speculate="auto", **build):
    """Every text gets guesses in every step."""
    config = EngineConfig(
        CacheConfig(**(cache or {})), running_max=4, speculate=speculate, draft_tokens_max=GUESSES
    )
    engine, choices = open_engine(
        Build(str(model), draft=draft and str(draft), device_bytes=device_bytes, **build), config
    )
    engine.scheduler.guessing.policy = Always(GUESSES)
    return engine, choices


def told(answer):
    return tokens_of(answer), logprobs_of(answer), answer.finish


COUNT = 1 + 5 * (GUESSES + 1)
"""One token is drawn by the prompt's step; each step after it draws the guesses and one more, or fewer."""

ASKS = {
    name: [make_ask(str(i), prompt, COUNT, **sampling) for i, prompt in enumerate(PROMPTS)]
    for name, sampling in (("greedy", {}), ("sampled", SAMPLED))
}


@pytest.fixture(scope="module")
def truth():
    engine = make_engine()
    return {name: [told(each) for each in run(engine, *asks)] for name, asks in ASKS.items()}


@LOOPS
def test_the_guesses_of_a_model_for_itself_are_all_right(truth, overlap):
    engine, choices = open_with("tiny-v4")
    [line] = [each for each in choices if each.what == "speculation"]
    assert line.value == "draft, up to 3 tokens" and "tiny-v4 guesses" in line.why
    assert [told(each) for each in run(engine, *ASKS["greedy"], overlap=overlap)] == truth["greedy"]
    counters = engine.counters
    assert counters["guesses"] == counters["guesses_accepted"] == 2 * 5 * GUESSES
    assert [engine.explain(ask.request_id).accept_length for ask in ASKS["greedy"]] == [GUESSES + 1] * 2
    counters.clear()
    assert [told(each) for each in run(engine, *ASKS["sampled"], overlap=overlap)] == truth["sampled"]
    assert 0 < counters["guesses_accepted"] < counters["guesses"]
    settle(engine)
    engine.cache.close()


class Seldom(Always):
    """Guesses every second time it is asked, which is seldom (`guessing.REST`). Steps between are queued
    before the token they begin with is known."""

    steps = 0

    def choose(self, records, most, others=0):
        self.steps += 1
        return super().choose(records, most if self.steps % 2 == 0 else [0] * len(most), others)


def test_a_draft_follows_tokens_that_nobody_has_read_yet(truth):
    engine, _ = open_with("tiny-v4")
    engine.scheduler.guessing.policy = Seldom(GUESSES)
    asks = [make_ask(str(i), prompt, COUNT, logprobs=None) for i, prompt in enumerate(PROMPTS)]
    answers = run(engine, *asks, overlap="queued")
    assert [tokens_of(each) for each in answers] == [tokens for tokens, _, _ in truth["greedy"]]
    assert engine.counters["guesses"] == engine.counters["guesses_accepted"] > 0
    engine.cache.close()


@pytest.mark.parametrize(
    ("model", "draft", "replayed"), [("tiny-v4", "small", None), ("qwen3", "v4", 29), ("small", "qwen3", 0)]
)
def test_models_of_any_family_guess_for_each_other(folders, model, draft, replayed):
    """Answers are those without a draft, and guesses those of texts that were computed from their beginning:
    from the device, from the host, and by replay, at the end of a page that has no tail."""
    open_pair = partial(open_with, folders[draft], folders.get(model, model), page_tokens=PAGE)
    plain, _ = open_with(None, folders.get(model, model), page_tokens=PAGE, speculate="off")
    cold, _ = open_pair(cache={"force_miss": True})
    warm, _ = open_pair(
        device_bytes=bytes_for(5, cold.cache.spec), cache={"host_bytes": 64 * MIB, "evict": "lru"}
    )
    begun = words(2 * PAGE + 9)
    begun[7] = plain.vocab_size - 1  # a token that `small` has not
    whole, sampled = make_ask("whole", begun), make_ask("sampled", begun, 12, **SAMPLED)
    page = make_ask("page", [*begun[:PAGE], *words(5, seed=1)])
    others = [make_ask(str(i), words(warm.cache.pages_most * PAGE - 8, seed=i)) for i in (2, 3)]
    known = {}
    for ask in (whole, page, sampled):
        heard = listen(cold)
        [truth], [answer] = run(plain, ask), run(cold, ask)
        assert told(answer) == told(truth) and heard
        known[ask.request_id] = told(answer), heard
    reused = []
    for ask in (whole, whole, page, *others, sampled):
        heard = listen(warm)
        [answer] = run(warm, ask)
        settle(warm)
        reused.append((answer.usage.device_tokens, answer.usage.host_tokens))
        if ask not in others:  # a text that was found may be asked for guesses one token earlier
            assert (told(answer), heard[-len(known[ask.request_id][1]) :]) == known[ask.request_id]
    assert reused == [
        (0, 0),
        (2 * PAGE, 0),
        (0 if replayed is None else PAGE - replayed, 0),
        (0, 0),
        (0, 0),
        (0, 2 * PAGE),
    ]
    assert warm.explain("page").reuse.replay_tokens == (replayed or 0)
    for engine in (plain, cold, warm):
        engine.cache.close()


def listen(engine):
    """What the draft of an engine guesses from now on."""
    draft, heard = engine.runner.model.draft, []

    def propose(*asked):
        guesses = DraftModel.propose(draft, *asked)
        heard.append(guesses.tolist())
        return guesses

    draft.propose = propose
    return heard


def make_model(folder, vocab_size, longest=None):
    """A draft of a model with `vocab_size` tokens, alone, and one text of 9 tokens that it has followed."""
    opened = DraftFolder(str(folder))
    kernels = make_kernels()
    spec = opened.declare(16, "fp32")
    memory = DeviceMemory(spec, pages=4, tails=0)
    weights = opened.plan(kernels).read()
    model = opened.family.build(opened.dimensions, weights, memory, 1, kernels, 4, None)
    draft = DraftModel(model, vocab_size, longest)
    tokens, pages = torch.arange(10), torch.tensor([2, 0])
    draft.follow([one_pool(tokens[:9].numpy(), 0, pages, 0)])
    return draft, one_pool(tokens[9:].numpy(), 9, pages, 0)


def test_a_guess_is_a_token_of_the_target(folders):
    """Guesses end where the best token is none of the target's, and where the draft's own texts end."""
    draft, span = make_model(folders["qwen3"], 4096)
    best = draft.propose([span], 4).tolist()[0]
    assert all(0 <= token < 4096 for token in best) and len(set(best)) > 1
    greatest = max(best)
    expected = best[: best.index(greatest)]
    expected += [NO_GUESS] * (4 - len(expected))
    assert make_model(folders["qwen3"], greatest)[0].propose([span], 4).tolist() == [expected]
    ending, span = make_model(folders["qwen3"], 4096, longest=11)
    assert ending.propose([span], 4).tolist() == [[*best[:2], NO_GUESS, NO_GUESS]]
    assert ending.propose([span], 1).tolist() == [best[:1]], "nothing of a guess is remembered"


def test_other_weights_and_other_arithmetic_are_other_forms(folders, tmp_path):
    shaken = tmp_path / "shaken"
    shutil.copytree(folders["small"], shaken)
    weights = load_file(shaken / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, shaken / "model.safetensors", {"format": "pt"})
    each = [folders["small"], folders["other"], shaken, folders["small"]]
    forms = [DraftFolder(str(folder)).declare(PAGE, "fp32").form for folder in each]
    assert len(set(forms)) == 3 and forms[0] == forms[3]


def test_pages_with_the_entries_of_another_draft_are_not_taken(folders, tmp_path):
    store, seen = f"file://{tmp_path}/store?size=64MiB", []
    for draft in ("small", "other", "small"):
        engine, _ = open_with(
            folders[draft],
            folders["qwen3"],
            page_tokens=PAGE,
            store=store,
            cache={"host_bytes": 16 * MIB, "fetch": "wait"},
        )
        engine.cache.compute.observe = lambda *_: None  # what is stored is read, however fast this machine is
        [answer] = run(engine, make_ask("a", words(2 * PAGE + 9)))
        seen.append((answer.usage.store_tokens, engine.cache.identity, tokens_of(answer)))
        engine.cache.close(60)
    found, identities, answers = zip(*seen, strict=True)
    assert found == (0, 0, 2 * PAGE)
    assert identities[0] == identities[1] and answers[0] == answers[1] == answers[2]


def test_both_models_are_counted_before_one_is_read(folders, monkeypatch):
    opened = open_model(Wish(str(folders["qwen3"]), draft=str(folders["small"])))
    loaded = opened.load(lambda _: None)
    sizes = [sum(each.nbytes for each in own.values()) for own in (loaded.draft_weights, loaded.weights)]
    check = partial(check_memory, "both", cache_bytes=0)
    opened.load(partial(check, bytes_free=sum(sizes)))
    read = []
    monkeypatch.setattr(Checkpoint, "read", lambda _, name: read.append(name))
    with pytest.raises(ConfigError, match=r"model = 'both': .* GB, .*draft 0.0 GB, .* GB"):
        opened.load(partial(check, bytes_free=sum(sizes) - 1))
    assert not read


def other_tokens(path):
    """A tokenizer that has two tokens the other way round."""
    text = json.loads((path / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    (first, a), (second, b) = sorted(vocab.items(), key=lambda each: each[1])[700:702]
    vocab[first], vocab[second] = b, a
    (path / "tokenizer.json").write_text(json.dumps(text))
    return a, first, second


def test_what_can_not_guess_is_refused_by_name(folders, tmp_path):
    def refused(draft, why, **options):
        with pytest.raises(ConfigError, match=why) as error:
            open_with(draft, **options)
        assert error.value.field in ("draft", "speculate")

    refused(tmp_path / "nowhere", "draft = .*nowhere: is no folder")
    strange = tmp_path / "strange"
    shutil.copytree(folders["small"], strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "bert", "architectures": []}))
    refused(strange, "draft = .*strange.*: model_type = .*bert.*: is none of deepseek_v4, qwen3")
    (strange / "config.json").write_text(json.dumps(config))
    token, ours, theirs = other_tokens(strange)
    refused(strange, f"another tokenizer: token {token} is {ours!r} for the model, and {theirs!r} there")
    refused(folders["small"], "draft = .*can not be cached with the model: format = 'fp8'", format="fp8")
    refused("tiny-v4", "draft = 'tiny-v4'.*page_tokens", model=folders["qwen3"], page_tokens=32)
    refused("tiny-v4", "draft = 'tiny-v4': excludes --speculate ngram", speculate="ngram")
    refused(None, "speculate = 'draft': needs a model that guesses: --draft FOLDER", speculate="draft")
