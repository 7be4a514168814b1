"""Goal: every tensor is made on the model's own device. Method: another default device, on which nothing can
be computed; then devices that are not there."""

import pytest
import torch

from tests.models.qwen3 import make_moe_reference, make_reference, random_tokens
from tests.models.reference import Shape
from tests.models.reference import make_reference as make_v4
from tests.models.spans import one_pool
from tests.models.test_draft import make_weights
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.errors import ConfigError
from tiercel.kernels import native, reference
from tiercel.kernels.choice import check_device, make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.families import FAMILIES, family_of
from tiercel.spec import deepseek_v4_mtp

TOKENS, PAGE = 300, 128
TEXT = random_tokens(TOKENS)


def run(config, spec, weights):
    """The logits of one text in pieces, resumed from a tail if the model has tails."""
    family = family_of(config)
    memory = DeviceMemory(spec, pages=4, tails=2)
    model = family.build(family.read(config), weights, memory, 2, reference, 0, None)
    pages, tails = torch.tensor([2, 0, 3], device="cpu"), {PAGE: 1} if spec.tail_streams else {}
    first = model.forward([one_pool(TEXT[:200], 0, pages, 0, tails)], range(200))
    model.resume(1, [(PAGE, 1)] if tails else [])
    return torch.cat([first, model.forward([one_pool(TEXT[PAGE:], PAGE, pages, 1)])])


REFERENCES = {
    "deepseek_v4": lambda: make_v4(Shape(hash_layers=1)),
    "qwen3": make_reference,
    "qwen3_moe": make_moe_reference,
}
"""A small model of each family, from `transformers`."""


@pytest.mark.parametrize(
    ("name", "format"),
    [(name, format) for name in FAMILIES for format in ("fp32", "bf16")] + [("deepseek_v4", "fp8")],
)
def test_nothing_is_made_on_the_default_device(name, format):
    assert name in REFERENCES, f"add a small model of {name} to REFERENCES"
    theirs = REFERENCES[name]()
    config, weights = theirs.config.to_dict(), dict(theirs.state_dict())
    spec = family_of(config).declare(config, PAGE, format)
    if name == "deepseek_v4":
        weights = make_weights(theirs)
        spec = spec.with_draft(deepseek_v4_mtp(config, PAGE, format, hidden=True))
    expected = run(config, spec, weights)
    with torch.device("meta"):
        assert torch.equal(run(config, spec, weights), expected)


@pytest.mark.parametrize("name", ["abacus", "rocm", "mps", "cuda:", "cuda:a", "cuda0", "cpu:-1"])
def test_what_is_no_device_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"device = '{name}': is not cpu, cuda, or one CUDA device"):
        check_device(name)


def test_a_device_that_is_not_there_is_refused_and_it_is_said_what_is_missing():
    missing = r"(needs a torch that was built for CUDA|is not there: torch sees)"
    with pytest.raises(ConfigError, match=f"device = 'cuda:77': {missing}"):
        check_device("cuda:77")
    with pytest.raises(ConfigError, match=missing):
        open_engine(Build(device="cuda:77"), EngineConfig())


@pytest.mark.parametrize(("count", "sees"), [(0, "none; nvidia-smi"), (2, "cuda:0 to cuda:1")])
def test_the_devices_that_are_there_are_named(monkeypatch, count, sees):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"is not there: torch sees {sees}"):
        check_device("cuda:2")


def test_a_device_without_a_name_is_refused():
    with pytest.raises(ConfigError, match="device = '': must not be empty"):
        Build(device="")


def test_native_kernels_are_for_the_cpu():
    check_device("cpu")
    assert make_kernels("auto", "meta") is reference and make_kernels("auto", "cpu") is native
    with pytest.raises(ConfigError, match="run on the CPU, not on device meta"):
        make_kernels("native", "meta")


@pytest.mark.parametrize(
    ("name", "compute", "why"),
    [
        ("native", "bf16", "needs the CUDA kernels"),
        ("native", "fp64", "must be one of auto, fp32, bf16"),
        ("cuda", "auto", "run on CUDA, not on device cpu"),
    ],
)
def test_kernels_that_a_device_can_not_use_are_refused(name, compute, why, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=why):
        make_kernels(name, "cpu", compute)
