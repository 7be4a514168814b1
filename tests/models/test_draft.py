"""Goal: the draft's logits are the specification's, and depend on its own cache. Method: a dense computation
of one sequence, written straight from the formulas; then the same text in pieces, resumed from a tail, after
guesses that were refused, with one MTP layer and with two."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.models.reference import Shape, make_reference, our_config, random_tokens
from tests.models.spans import one_pool
from tiercel.errors import SpecError
from tiercel.kernels import reference as k
from tiercel.kernels.reference import hyper
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import part_of
from tiercel.models.deepseek_v4.hyper import site_of
from tiercel.models.deepseek_v4.layer import Experts
from tiercel.models.deepseek_v4.model import build
from tiercel.models.rotary import Rotary
from tiercel.spec import deepseek_v4, deepseek_v4_mtp

TOKENS, PAGE, TOLERANCE = 300, 128, 1e-4


def make_weights(reference):
    """The reference's weights and, HF having no draft, random ones for it: those of its second layer,
    shaken."""
    weights, random = dict(reference.state_dict()), torch.Generator().manual_seed(7)
    d = reference.config.hidden_size
    for name in list(weights):
        if name.startswith("model.layers.1."):
            shaken = weights[name] + 0.1 * torch.randn(weights[name].shape, generator=random)
            weights["mtp.0." + name.removeprefix("model.layers.1.")] = shaken
    for name, shape in {
        "e_proj": (d, d),
        "h_proj": (d, d),
        "enorm": (d,),
        "hnorm": (d,),
        "norm": (d,),
    }.items():
        noise = torch.randn(shape, generator=random)
        weights[f"mtp.0.{name}.weight"] = noise * d**-0.5 if len(shape) == 2 else 1 + 0.2 * noise
    for name in ("hc_fn", "hc_base", "hc_scale"):
        like = weights[f"model.hc_head.{name}"]
        weights[f"mtp.0.hc_head.{name}"] = like + 0.1 * torch.randn(like.shape, generator=random)
    return weights


class Drafted:
    """A model with its draft. `logits`: those of the draft, one for each guess."""

    def __init__(self, reference, weights, modules=1, guesses_max=4, name_of=lambda stream: stream.name):
        config = reference.config.to_dict() | {"num_nextn_predict_layers": modules}
        draft = deepseek_v4_mtp(config, PAGE, "fp32", hidden=True)
        spec = deepseek_v4(config, PAGE, "fp32").with_draft(draft)
        spec = replace(spec, streams=tuple(replace(each, name=name_of(each)) for each in spec.streams))
        self.memory = DeviceMemory(spec, pages=8, tails=4)
        own = our_config(reference)
        self.model = build(own, weights, self.memory, rings=3, guesses_max=guesses_max)
        self.pages = torch.tensor([4, 2, 7])
        self.logits, self.streams = [], []
        follow = self.model.draft.follow

        def listen(spans, x, tokens):
            self.streams.append(x.clone())
            follow(spans, x, tokens)

        self.model.draft.follow = listen
        for module in self.model.draft.modules:
            module.logits = self._told(module.logits)

    def _told(self, real):
        def logits(x, lm_head):
            self.logits.append(real(x, lm_head))
            return self.logits[-1]

        return logits

    def run(self, tokens, cuts, *, start=0, ring=0, tails=None):
        self.streams = []
        for end in cuts:
            due = {b: p for b, p in (tails or {}).items() if start < b <= end}
            self.model.forward([one_pool(tokens[start:end], start, self.pages, ring, tails=due)])
            start = end

    def propose(self, tokens, at, count=1, ring=0):
        """(guesses, their logits) after token `at`, which the target has not computed."""
        self.logits = []
        span = one_pool(tokens[at : at + 1], at, self.pages, ring)
        return self.model.draft.propose([span], count)[0].tolist(), [each[0] for each in self.logits]


@pytest.fixture(scope="module")
def case():
    """`expected[i]`: the draft's logits for the token after token i + 1."""
    reference = make_reference(Shape(hash_layers=1))
    weights, tokens = make_weights(reference), random_tokens(TOKENS)
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [TOKENS])
    [expected] = dense_draft(our_config(reference), weights, drafted.streams[0], tokens)
    return reference, weights, tokens, expected


