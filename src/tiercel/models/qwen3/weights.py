"""The weights of a Qwen3 model, dense or with experts, under the names of `transformers`.

The experts of a layer are one tensor, as in `transformers` 5: `gate_up_proj`, rows of the gate first, and
`down_proj`. Checkpoints have them expert by expert, or as one tensor too.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiercel.models.grouped import GATE_UP, layer_shapes
from tiercel.models.loading import EMBEDDING, HEAD, Parameter, WeightSpec, experts, plain
from tiercel.models.qwen3.config import Experts, Qwen3Config

MLP = "mlp."


def parameters(config: Qwen3Config) -> dict[str, Parameter]:
    d, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    found = [plain(EMBEDDING, table), plain("model.norm.weight", (d,))]
    if not config.tie_word_embeddings:
        found.append(plain(HEAD, table))
    layer = layer_shapes(d, config.intermediate_size, config.grouping)
    for i in range(config.layers):
        prefix, moe = f"model.layers.{i}.", config.experts
        own = moe if moe is not None and i in moe.layers else None
        names = [name for name in layer if own is None or not name.startswith(MLP)]
        found += [plain(f"{prefix}{name}.weight", layer[name]) for name in names]
        found += [] if own is None else _mixture(f"{prefix}{MLP}", own, d)
    return {each.name: each for each in found}


def _mixture(prefix: str, own: Experts, d: int) -> Iterator[Parameter]:
    all_of_them, one = f"{prefix}experts.", f"{prefix}experts.{{}}."
    yield plain(f"{prefix}gate.weight", (own.count, d))
    gate_up = [f"{one}{name}" for name in GATE_UP]
    yield experts(f"{all_of_them}gate_up_proj", (own.count, 2 * own.intermediate, d), *gate_up)
    yield experts(f"{all_of_them}down_proj", (own.count, d, own.intermediate), f"{one}down_proj.weight")


WEIGHTS = WeightSpec(parameters, matrices={MLP: (GATE_UP,)})
