"""Where the layers of a model are cut into stages.

A step takes as long as its slowest stage, and the device with the least room decides how many places there
are. So the cut is the one whose heaviest stage is lightest: its share of the weights, which a decode step
reads, and its share of what a place takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tiercel.errors import ConfigError, SpecError
from tiercel.models.base import Stage
from tiercel.models.loading import LAYER, Plan
from tiercel.spec.cache_spec import CacheSpec


def layer_weights(plan: Plan) -> dict[int | None, int]:
    """Bytes of the weights of each layer; None: of all else."""
    found = dict[int | None, int]()
    for group in plan.groups:
        layer = LAYER.match(next(iter(group.shapes)))
        number = None if layer is None else int(layer[1])
        found[number] = found.get(number, 0) + group.bytes
    return found


def cut_of(spec: CacheSpec, weights: Mapping[int | None, int], layers: int, stages: int) -> tuple[Stage, ...]:
    """`spec`: of the whole model. `weights`: bytes of each layer; None: of what the last one has besides."""
    if stages > layers:
        raise ConfigError("stages", stages, f"is more than the {layers} layers that the model has")
    total = sum(weights.values())

    @cache
    def weight(first: int, end: int) -> float:
        """How heavy a stage of these layers is; infinite: there is no such stage."""
        own = sum(weights.get(layer, 0) for layer in range(first, end))
        own += weights.get(None, 0) if end == layers else 0
        try:
            held = spec.stage(first, spec.layers[-1] + 1 if end == layers else end)
        except SpecError:
            return float("inf")
        if spec.second and not {stream.name for stream in held.page_streams} - {*spec.second}:
            return float("inf")  # all that it keeps of a page is in the second pool
        return own / total + held.frame_bytes / spec.frame_bytes

    @cache
    def best(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        """(the heaviest stage, where each stage begins) of the layers before `end` in so many stages."""
        if count == 1:
            return weight(0, end), (0,)
        found = (
            (max(before, weight(first, end)), (*begins, first))
            for first in range(count - 1, end)
            for before, begins in [best(first, count - 1)]
        )
        return min(found)

    heaviest, begins = best(layers, stages)
    if heaviest == float("inf"):
        raise ConfigError(
            "stages", stages, f"{spec.model} can not be cut into so many: a stage would keep nothing"
        )
    ends = (*begins[1:], layers)
    return tuple(Stage(first, end, layers) for first, end in zip(begins, ends, strict=True))