@torch.inference_mode()
def dense_draft(config, weights, x, tokens, modules=1):
    """The logits of each module, every token at once."""
    answers = []
    for i in range(modules):
        x, logits = dense_module(config, weights, x, tokens[i:], i)
        answers.append(logits)
    return answers


def dense_module(config, weights, x, tokens, number):
    """(streams, logits), with a mask for the window. x[i] are the streams of tokens[i]."""
    w, eps = part_of(weights, f"mtp.{number}."), config.rms_norm_eps
    embedded = k.norm(weights["model.embed_tokens.weight"][tokens[1:]], w["enorm.weight"], eps)
    x = F.linear(k.norm(x[:-1], w["hnorm.weight"], eps), w["h_proj.weight"])
    x = x + F.linear(embedded, w["e_proj.weight"])[:, None]
    n = len(x)
    site = site_of(config, k, part_of(w, "attn_hc."), w["input_layernorm.weight"])
    h, place, mix = hyper.read(x, site)
    a = part_of(w, "self_attn.")
    turn = Rotary(config.rope_main, config.rope_dim).at(torch.arange(n), n)
    q = F.linear(k.norm(F.linear(h, a["q_a_proj.weight"]), a["q_a_norm.weight"], eps), a["q_b_proj.weight"])
    q = k.norm_rotate(q.view(n, config.heads, -1), turn, eps=eps)
    kv = F.linear(h, a["kv_proj.weight"])[:, None]
    kv = k.norm_rotate(kv, turn, eps=eps, weight=a["kv_norm.weight"])[:, 0]
    scores = torch.einsum("qhd,kd->hqk", q, kv) * config.head_dim**-0.5
    behind = torch.arange(n)[:, None] - torch.arange(n)
    scores = scores.masked_fill((behind < 0) | (behind >= config.window), float("-inf"))
    sinks = a["sinks"].view(-1, 1, 1).expand(-1, n, 1)
    attended = torch.einsum("hqk,kd->qhd", torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], kv)
    attended = k.norm_rotate(attended, turn, back=True).reshape(n, config.o_groups, -1)
    low = torch.einsum(
        "tgi,goi->tgo", attended, a["o_a_proj.weight"].view(config.o_groups, config.o_lora_rank, -1)
    )
    x = hyper.write(x, F.linear(low.flatten(1), a["o_b_proj.weight"]), place, mix)
    site = site_of(config, k, part_of(w, "ffn_hc."), w["post_attention_layernorm.weight"])
    seen, place, mix = hyper.read(x, site)
    x = hyper.write(x, Experts(config, k, part_of(w, "mlp."))(seen, tokens[1:]), place, mix)
    head = site_of(config, k, part_of(w, "hc_head.hc_"), w["norm.weight"])
    return x, F.linear(hyper.head(x, head), weights["lm_head.weight"])


def distance(ours, theirs):
    return (ours - theirs).abs().max().item()


def close(drafted, case, at, ring=0):
    """Whether the draft says after token `at` what it must say."""
    return distance(drafted.propose(case[2], at, ring=ring)[1][0], case[3][at - 1]) < TOLERANCE


@pytest.mark.parametrize("cuts", [[290], [1, 2, 130, 290], [128, 256, 257, 258, 290]], ids=str)
def test_the_draft_follows_the_target_however_the_text_is_cut(case, cuts):
    reference, weights, tokens, _ = case
    drafted, start = Drafted(reference, weights), 0
    for end in cuts:
        drafted.run(tokens, [end], start=start)
        assert close(drafted, case, end) and close(drafted, case, end), "a proposal changes nothing"
        start = end


def test_the_first_guess_of_a_text_of_one_token(case):
    reference, weights, tokens, _ = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [1])
    assert close(drafted, case, 1)


