"""Goal: the EAGLE head says what its formulas say, and its bits depend on nothing but a token's text: not on
cuts, company, refused guesses, or on whether its entries were computed or came back. Method: a dense
computation of one sequence; then bytes of pages and logits of guesses, bit by bit."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.models.eagle import HEAD_DIM, HEADS, KV_HEADS, make_head
from tests.models.reference import Shape, make_reference, our_config, random_tokens
from tiercel.errors import SpecError
from tiercel.kernels import reference as k
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Span, part_of
from tiercel.models.deepseek_v4.eagle_weights import PREFIX
from tiercel.models.deepseek_v4.model import DeepseekV4
from tiercel.spec import Heads, deepseek_v4, deepseek_v4_eagle

ENTRIES, HIDDEN = "draft_kv", "draft_hidden"
TOKENS, PAGE, GUESSES, TOLERANCE = 300, 128, 4, 1e-4
PAGES = torch.tensor([4, 2, 7])
OTHER_PAGES = torch.tensor([1, 6, 5])
REPLAY = 4 * 31 + 1
"""Tokens that a text without a tail computes again: four layers of window 32, and one hidden state."""


class Drafted:
    """A target of random weights with an EAGLE head. It hears the streams and the logits of guesses."""

    def __init__(self, reference, weights, format="fp32", **options):
        config = reference.config.to_dict()
        draft = deepseek_v4_eagle(config, Heads(KV_HEADS, HEAD_DIM), PAGE, format)
        self.memory = DeviceMemory(deepseek_v4(config, PAGE, format).with_draft(draft), pages=8, tails=4)
        self.memory.flat_pages.fill_(255)  # NaN: what was not written must not be read
        options = {"guesses_max": GUESSES} | options
        self.model = DeepseekV4(our_config(reference), weights, self.memory, rings=3, **options)
        self.layer = our_config(reference).layers
        self.streams, self.logits = [], []
        follow, guess = self.model.draft.follow, self.model.draft.guess

        def hear_streams(spans, x, tokens):
            self.streams.append(x.clone())
            follow(spans, x, tokens)

        def hear_logits(*given):
            x, logits = guess(*given)
            self.logits.append(logits.clone())
            return x, logits

        self.model.draft.follow, self.model.draft.guess = hear_streams, hear_logits

    def run(self, tokens, cuts, *, start=0, ring=0, tails=None, pages=PAGES, **options):
        for end in cuts:
            due = {b: p for b, p in (tails or {}).items() if start < b <= end}
            self.model.forward([Span(tokens[start:end], start, pages, ring, tails=due, **options)])
            start = end
        return self

    def propose(self, tokens, at, *, ring=0, pages=PAGES, count=GUESSES):
        """(guesses, the logits they were drawn from [count, vocabulary]) after the token at `at`"""
        self.logits = []
        guesses = self.model.draft.propose([Span(tokens[at : at + 1], at, pages, ring)], count)
        return guesses[0], torch.cat(self.logits)

    def entries(self, count, pages=PAGES):
        """The bytes of the head's entries of the first tokens: [tokens, kv heads, bytes]."""
        rows = self.memory.view(ENTRIES, self.layer)[pages].unflatten(1, (KV_HEADS, PAGE, -1))
        return rows.transpose(1, 2).flatten(0, 1)[:count].clone()


@pytest.fixture(scope="module")
def case():
    reference = make_reference(Shape(layers=("sliding_attention",) + Shape.layers[2:5], hash_layers=1))
    head = make_head(our_config(reference))
    weights = dict(reference.state_dict()) | {PREFIX + name: tensor for name, tensor in head.items()}
    return reference, weights, random_tokens(TOKENS)


@pytest.fixture(scope="module")
def whole(case):
    """All at once, without any guess."""
    reference, weights, tokens = case
    return Drafted(reference, weights).run(tokens, [TOKENS])


