"""What the figures of `benchmarks.gpu` are held against: aims, `transformers` on the same weights, and what
the device could do at best; and how they are shown."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiercel.kernels.choice import make_kernels
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import SPARSE_RATIO, V4Config
from tiercel.models.deepseek_v4.weights import WEIGHTS
from tiercel.models.families import folder_of
from tiercel.spec.cache_spec import CacheSpec

FLOPS_S = 790e12
"""bf16 matrix products of an H200, as its large products reach it."""

BYTES_S = 4.3e12
"""Of its memory, as large copies reach it (4.8 in the data sheet)."""

THEIRS_S = 60.0
"""No measurement of `transformers` begins later than this after the first."""


# What the device could do at best


@dataclass(frozen=True)
class Limits:
    """The least that a model must compute and read, from its dimensions alone."""

    config: V4Config
    spec: CacheSpec
    matrices: torch.dtype

    def prefill_tokens_s(self, tokens: int) -> float:
        """A text from its beginning, if every product ran at the full rate of the device."""
        return FLOPS_S / (self.flops(tokens) / tokens)

    def flops(self, tokens: int) -> float:
        """Multiplications and additions of a text: matrices, attention and the indexer, without the head."""
        c, used = self.config, 0.0
        for name, numbers, share in self._matrices(1):
            if "embed_tokens" not in name and "lm_head" not in name:
                used += numbers * share
        attended = scored = 0.0  # pairs of a token and an entry, over all layers
        for ratio in c.ratios:
            attended += tokens * min(c.window, tokens)
            if ratio == SPARSE_RATIO:
                attended += sum(min(c.index_topk, i // ratio) for i in range(tokens))
                scored += tokens * tokens / ratio / 2
            elif ratio:
                attended += tokens * tokens / ratio / 2
        pairs = 4 * c.heads * c.head_dim * attended + 2 * c.index_heads * c.index_head_dim * scored
        return 2 * used * tokens + pairs

    def decode_tokens_s(self, batch: int, context: int) -> float:
        """One step of so many texts, if every byte it reads came at the full rate of the memory."""
        return batch * BYTES_S / self.bytes_read(batch, context)

    def bytes_read(self, batch: int, context: int) -> float:
        """Weights once, those of experts as far as some text is expected to choose them; each text's entries.

        Of the embeddings a step reads one row for each text.
        """
        weights = 0.0
        for name, numbers, share in self._matrices(batch):
            if "embed_tokens" not in name or self.config.tie_word_embeddings:
                weights += numbers * share * self.matrices.itemsize
        return weights + batch * self._entry_bytes(context)

    def _matrices(self, batch: int) -> Sequence[tuple[str, int, float]]:
        """(name, numbers, share of them that so many tokens use)"""
        c = self.config
        missed = (1 - c.experts_per_token / c.experts) ** batch
        return [
            (each.name, prod(each.shape), 1 - missed if "mlp.experts" in each.name else 1.0)
            for each in WEIGHTS.of(c, draft=False).values()
            if len(each.shape) > 1 and not each.integer
        ]

    def _entry_bytes(self, context: int) -> float:
        """Window, compressed entries and index keys that the next token of one text reads."""
        size = {each.name: sum(part.bytes for part in each.parts) for each in self.spec.streams}
        c, total = self.config, 0.0
        for ratio in c.ratios:
            total += min(c.window, context) * size["window"]
            if ratio == SPARSE_RATIO:
                entries = context // ratio
                total += min(c.index_topk, entries) * size[f"c{ratio}"] + entries * size[f"c{ratio}_index"]
            elif ratio:
                total += context // ratio * size[f"c{ratio}"]
        return total


# `transformers` on the same weights


@torch.inference_mode()
def theirs(
    model: str, device: str, *, prefill: int, batches: Sequence[int], context: int, steps: int
) -> dict[str, Any]:
    """Tokens/s of `transformers`: one prefill of so many tokens, and decoding in batches behind a short
    context. Where it can not run, the figure is None and `reasons` says why."""
    found: dict[str, Any] = {"prefill": None, "decode": {}, "reasons": {}}
    until = time.perf_counter() + THEIRS_S

    def tried(what: str, measure: Callable[[], float]) -> float | None:
        if time.perf_counter() > until:
            found["reasons"][what] = f"not begun: {THEIRS_S:.0f} s are over"
            return None
        try:
            return measure()
        except torch.OutOfMemoryError:
            found["reasons"][what] = "out of memory"
        except Exception as error:  # noqa: BLE001 - it is not ours: whatever it raises, our figures stand
            found["reasons"][what] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        finally:
            _free(device)
        return None

    _free(device)
    built: list[Any] = []
    tried("model", lambda: built.append(make_theirs(model, device)) or 0.0)
    if built:
        found["prefill"] = tried("prefill", lambda: _prefill(built[0], prefill))
        for batch in batches:
            rate = tried(f"decode {batch}", lambda b=batch: _decode(built[0], b, context, steps))
            found["decode"][str(batch)] = rate
    built.clear()
    _free(device)
    return found


def make_theirs(model: str, device: str) -> Any:
    """Their model on our weights, which are its own tensors then: nothing is held twice.

    Matrices have the type that ours have on this device, and so have all activations: norms are cast to it.
    Hyper-connections stay fp32, as in their own loader.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    checkpoint = Checkpoint(folder_of(model))
    dtype = make_kernels(device=device).dtype
    config = DeepseekV4Config.from_dict(dict(checkpoint.config))
    weights = WEIGHTS.plan(checkpoint, V4Config.from_hf(checkpoint.config), dtype, draft=False).read(device)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and "hc" not in name:
            weights[name] = tensor.to(dtype)
    with torch.device("meta"):
        made = DeepseekV4ForCausalLM(config)
    missing = made.load_state_dict(weights, strict=False, assign=True)
    if missing.missing_keys or missing.unexpected_keys:
        raise RuntimeError(f"{missing.missing_keys[:3]} are missing, {missing.unexpected_keys[:3]} too many")
    for parent in list(made.modules()):  # their frequencies are computed, not loaded
        for name, child in list(parent.named_children()):
            if name == "rotary_emb":
                setattr(parent, name, type(child)(config).to(device))
    return made.eval()


