"""Goal: our Qwen3 is that of `transformers`, and its bits depend on nothing but a token's text. Method:
logits against `transformers` on the same random weights, fp32, at most 1e-4 apart (they spread by about 1);
then cuts, company, replays and scattered pages, bit by bit; then folders that are wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.qwen3 import YARN, make_moe_reference, make_reference, random_tokens, reference_logits
from tests.models.spans import one_pool
from tiercel.errors import SpecError, WeightsError
from tiercel.kernels.choice import make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models import grouped
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.families import family_of
from tiercel.models.qwen3.config import Qwen3Config, declare
from tiercel.models.qwen3.model import build
from tiercel.models.qwen3.weights import WEIGHTS

TOLERANCE = 1e-4
PAGE = 32
TOKENS = 300
SHAPES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1, "num_attention_heads": 5},
    "a kv head each": {"num_key_value_heads": 6, "head_dim": 8},
    "wide heads": {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 64},
    "YaRN": {"rope_parameters": YARN},
    "YaRN, its factor of two": {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
    "YaRN, its factor given": {"rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 4}},
}
MOE_SHAPES = {
    "experts": {},
    "experts, tied": {"tie_word_embeddings": True},
    "weights as they are": {"norm_topk_prob": False},
    "one expert of a token": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all experts": {"num_experts_per_tok": 5},
    "experts in every layer": {"mlp_only_layers": [], "num_experts": 17, "num_experts_per_tok": 4},
    "experts in every second layer": {"decoder_sparse_step": 2, "mlp_only_layers": []},
    "experts and YaRN": {"rope_parameters": YARN, "moe_intermediate_size": 8, "num_key_value_heads": 3},
}
CUTS = {
    "in one": [TOKENS],
    "at pages": [PAGE, 4 * PAGE, TOKENS],
    "anywhere": [1, 33, 100, 101, 250, TOKENS],
    "token by token from 250 on": [250, *range(251, TOKENS + 1)],
}
PAGES = torch.tensor([5, 3, 9, 1, 14, 12, 0, 17, 16, 2])


class Ours:
    """Our model on the weights of a reference, with pages in no particular order."""

    def __init__(self, reference, format="fp32", kernels="auto"):
        config = reference.config.to_dict()
        self.memory = DeviceMemory(declare(config, PAGE, format), pages=40, tails=0)
        self.memory.flat_pages.fill_(255)  # NaN in every format: what was not written must not be read
        own, weights = Qwen3Config.from_hf(config), dict(reference.state_dict())
        self.model = build(own, weights, self.memory, 4, make_kernels(kernels))

    def run(self, tokens, cuts, start=0, pages=PAGES, **options):
        """Logits of tokens start …, computed in pieces that end at the cuts."""
        logits = []
        for end in cuts:
            span = one_pool(tokens[start:end], start, pages, 0, **options)
            logits.append(self.model.forward([span], range(end - start)))
            start = end
        return torch.cat(logits)


@pytest.fixture(scope="module", params=[*SHAPES, *MOE_SHAPES])
def case(request):
    name, tokens = request.param, random_tokens(TOKENS)
    reference = make_reference(**SHAPES[name]) if name in SHAPES else make_moe_reference(**MOE_SHAPES[name])
    return reference, tokens, reference_logits(reference, tokens)


def distance(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("cuts", ["in one", "anywhere"])
def test_it_is_the_model_of_transformers(case, cuts, kernels):
    reference, tokens, expected = case
    assert distance(Ours(reference, kernels=kernels).run(tokens, CUTS[cuts]), expected) < TOLERANCE


def test_the_comparison_would_notice_halves_that_turn_as_neighbours(monkeypatch):
    reference, tokens = make_reference(), random_tokens(TOKENS)
    monkeypatch.setattr(grouped, "in_pairs", lambda x, heads: x)
    assert distance(Ours(reference).run(tokens, [TOKENS]), reference_logits(reference, tokens)) > 0.1


@pytest.mark.rotate("format")
@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_the_bits_do_not_depend_on_where_a_text_is_cut(case, format):
    reference, tokens, expected = case
    whole = Ours(reference, format).run(tokens, [TOKENS])
    assert distance(whole, expected) < {"fp32": TOLERANCE, "bf16": 0.1}[format]
    for name, cuts in CUTS.items():
        assert torch.equal(Ours(reference, format).run(tokens, cuts), whole), name


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [make_reference, make_moe_reference])
def test_the_bits_do_not_depend_on_company(make, format):
    """Texts of several lengths in one call: some begin, some go on, one decodes."""
    reference, ours = make(), Ours(make(), format)
    texts = [random_tokens(200), random_tokens(70), (random_tokens(130) + 9) % 256]
    pages = [PAGES, torch.tensor([23, 21, 27]), torch.tensor([30, 31, 39, 38, 37])]
    starts = [150, 0, 129]
    for ring, (text, own, start) in enumerate(zip(texts, pages, starts, strict=True)):
        if start:
            ours.model.forward([one_pool(text[:start], 0, own, ring)])
    each = enumerate(zip(texts, pages, starts, strict=True))
    spans = [one_pool(text[start:], start, own, ring) for ring, (text, own, start) in each]
    rows = range(sum(len(span.tokens) for span in spans))
    together = ours.model.forward(spans, rows).split([len(span.tokens) for span in spans])
    for text, start, logits in zip(texts, starts, together, strict=True):
        alone = Ours(reference, format).run(text, [len(text)])
        assert torch.equal(logits, alone[start:])
    assert torch.equal(ours.model.forward(spans), torch.stack([logits[-1] for logits in together]))


def test_a_replay_writes_nothing_and_reads_the_same():
    tokens, ours = random_tokens(TOKENS), Ours(make_reference())
    whole = ours.run(tokens, [TOKENS])
    before = ours.memory.flat_pages.clone()
    other = (tokens + 1) % 256
    ours.run(other, [TOKENS], start=200, write_from=TOKENS)
    assert torch.equal(ours.memory.flat_pages, before)
    again = ours.run(tokens, [TOKENS], start=200, write_from=256)
    assert torch.equal(ours.memory.flat_pages, before) and torch.equal(again, whole[200:])


def test_pages_hold_everything_and_tails_nothing():
    config = make_reference().config.to_dict()
    spec = declare(config, PAGE, "bf16")
    assert not spec.tail_streams and spec.replay_tokens == 0
    assert spec.bytes_per_token == 3 * 2 * 2 * 20 * 2  # layers, k and v, kv heads, channels, bytes


# Configs

PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As Qwen3-0.6B has it."""