@pytest.fixture(scope="module")
def ahead(case):
    """Position → the logits of guesses there, of a text that was computed once, without cuts."""
    reference, weights, tokens = case
    found = {}
    for at in (1, 128, 129, 200, 255, 256, 257):
        found[at] = Drafted(reference, weights).run(tokens, [at]).propose(tokens, at)[1]
    return found


def turned(x, positions, theta):
    """x [tokens, heads, dim]: channel i turns with channel i + dim / 2."""
    half = x.shape[-1] // 2
    angle = (positions[:, None] * theta ** -(torch.arange(half) / half))[:, None]
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@torch.inference_mode()
def dense_guesses(config, weights, streams, tokens, at, count):
    """The logits of `count` guesses after the token at `at`: the target has computed the tokens before it."""
    w, eps = part_of(weights, PREFIX), config.rms_norm_eps

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"])

    def normed(x, name):
        return k.norm(x, w[f"{name}.weight"], eps)

    hidden = linear(normed(streams[:at].flatten(1), "streams_norm"), "streams_proj")
    hidden = torch.cat([torch.zeros(1, config.hidden_size), hidden])
    text, answers = tokens[: at + 1].tolist(), []
    for _ in range(count):
        embedded = weights["model.embed_tokens.weight"][torch.tensor(text)]
        x = linear(torch.cat([normed(embedded, "enorm"), normed(hidden, "hnorm")], 1), "fc")
        h, positions = normed(x, "input_layernorm"), torch.arange(len(text))
        q, key, value = (linear(h, f"self_attn.{name}_proj").unflatten(1, (-1, HEAD_DIM)) for name in "qkv")
        q = turned(normed(q, "self_attn.q_norm"), positions, config.rope_main.theta)[-1]
        key = turned(normed(key, "self_attn.k_norm"), positions, config.rope_main.theta)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
        weight = (torch.einsum("hd,khd->hk", q, key) * HEAD_DIM**-0.5).softmax(-1)
        x = x[-1] + linear(torch.einsum("hk,khd->hd", weight, value).flatten(), "self_attn.o_proj")
        h = normed(x, "post_attention_layernorm")
        x = x + linear(F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")
        answers.append(F.linear(normed(x, "norm"), weights["lm_head.weight"]))
        text.append(int(answers[-1].argmax()))
        hidden = torch.cat([hidden, x[None]])
    return torch.stack(answers)


@pytest.mark.parametrize("at", [1, 128, 200, 257])
def test_guesses_are_those_of_the_formulas(case, whole, ahead, at):
    reference, weights, tokens = case
    expected = dense_guesses(our_config(reference), weights, whole.streams[0], tokens, at, GUESSES)
    assert (ahead[at] - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.3, "the tolerance is small beside the logits"


def test_the_first_token_of_a_text_is_guessed_after_without_a_hidden_state(case):
    reference, weights, tokens = case
    _, logits = Drafted(reference, weights).propose(tokens, 0)
    expected = dense_guesses(our_config(reference), weights, torch.zeros(0, 4, 64), tokens, 0, GUESSES)
    assert (logits - expected).abs().max() < TOLERANCE


CUTS = [[1, 2, 130, TOKENS], [128, 256, 257, 258, TOKENS], [127, 129, 255, TOKENS]]


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_entries_do_not_depend_on_where_a_text_is_cut(case, cuts, format):
    reference, weights, tokens = case
    alone = Drafted(reference, weights, format).run(tokens, [TOKENS])
    assert torch.equal(
        Drafted(reference, weights, format).run(tokens, cuts).entries(TOKENS), alone.entries(TOKENS)
    )


def test_entries_and_guesses_do_not_depend_on_company(case, whole, ahead):
    reference, weights, tokens = case
    drafted, other = Drafted(reference, weights), random_tokens(TOKENS, seed=5)
    for start, end in ((0, 50), (50, 200)):
        drafted.model.forward(
            [
                Span(other[start // 2 : end // 2], start // 2, OTHER_PAGES, 2),
                Span(tokens[start:end], start, PAGES, 0),
            ]
        )
    assert torch.equal(drafted.entries(200), whole.entries(200))
    drafted.logits = []
    spans = [Span(other[100:101], 100, OTHER_PAGES, 2), Span(tokens[200:201], 200, PAGES, 0)]
    guesses = drafted.model.draft.propose(spans, GUESSES)
    assert torch.equal(torch.stack(drafted.logits, 1)[1], ahead[200])
    assert torch.equal(guesses[1], ahead[200].argmax(-1))


# Going on from what is cached


@pytest.mark.parametrize("boundary", [128, 256])
@pytest.mark.parametrize(
    "cuts", [[TOKENS], [128, 256, TOKENS], [129, 257, TOKENS], [100, 255, TOKENS]], ids=str
)
def test_after_a_tail_guesses_and_entries_are_those_of_a_text_computed_at_once(
    case, whole, ahead, boundary, cuts
):
    """A tail may be written in the middle, at the end or with the first token of a call."""
    reference, weights, tokens = case
    drafted = Drafted(reference, weights).run(tokens, cuts, tails={128: 1, 256: 3})
    drafted.model.resume(1, [(boundary, {128: 1, 256: 3}[boundary])])
    assert torch.equal(drafted.propose(tokens, boundary, ring=1)[1], ahead[boundary])
    drafted.run(tokens, [boundary + 1], start=boundary, ring=1)
    assert torch.equal(drafted.propose(tokens, boundary + 1, ring=1)[1], ahead[boundary + 1])
    drafted.run(tokens, [TOKENS], start=boundary + 1, ring=1)
    assert torch.equal(drafted.entries(TOKENS), whole.entries(TOKENS))


def test_without_a_tail_a_replay_gives_the_same_guesses_and_writes_no_page_again(case, whole, ahead):
    reference, weights, tokens = case
    drafted = Drafted(reference, weights).run(tokens, [256])
    assert drafted.memory.spec.replay_tokens == REPLAY
    before = drafted.entries(256)
    drafted.memory.view(ENTRIES, drafted.layer)[PAGES[1]] = 7  # a replay that wrote would undo this
    drafted.model.resume(1, [])
    drafted.run(tokens, [256], start=256 - REPLAY, ring=1, write_from=256)
    assert (drafted.entries(256)[128:] == 7).all()
    rows = before[128:].transpose(0, 1).flatten()
    drafted.memory.view(ENTRIES, drafted.layer)[PAGES[1]] = rows
    assert torch.equal(drafted.propose(tokens, 256, ring=1)[1], ahead[256])
    drafted.run(tokens, [TOKENS], start=256, ring=1)
    assert torch.equal(drafted.entries(TOKENS), whole.entries(TOKENS))


@pytest.mark.parametrize("lost", [ENTRIES, HIDDEN])
def test_without_its_bytes_the_head_says_something_else(case, ahead, lost):
    reference, weights, tokens = case
    drafted = Drafted(reference, weights).run(tokens, [256], tails={256: 3})
    drafted.memory.view(lost, drafted.layer)[PAGES[:2] if lost == ENTRIES else 3] = 0
    drafted.model.resume(1, [(256, 3)])
    distance = (drafted.propose(tokens, 256, ring=1)[1][0] - ahead[256][0]).abs().max()
    assert distance > 100 * TOLERANCE


# Guesses that are refused


def tail_at(case, boundary):
    """The bytes of the hidden state in a tail, of a text computed at once."""
    reference, weights, tokens = case
    drafted = Drafted(reference, weights).run(tokens, [boundary], tails={boundary: 0})
    return drafted.memory.view(HIDDEN, drafted.layer)[0]


@pytest.mark.parametrize("at", [1, 129, 200, 255, 256, 257])
def test_guesses_that_nobody_takes_leave_no_trace(case, whole, ahead, at):
    """At 255 and 256 a chain of guesses goes on into the next page, or begins there."""
    reference, weights, tokens = case
    drafted = Drafted(reference, weights).run(tokens, [at])
    for _ in range(2):
        assert torch.equal(drafted.propose(tokens, at)[1], ahead[at])
    drafted.run(tokens, [TOKENS], start=at)
    assert torch.equal(drafted.entries(TOKENS), whole.entries(TOKENS))


@pytest.mark.parametrize("at", [1, 125, 126, 127, 128, 200, 255])
@pytest.mark.parametrize("accepted", range(GUESSES + 1))
def test_what_the_target_computed_of_refused_guesses_is_overwritten(case, whole, at, accepted):
    """The head's part of a step with four guesses, some of them refused: it is given the target's streams of
    wrong tokens. A tail that such a step wrote is right if all tokens before it were accepted."""
    reference, weights, tokens = case
    drafted, x = Drafted(reference, weights), whole.streams[0]
    follow, end, last = drafted.model.draft.follow, at + 1 + GUESSES, at + accepted
    boundaries = [b for b in (128, 256) if at < b <= end]
    with torch.inference_mode():
        follow([Span(tokens[:at], 0, PAGES, 0)], x[:at], tokens[:at])
        wrong, wrong_x = tokens[at:end].clone(), x[at:end].clone()
        wrong[accepted + 1 :], wrong_x[accepted + 1 :] = 3, 0.5
        tails = dict.fromkeys(boundaries, 2)
        follow([Span(wrong, at, PAGES, 0, tails=tails)], wrong_x, wrong)
        reached = [b for b in boundaries if b <= last + 1]
        for boundary in reached:
            hidden = drafted.memory.view(HIDDEN, drafted.layer)[2]
            assert torch.equal(hidden, tail_at(case, boundary))
        rest = slice(last + 1, TOKENS)
        follow([Span(tokens[rest], last + 1, PAGES, 0)], x[rest], tokens[rest])
    assert torch.equal(drafted.entries(TOKENS), whole.entries(TOKENS))


def test_a_head_without_rows_for_guesses_would_not_know_which_hidden_state_was_accepted(case, whole):
    """The control of the test above: `guesses_max` rows are needed."""
    reference, weights, tokens = case
    drafted, x = Drafted(reference, weights, guesses_max=0), whole.streams[0]
    with torch.inference_mode():
        for start, end in ((0, 205), (201, TOKENS)):
            span = Span(tokens[start:end], start, PAGES, 0)
            drafted.model.draft.follow([span], x[start:end], tokens[start:end])
    same = (drafted.entries(TOKENS) == whole.entries(TOKENS)).flatten(1).all(1)
    assert same.nonzero().flatten().tolist() == [i for i in range(TOKENS) if i != 201]


# Declarations


def test_entries_of_another_head_have_another_form(case):
    reference, *_ = case
    config, heads = reference.config.to_dict(), Heads(KV_HEADS, HEAD_DIM)
    target = deepseek_v4(config, PAGE, "fp32")
    forms = [
        target.with_draft(deepseek_v4_eagle(config, heads, PAGE, "fp32", weights)).form
        for weights in ("one", "two", "one")
    ]
    assert forms[0] == forms[2] != forms[1]
    assert target.form not in forms


def test_a_page_has_the_entries_and_a_tail_has_one_hidden_state(case):
    reference, *_ = case
    config, heads = reference.config.to_dict(), Heads(KV_HEADS, HEAD_DIM)
    target = deepseek_v4(config, PAGE, "fp32")
    spec = target.with_draft(deepseek_v4_eagle(config, heads, PAGE, "fp32", "abc"))
    assert spec.page_bytes == target.page_bytes + PAGE * KV_HEADS * 2 * HEAD_DIM * 4
    assert spec.tail_bytes == target.tail_bytes + 4 * 64
    assert type(spec).from_dict(spec.to_dict()) == spec


def test_streams_of_a_head_without_its_weights_are_refused(case):
    reference, *_ = case
    with pytest.raises(SpecError, match=r"draft = .*there are no weights of one"):
        Drafted(reference, dict(reference.state_dict()))