@pytest.mark.parametrize("boundary", [128, 256])
def test_the_draft_goes_on_exactly_from_a_tail(case, boundary):
    reference, weights, tokens, _ = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [200, 300], tails={128: 1, 256: 3})
    drafted.model.resume(1, [(boundary, {128: 1, 256: 3}[boundary])])
    start = boundary
    for end in (boundary + 1, boundary + 5, boundary + 40):
        assert close(drafted, case, start, ring=1)
        drafted.run(tokens, [end], start=start, ring=1)
        start = end
    assert close(drafted, case, start, ring=1)


@pytest.mark.parametrize("at", [126, 127, 128, 200, 255, 256])
def test_refused_guesses_leave_no_trace(case, at):
    """Four wrong tokens are computed with the right one, over every kind of boundary, and the tail that they
    reach is written again."""
    reference, weights, tokens, expected = case
    truth = Drafted(reference, weights)
    truth.run(tokens, [at, 290], tails={128: 1, 256: 3})
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [at], tails={128: 1, 256: 3})
    wrong = tokens.clone()
    for start in range(at, at + 9, 3):  # one guess is right
        drafted.propose(tokens, start, 4)
        wrong[:] = tokens
        wrong[start + 2 : start + 5] = (tokens[start + 2 : start + 5] + 7) % 256
        drafted.run(wrong, [start + 5], start=start, tails={128: 1, 256: 3})
        drafted.run(tokens, [start + 3], start=start + 2, tails={128: 1, 256: 3})
        assert close(drafted, case, start + 3)
    drafted.run(tokens, [290], start=at + 9, tails={128: 1, 256: 3})
    for each in drafted.memory.spec.tail_streams:
        for layer in each.layers:
            assert torch.equal(drafted.memory.view(each.name, layer), truth.memory.view(each.name, layer))
    used = truth.pages[: 290 // PAGE]
    for each in drafted.memory.spec.page_streams:
        for layer in each.layers:
            ours, theirs = (m.memory.view(each.name, layer)[used] for m in (drafted, truth))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("modules, seed", [(1, 3), (1, 4), (2, 3)])
def test_whenever_texts_are_guessed_the_bits_are_the_same(case, modules, seed):
    """Two texts: pieces of any length, some with wrong tokens at the end, also over a page's end; a guess now
    and then, for one of the texts or both, so that one or many tokens have made no entries yet."""
    reference, weights, tokens, _ = case
    weights = weights | shaken(weights)
    truth, texts = [], [tokens, tokens.flip(0)]
    for text in texts:
        own = Drafted(reference, weights, modules)
        own.run(text, [100])
        truth.append({})
        for at in range(100, 200):
            truth[-1][at] = own.propose(text, at, 3)
            own.run(text, [at + 1], start=at)
    drafted, random = Drafted(reference, weights, modules), Random(seed)
    places, at = torch.tensor([[4, 2], [7, 5]]), [0, 0]
    for i in (0, 1):
        drafted.model.forward([one_pool(texts[i][:100], 0, places[i], i)])
        at[i] = 100
    while max(at) < 190:
        guessed = random.choice([[], [], [0], [1], [0, 1]])
        if guessed:
            drafted.logits = []
            spans = [one_pool(texts[i][at[i] : at[i] + 1], at[i], places[i], i) for i in guessed]
            guesses = drafted.model.draft.propose(spans, 3)
            for row, i in enumerate(guessed):
                expected, logits = truth[i][at[i]]
                assert guesses[row].tolist() == expected
                assert all(torch.equal(a[row], b) for a, b in zip(drafted.logits, logits, strict=True))
        spans = []
        for i in random.choice([[0], [1], [0, 1]]):
            right, wrong = random.choice([1, 1, 1, 2, 5, 12]), random.choice([0, 0, 1, 4])
            if at[i] in range(PAGE - 5, PAGE):
                right = 1
            own = texts[i][at[i] : at[i] + right + wrong].clone()
            own[right:] = (own[right:] + 7) % 256
            tails = {PAGE: i} if at[i] < PAGE <= at[i] + len(own) else {}
            spans.append(one_pool(own, at[i], places[i], i, tails))
            at[i] = min(at[i] + right, 199)
        drafted.model.forward(spans)


def shaken(weights):
    """Parameters of a second MTP layer."""
    random, made = torch.Generator().manual_seed(11), {}
    for name in [name for name in weights if name.startswith("mtp.0.")]:
        noise = torch.randn(weights[name].shape, generator=random)
        made[name.replace("mtp.0.", "mtp.1.")] = weights[name] + 0.1 * noise
    return made


def test_a_second_guess_goes_beside_the_drafts_own_streams(case):
    """As if the text had gone so: the draft's entries of guesses are seen, and then written again."""
    reference, weights, tokens, _ = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [200])
    guesses, logits = drafted.propose(tokens, 200, 3)
    x, text = drafted.streams[0], torch.cat([tokens[:201], torch.tensor(guesses)])
    for i, guess in enumerate(guesses):
        more, expected = dense_module(our_config(reference), weights, x_after(x), text[: 201 + i], 0)
        assert distance(logits[i], expected[-1]) < TOLERANCE
        assert guess == expected[-1].argmax()
        x = torch.cat([x, more[-1:]])