def test_both_forms_of_a_config_are_one_model():
    flat = Qwen3Config.from_hf(PUBLISHED)
    plain = {"rope_type": "default", "rope_theta": 1000000}
    nested = {
        **PUBLISHED,
        "rope_theta": None,
        "rope_parameters": plain,
        "layer_types": ["full_attention"] * 28,
    }
    assert flat == Qwen3Config.from_hf(nested) and flat.digest == Qwen3Config.from_hf(nested).digest
    assert family_of({"architectures": ["Qwen3ForCausalLM"]}).build is build


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10000},
        {"rms_norm_eps": 1e-5},
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "attention_factor": 1.1}},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": False},
    ],
)
def test_every_number_the_model_reads_is_in_the_digest(changes):
    digests = {Qwen3Config.from_hf(each).digest for each in (PUBLISHED, {**PUBLISHED, **changes})}
    assert len(digests) == 2
    assert Qwen3Config.from_hf({**PUBLISHED, "max_position_embeddings": 7}) == Qwen3Config.from_hf(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({name: None}, name) for name in ("head_dim", "hidden_size", "vocab_size", "rms_norm_eps")),
        ({"rope_theta": None}, "rope_theta"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types[27]"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 127}, "head_dim"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "mscale": "1", "mscale_all_dim": 1.0}}, "mscale"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
    ],
)
def test_what_it_can_not_run_is_refused_by_name(changes, field):
    with pytest.raises(SpecError) as caught:
        Qwen3Config.from_hf({**PUBLISHED, **changes})
    assert caught.value.field == field


@pytest.mark.parametrize("format", ["fp8", "fp16", "int4"])
def test_a_format_it_does_not_have_is_refused(format):
    with pytest.raises(SpecError, match="fp32, bf16"):
        declare(PUBLISHED, 256, format)


# Folders


def loaded(folder):
    checkpoint = Checkpoint(folder)
    return WEIGHTS.plan(checkpoint, Qwen3Config.from_hf(checkpoint.config)).read()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_read_as_it_was_saved(tmp_path, tied, dtype):
    reference = make_reference(tie_word_embeddings=tied).to(dtype)
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = loaded(tmp_path)
    assert weights.keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], tensor.float()), name


def changed(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_a_head_beside_tied_embeddings_is_used_as_in_transformers(tmp_path):
    reference = make_reference(tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    own = torch.randn(256, 48)
    weights = loaded(changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": own.clone()})))
    assert torch.equal(weights["lm_head.weight"], own)
    theirs = type(reference).from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, own)


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop(K), f"missing: {K}"),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (
            lambda t: t.update({K: torch.zeros(39, 48)}),
            rf"unfit: {K} is \[39, 48\] of F32, must be \[40, 48\]",
        ),
        (lambda t: t.update({K: torch.zeros(40, 48).to(torch.int8)}), f"unfit: {K} is .* of I8"),
        (lambda t: t.update({"model.layers.3.x": torch.zeros(1)}), "not of this model: model.layers.3.x"),
        (lambda t: t.update({f"{K[:-6]}bias": torch.zeros(40)}), "not of this model: .*k_proj.bias"),
        (lambda t: t[K].fill_(float("nan")), f"{K} holds NaN"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told_by_name(tmp_path, change, told):
    make_reference().save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=told):
        loaded(changed(tmp_path, change))


def test_saved_frequencies_are_left_alone(tmp_path):
    make_reference().save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert name not in loaded(changed(tmp_path, lambda tensors: tensors.update({name: torch.ones(10)})))
