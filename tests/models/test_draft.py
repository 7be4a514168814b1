"""Goal: the draft's logits are the specification's, and depend on its own cache. Method: a dense computation
of one sequence, written
straight from the formulas; then the same text in pieces, resumed from a tail, and proposed ahead of the
target."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.models.reference import Shape, make_reference, our_config, random_tokens
from tiercel.errors import SpecError
from tiercel.kernels import reference as k
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Span, part_of
from tiercel.models.deepseek_v4.layer import Experts, site_of
from tiercel.models.deepseek_v4.model import DeepseekV4
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
    def __init__(self, reference, weights):
        config = reference.config.to_dict()
        draft = deepseek_v4_mtp(config, PAGE, "fp32", hidden=True)
        self.memory = DeviceMemory(deepseek_v4(config, PAGE, "fp32").with_draft(draft), pages=8, tails=4)
        self.model = DeepseekV4(our_config(reference), weights, self.memory, rings=3)
        self.pages = torch.tensor([4, 2, 7])
        self.draft_logits = []
        self.streams = []
        follow = self.model.draft.follow

        def listen(spans, x, tokens):
            self.streams.append(x.clone())
            self.draft_logits.append(follow(spans, x, tokens))

        self.model.draft.follow = listen

    def run(self, tokens, cuts, *, start=0, ring=0, tails=None):
        self.draft_logits, self.streams = [], []
        for end in cuts:
            due = {b: p for b, p in (tails or {}).items() if start < b <= end}
            self.model.forward([Span(tokens[start:end], start, self.pages, ring, tails=due)])
            start = end
        return torch.cat(self.draft_logits)


@pytest.fixture(scope="module")
def case():
    reference = make_reference(Shape(hash_layers=1))
    weights, tokens = make_weights(reference), random_tokens(TOKENS)
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [TOKENS])
    expected = dense_draft(our_config(reference), weights, drafted.streams[0], tokens)
    return reference, weights, tokens, expected


@torch.inference_mode()
def dense_draft(config, weights, x, tokens):
    """Every token at once, with a mask for the window."""
    w, eps = part_of(weights, "mtp.0."), config.rms_norm_eps
    embedded = k.norm(weights["model.embed_tokens.weight"][tokens[1:]], w["enorm.weight"], eps)
    x = F.linear(k.norm(x[:-1], w["hnorm.weight"], eps), w["h_proj.weight"])
    x = x + F.linear(embedded, w["e_proj.weight"])[:, None]
    n = len(x)
    site = site_of(config, k, part_of(w, "attn_hc."), w["input_layernorm.weight"])
    h, place, mix = k.hyper_read(x, site)
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
    x = k.hyper_write(x, F.linear(low.flatten(1), a["o_b_proj.weight"]), place, mix)
    site = site_of(config, k, part_of(w, "ffn_hc."), w["post_attention_layernorm.weight"])
    seen, place, mix = k.hyper_read(x, site)
    x = k.hyper_write(x, Experts(config, k, part_of(w, "mlp."))(seen, tokens[1:]), place, mix)
    return F.linear(
        k.hyper_head(x, site_of(config, k, part_of(w, "hc_head.hc_"), w["norm.weight"])),
        weights["lm_head.weight"],
    )


def distance(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("cuts", [[TOKENS], [1, 2, 130, TOKENS], [128, 256, 257, 258, TOKENS]], ids=str)
def test_the_draft_follows_the_target_however_the_text_is_cut(case, cuts):
    reference, weights, tokens, expected = case
    assert distance(Drafted(reference, weights).run(tokens, cuts), expected) < TOLERANCE


def test_the_draft_goes_on_exactly_from_a_tail(case):
    reference, weights, tokens, expected = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [200, 300], tails={128: 1, 256: 3})
    for boundary, place in ((128, 1), (256, 3)):
        drafted.model.resume(1, [(boundary, place)])
        logits = drafted.run(tokens, [boundary + 1, boundary + 5, TOKENS], start=boundary, ring=1)
        assert distance(logits, expected[boundary - 1 :]) < TOLERANCE


def test_a_proposal_is_what_the_draft_will_say_and_is_not_remembered(case):
    reference, weights, tokens, expected = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [200])
    ahead = Span(tokens[200:201], 200, drafted.pages, 0)
    for _ in range(2):
        with torch.inference_mode():
            logits, _ = drafted.model.draft.propose(ahead)  # type: ignore[call-arg]
        assert distance(logits[0], expected[199]) < TOLERANCE
    assert distance(drafted.run(tokens, [TOKENS], start=200), expected[199:]) < TOLERANCE


def test_a_second_proposal_goes_beside_the_drafts_own_streams(case):
    """As if the text had gone so: the draft's entries of proposed tokens are seen, and then forgotten."""
    reference, weights, tokens, _ = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [200])
    with torch.inference_mode():
        one = Span(tokens[200:201], 200, drafted.pages, 0)
        _, streams = drafted.model.draft.propose(one)  # type: ignore[call-arg]
        two = Span(tokens[200:202], 200, drafted.pages, 0)
        logits, more = drafted.model.draft.propose(two, streams)
    assert torch.equal(more[:1], streams), "the first one is what it was"
    last = drafted.streams[0][-1:]
    longer = torch.cat([drafted.streams[0], streams, more[1:]])
    expected = dense_draft(our_config(reference), weights, longer[:202], tokens[:202])
    assert last.shape == streams.shape
    assert distance(logits[0], expected[-1]) < TOLERANCE


def test_without_its_cache_the_draft_says_something_else(case):
    reference, weights, tokens, expected = case
    drafted = Drafted(reference, weights)
    drafted.run(tokens, [256], tails={256: 3})
    drafted.memory.view("draft_window", our_config(reference).layers)[3] = 0
    drafted.model.resume(1, [(256, 3)])
    logits = drafted.run(tokens, [TOKENS], start=256, ring=1)
    assert distance(logits, expected[255:]) > 100 * TOLERANCE


def test_a_draft_without_its_hidden_stream_is_refused(case):
    reference, weights, *_ = case
    config = reference.config.to_dict()
    spec = deepseek_v4(config, PAGE, "fp32").with_draft(deepseek_v4_mtp(config, PAGE, "fp32"))
    with pytest.raises(SpecError, match=r"draft = .*has no stream `hidden`"):
        DeepseekV4(our_config(reference), weights, DeviceMemory(spec, pages=2, tails=2), rings=1)