def x_after(x):
    """With a row for the newest token, whose streams nobody reads."""
    return torch.cat([x, x[-1:]])


@pytest.mark.parametrize("at", [1, 2, 200, 256])
def test_with_two_mtp_layers_the_second_guesses_the_second_token(case, at):
    reference, weights, tokens, _ = case
    weights = weights | shaken(weights)
    drafted = Drafted(reference, weights, modules=2)
    cuts = [1, at] if at > 1 else [1]
    drafted.run(tokens, cuts, tails={128: 1, 256: 3})
    ring = 0
    if at == 256:
        drafted.model.resume(1, [(256, 3)])
        ring = 1
    guesses, logits = drafted.propose(tokens, at, 3, ring)
    whole = Drafted(reference, weights, modules=2)
    whole.run(tokens, [at])
    text = torch.cat([tokens[: at + 1], torch.tensor(guesses)])
    config, x = our_config(reference), whole.streams[0]
    with torch.inference_mode():
        first, told = dense_module(config, weights, x_after(x), text[: at + 1], 0)
        assert distance(logits[0], told[-1]) < TOLERANCE
        # beside token i + 1 are the first module's streams of entry i
        second, told = dense_module(config, weights, x_after(first), text[1 : at + 2], 1)
        assert distance(logits[1], told[-1]) < TOLERANCE
        longer = torch.cat([first, second[-1:], second[-1:]])
        _, told = dense_module(config, weights, longer, text[1 : at + 3], 1)
        assert distance(logits[2], told[-1]) < TOLERANCE


def test_names_of_streams_are_for_people_alone(case):
    """The model finds a stream by its role and a layer."""
    reference, weights, tokens, _ = case
    plain = Drafted(reference, weights)
    renamed = Drafted(reference, weights, name_of=lambda stream: stream.name[::-1])
    for each in (plain, renamed):
        each.run(tokens, [TOKENS], tails={PAGE: 1})
    assert torch.equal(plain.memory.flat_pages, renamed.memory.flat_pages)
    assert torch.equal(plain.memory.flat_tails, renamed.memory.flat_tails)
    assert plain.propose(tokens, TOKENS - 1, 2)[0] == renamed.propose(tokens, TOKENS - 1, 2)[0]


def test_without_its_cache_the_draft_says_something_else(case):
    reference, weights, tokens, _ = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [256], tails={256: 3})
    drafted.model.resume(1, [(256, 3)])
    assert close(drafted, case, 256, ring=1)
    drafted.memory.view("draft_window", our_config(reference).layers)[3] = 0
    drafted.model.resume(1, [(256, 3)])
    assert not close(drafted, case, 256, ring=1)


def test_a_draft_without_its_hidden_stream_is_refused(case):
    reference, weights, *_ = case
    config = reference.config.to_dict()
    spec = deepseek_v4(config, PAGE, "fp32").with_draft(deepseek_v4_mtp(config, PAGE, "fp32"))
    with pytest.raises(SpecError, match=r"draft = .*has no stream `hidden`"):
        build(our_config(reference), weights, DeviceMemory(spec, pages=2, tails=2), rings=1)
