"""Goal: layers are cut so that the heaviest stage is light, and every stage keeps something."""

from itertools import pairwise

import pytest

from tiercel.engine.cut import cut_of, layer_weights
from tiercel.errors import ConfigError
from tiercel.models.opening import open_model
from tiercel.models.wish import Wish
from tiercel.spec.presets import load

FLASH = load("deepseek-v4-flash")
EVEN = dict.fromkeys(range(43), 100)


def begins(spec, weights, layers, stages):
    cut = cut_of(spec, weights, layers, stages)
    assert [stage.end for stage in cut[:-1]] == [stage.first for stage in cut[1:]]
    assert cut[0].begins and cut[-1].ends and all(stage.layers for stage in cut)
    return [stage.first for stage in cut]


def test_even_layers_are_cut_evenly():
    assert begins(FLASH, EVEN, 43, 2) == [0, 22]
    for stages in (3, 4, 8):
        sizes = [end - first for first, end in pairwise([*begins(FLASH, EVEN, 43, stages), 43])]
        assert max(sizes) - min(sizes) <= 2


def test_heavy_layers_and_the_head_move_the_cut():
    head = EVEN | {None: 1000}
    assert begins(FLASH, head, 43, 2)[1] > 22
    heavy = EVEN | dict.fromkeys(range(10), 300)
    assert begins(FLASH, heavy, 43, 2)[1] < 22


def test_the_weights_of_a_model_are_counted_by_layer():
    opened = open_model(Wish())
    weights = layer_weights(opened.target.plan(opened.kernels, draft=False))
    assert sorted(layer for layer in weights if layer is not None) == list(range(6))
    assert min(weights.values()) > 0


@pytest.mark.parametrize("spec", [FLASH, FLASH.apart], ids=["one pool", "two pools"])
def test_a_stage_that_would_keep_nothing_is_moved_or_refused(spec):
    """The first two layers of V4-Flash keep no pages: with c4 apart they are no stage of their own."""
    for stages in (2, 4, 16):
        cut = cut_of(spec, EVEN, 43, stages)
        held = [spec.stage(stage.first, stage.end) for stage in cut]
        assert all(each.page_bytes or each.tail_bytes for each in held)
    with pytest.raises(ConfigError, match="more than the 43 layers"):
        cut_of(spec, EVEN, 43, 44)


def test_a_cut_that_can_not_be_is_refused():
    spec = FLASH.apart
    with pytest.raises(ConfigError, match="a stage would keep nothing"):
        cut_of(spec, EVEN, 43, 43)
