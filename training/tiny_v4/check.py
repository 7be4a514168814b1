"""Is the training module really V4? Same weights in transformers' model, same logits (fp32, CPU).

python check.py [FOLDER]      # FOLDER: an exported model; without it random weights are compared

Random weights are compared with the sparse top-k; trained ones with every entry chosen. Where there is CUDA,
the mHC kernel is compared with its plain twin too.
"""

# ruff: noqa: T201
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from export import export_model, load_model
from sinkhorn import sinkhorn, sinkhorn_plain
from transformers import DeepseekV4ForCausalLM

from model import Config, TinyV4

TOLERANCE = 1e-4


def randomise(model: TinyV4) -> None:
    """Zeros and ones hide errors: move every vector away from its initial value."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        vector = tensor.dim() == 1 or "position_bias" in name
        if vector and tensor.is_floating_point() and "frequencies" not in name:
            tensor.data += torch.randn_like(tensor) * 0.3


def compare(ours: TinyV4, folder: Path, ids: torch.Tensor, *, every_entry: bool) -> float:
    theirs, info = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    if every_entry:  # scores a rounding apart at the border of the top k are no error of either
        for block, layer in zip(ours.model.layers, theirs.model.layers, strict=True):
            block.self_attn.topk = ids.shape[1]
            if block.self_attn.ratio == 4:
                layer.self_attn.compressor.indexer.index_topk = ids.shape[1]
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids, use_cache=False).logits
        got = ours.lm_head(ours(ids, sparse=True)[0])
    agree = (expected.argmax(-1) == got.argmax(-1)).float().mean()
    print(f"logit std {expected.std():.3f}, arg-max agreement {agree:.4f}")
    return float((expected - got).abs().max())


def compare_sinkhorn() -> None:
    logits, weights = torch.randn(2, 4096, 4, 4, device="cuda")
    results = []
    for function in (sinkhorn, sinkhorn_plain):
        leaf = logits.clone().requires_grad_()
        out = function(leaf, Config.hc_sinkhorn_iters, Config.hc_eps)
        (out * weights).sum().backward()
        results.append(torch.cat((out.detach(), leaf.grad)))
    worst = float((results[0] - results[1]).abs().max())
    print(f"mHC kernel: max |difference| {worst:.2e} (values and gradient)")
    assert worst <= TOLERANCE


def main(trained: Path | None) -> None:
    torch.manual_seed(0)
    if torch.cuda.is_available():
        compare_sinkhorn()
    with tempfile.TemporaryDirectory() as scratch:
        for length, topk in ((256, 64), (640, 16), (1024, 64)):
            if trained:
                folder, model = trained, load_model(trained)
            else:
                folder, model = Path(scratch) / str(length), TinyV4(replace(Config(), index_topk=topk))
                randomise(model)
                export_model(model, folder, torch.float32)
            ids = torch.randint(6, 4096, (2, length))
            worst = compare(model, folder, ids, every_entry=trained is not None)
            print(f"length {length}: max |difference| {worst:.2e}")
            assert worst <= TOLERANCE


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