def _prefill(made: Any, tokens: int) -> float:
    text = _random(made, 1, tokens)
    return tokens / _seconds(made, lambda: made(text, use_cache=True, logits_to_keep=1), rounds=2)


def _decode(made: Any, batch: int, context: int, steps: int) -> float:
    past = made(_random(made, batch, context), use_cache=True, logits_to_keep=1).past_key_values
    token = _random(made, batch, 1)

    def run() -> None:
        for _ in range(steps):
            made(token, past_key_values=past, use_cache=True)

    return batch * steps / _seconds(made, run, rounds=2)


def _random(made: Any, batch: int, tokens: int) -> Tensor:
    return torch.randint(0, made.config.vocab_size, (batch, tokens), device=made.device)


def _seconds(made: Any, call: Callable[[], object], rounds: int) -> float:
    """The first call warms up, and does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        if made.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _free(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


# Showing

SOURCES = ("recompute", "store", "host", "device")

AIMS = {
    "transformers_ratio": "≥ 10",
    "step_cpu_us.64": "≤ 300",
    "itl_p99_ratio": "≤ 1.05",
    "ttft_host_over_device": "≤ 1.05",
    "ttft_store_over_recompute": "< 1",
    "no_hit_ratio": "≥ 0.99",
    "multi_turn.requests_s_ratio": "≥ 3",
    "multi_turn.ttft_ratio": "≤ 0.33",
}


def table(figures: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A line for each number."""
    lines = []
    for key, value in figures.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lines += table(value, f"{name}.")
            continue
        aim = next((aim for start, aim in AIMS.items() if name.startswith(start)), "")
        shown = f"{value:,.3f}" if isinstance(value, float) else str(value)
        lines.append(f"{name:44} {shown:>14}  {aim}".rstrip())
    return lines


def plot(times: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Time to first token over the length of the prefix, a line for each source."""
    import matplotlib  # type: ignore[import-not-found]

    matplotlib.use("svg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, axes = pyplot.subplots(figsize=(6, 4))
    lengths = [1024 * int(name.removesuffix("k")) for name in times]
    for source, marker in zip(SOURCES, "osD^", strict=True):
        axes.plot(lengths, [each[source] for each in times.values()], marker=marker, label=source)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prefix", ylabel="time to first token, ms")
    axes.set_xticks(lengths, [f"{name[:-1]} K" for name in times], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
