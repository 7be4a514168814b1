"""Goal: the weights of a Qwen3 with experts are those of `transformers`, in both forms that folders have, or
an error names what is wrong. Method: small models of `transformers`, saved; then folders that are wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.qwen3 import EXPERTS, make_moe_reference, make_reference, write_qwen3
from tiercel.errors import SpecError, WeightsError
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.families import family_of
from tiercel.models.grouped import GATE_UP
from tiercel.models.loading import joined
from tiercel.models.qwen3.config import Experts, Qwen3Config, declare
from tiercel.models.qwen3.weights import WEIGHTS

FORMS = pytest.mark.parametrize("apart", [True, False], ids=["expert by expert", "all in one"])


def planned(folder, *types):
    checkpoint = Checkpoint(folder)
    return WEIGHTS.plan(checkpoint, Qwen3Config.from_hf(checkpoint.config), *types)


def loaded(folder):
    return planned(folder).read()


@FORMS
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_read_as_it_was_saved(tmp_path, apart, tied):
    reference = make_moe_reference(tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path, save_original_format=apart, max_shard_size="40KB")
    stored = Checkpoint(tmp_path).tensors
    assert ("model.layers.0.mlp.experts.4.up_proj.weight" in stored) == apart
    assert ("model.layers.0.mlp.experts.gate_up_proj" in stored) != apart
    weights = loaded(tmp_path)
    assert weights.keys() == reference.state_dict().keys()
    for name, tensor in reference.state_dict().items():
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 2)),
        ({"mlp_only_layers": None}, (0, 1, 2)),
        ({"decoder_sparse_step": 2}, ()),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (1,)),
        ({"decoder_sparse_step": 3}, (2,)),
        ({"mlp_only_layers": [0, 1, 2]}, ()),
    ],
)
def test_the_table_is_the_state_dict_of_transformers(changes, layers):
    reference = make_moe_reference(**changes)
    own = Qwen3Config.from_hf(reference.config.to_dict())
    assert own.experts == Experts(5, 2, 28, normalized=True, layers=layers)
    shapes = {name: each.shape for name, each in WEIGHTS.of(own, draft=False).items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}


def test_the_bytes_are_told_by_purpose_and_bf16_is_for_matrices(tmp_path):
    make_moe_reference().save_pretrained(tmp_path)
    plan = planned(tmp_path, torch.bfloat16)
    told, weights = plan.bytes, plan.read()
    assert told["experts"] == 2 * 2 * 5 * 3 * 28 * 48  # bytes, layers, experts, matrices
    assert told["feed-forward"] == 2 * (3 * 88 * 48 + 2 * 5 * 48)  # the dense layer, and two routers
    dtypes = {name: each.dtype for name, each in weights.items()}
    assert {name for name in dtypes if dtypes[name] == torch.float32} == {n for n in dtypes if "norm" in n}


def test_a_model_with_experts_is_not_a_dense_one_to_the_cache():
    dense, moe = (each.config.to_dict() for each in (make_reference(), make_moe_reference()))
    specs = [declare(config, 32, "bf16") for config in (dense, moe)]
    assert [spec.model for spec in specs] == ["qwen3", "qwen3_moe"]
    assert specs[0].streams == specs[1].streams
    assert family_of({"architectures": ["Qwen3MoeForCausalLM"]}) is family_of(moe)


def test_what_the_gate_and_the_up_projection_of_a_layer_are_is_one_matrix(tmp_path):
    weights = loaded(write_qwen3(tmp_path))
    own = {name.removeprefix("model.layers.1.mlp."): each for name, each in weights.items()}
    [whole] = joined(own, GATE_UP)
    assert whole.shape == (2 * 88, 48) and whole.data_ptr() == own["gate_proj.weight"].data_ptr()
    assert torch.equal(whole[88:], own["up_proj.weight"])


@pytest.mark.parametrize("make", [make_reference, make_moe_reference])
def test_weights_may_come_from_a_seed(make):
    own = Qwen3Config.from_hf(make().config.to_dict())
    first, again, other = (WEIGHTS.random(own, seed).read() for seed in (0, 0, 1))
    assert first.keys() == make().state_dict().keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# Configs

PUBLISHED = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As Qwen3-30B-A3B has it."""


def test_both_names_for_the_number_of_experts_are_one_model():
    own = Qwen3Config.from_hf(PUBLISHED)
    assert own.experts == Experts(128, 8, 768, normalized=True, layers=tuple(range(48)))
    assert own == Qwen3Config.from_hf({**PUBLISHED, "num_experts": None, "num_local_experts": 128})
    bytes_read = sum(each.shape[0] * each.shape[1] * each.shape[2] for each in stacked(own))
    assert bytes_read == 48 * 128 * 3 * 768 * 2048


def stacked(own):
    return [each for each in WEIGHTS.of(own, draft=False).values() if len(each.shape) == 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_tok": 4},
        {"norm_topk_prob": False},
        {"mlp_only_layers": [3]},
        {"decoder_sparse_step": 2},
        {"moe_intermediate_size": 512},
        {"num_experts": 64},
    ],
)
def test_every_number_the_experts_depend_on_is_in_the_digest(changes):
    assert Qwen3Config.from_hf(PUBLISHED).digest != Qwen3Config.from_hf({**PUBLISHED, **changes}).digest


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(
            ({name: None}, name)
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
        ),
        ({"num_experts": 0}, "num_experts"),
        ({"num_local_experts": 64}, "num_local_experts"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_it_can_not_run_is_refused_by_name(changes, field):
    with pytest.raises(SpecError) as caught:
        Qwen3Config.from_hf({**PUBLISHED, **changes})
    assert caught.value.field == field


# Folders

ONE, ALL = "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop(ONE), f"missing: {ONE}$"),
        (
            lambda t: t.update({ONE: torch.zeros(27, 48)}),
            rf"unfit: {ONE} is \[27, 48\] of F32, must be \[28, 48\]",
        ),
        (lambda t: t.update({ALL: torch.zeros(5, 56, 48)}), "there twice: .*and 6 more$"),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), "missing: model.layers.0.mlp.gate.weight"),
        (
            lambda t: t.update({ONE.replace(".3.", ".5."): torch.zeros(28, 48)}),
            "not of this model: model.layers.2.mlp.experts.5",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.0.up_proj.weight": torch.zeros(28, 48)}),
            "not of this model: model.layers.1.mlp.experts.0",
        ),
        (lambda t: t[DOWN].fill_(float("inf")), f"{DOWN} holds NaN or Inf"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told_by_name(tmp_path, change, told):
    make_moe_reference().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=told):
        loaded(tmp_path)


def test_a_dense_folder_is_not_taken_for_one_with_experts(tmp_path):
    make_reference(**EXPERTS).save_pretrained(tmp_path)
    config = Qwen3Config.from_hf(make_moe_reference().config.to_dict())
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.0\.mlp\.gate\.weight"):
        WEIGHTS.plan(Checkpoint(tmp_path), config)
