"""Goal: a CPU gets the highest level of the kernels that it can run, and each level computes what the kernels
mean. Method: features of other CPUs for the choice; for the numbers, some tests of the native kernels on the
lower levels that this CPU can run. All other tests run on the highest."""

import distutils.core
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import test_attention, test_grouped, test_index, test_native
from tests.kernels.texts import Span
from tiercel.errors import ConfigError
from tiercel.kernels import native, reference
from tiercel.kernels.choice import kernels_digest, make_kernels
from tiercel.kernels.levels import BUILD, LEVELS, MACHINE, levels_to_build, options_of, runnable
from tiercel.kernels.native import grouped as native_grouped
from tiercel.kernels.native.library import cpu_features

ROOT = Path(__file__).parents[2]
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
OLD, HASWELL = {"sse4.2", "popcnt", "avx"}, {"sse4.2", "popcnt", "avx", "avx2", "fma"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.fixture(params=native.AVAILABLE[:-1])
def level(request):
    usual = native.level()
    native.use_level(request.param)
    yield request.param
    native.use_level(usual)


# Which level


@on_x86
@pytest.mark.parametrize(
    ("features", "found"),
    [
        (set(), []),
        (OLD, ["v2"]),
        (HASWELL - {"fma"}, ["v2"]),
        (HASWELL, ["v2", "v3"]),
        (SKYLAKE - {"avx512vl"}, ["v2", "v3"]),
        (SKYLAKE, ["v2", "v3", "v4"]),
        (SKYLAKE - {"avx2"}, ["v2"]),
    ],
)
def test_a_cpu_runs_the_levels_whose_features_it_has(features, found):
    assert runnable(LEVELS, features) == found
    assert runnable({"v3"}, features) == [each for each in found if each == "v3"], "others were not built"
    assert runnable({*LEVELS, MACHINE}, features) == [*found, MACHINE], "that one was built here"


@on_x86
def test_what_the_cpu_says_is_what_linux_says():
    """v2 is written with a dot in C and with an underscore there."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = next(line for line in lines if line.startswith("flags")).replace("sse4_2", "sse4.2").split()
    assert cpu_features() == set(told) & SKYLAKE


def test_the_highest_level_is_in_use_and_none_is_missing():
    assert native.AVAILABLE[-1] == native.level()
    assert [each for each in native.AVAILABLE if each != MACHINE] == runnable(LEVELS, cpu_features())


# What is built


def test_a_package_has_all_levels_unless_the_builder_says_which(monkeypatch):
    def built() -> list[str]:
        names = [each.name for each in distutils.core.run_setup("setup.py", stop_after="init").ext_modules]
        assert {"tiercel.kernels._cpu", "tiercel.kernels._copy"} <= set(names)
        start = "tiercel.kernels._native_"
        return [name.removeprefix(start) for name in names if name.startswith(start)]

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(BUILD, raising=False)
    assert built() == list(LEVELS)
    monkeypatch.setenv(BUILD, f"{MACHINE} {next(iter(LEVELS))}")
    assert built() == [MACHINE, next(iter(LEVELS))]
    with pytest.raises(SystemExit, match=f"{BUILD}: v9 is none of the levels .*{MACHINE}"):
        levels_to_build({BUILD: "v9"})


@on_x86
def test_a_level_is_compiled_for_what_it_needs_and_nothing_else():
    assert options_of("v3") == ["-march=x86-64", "-msse4.2", "-mpopcnt", "-mavx", "-mavx2", "-mfma"]
    assert options_of(MACHINE) == ["-march=native"]


# What it computes


@pytest.mark.parametrize("case", [test_native.linear_wide, test_native.hyper, test_native.experts])
def test_a_lower_level_is_the_plain_twin_and_exact(case, level):
    """Without FMA the error of a sum of hundreds is a little larger."""
    whole, plain = (case(kernels, torch.arange(test_native.TOKENS)) for kernels in (native, reference))
    torch.testing.assert_close(whole, plain, atol=1e-4, rtol=2e-5)
    for first, count in ((7, 1), (50, 3), (20, 49)):
        take = torch.arange(first, first + count)
        assert torch.equal(case(native, take), whole[take]), (first, count)


@pytest.mark.parametrize("kind", ["chosen", "all"])
def test_attention_of_a_lower_level_is_the_plain_twin_and_exact(kind, level):
    where = kind, "fp32", torch.float32, native, "cpu"
    test_attention.check(test_attention.SMALL, test_attention.MIXED, *where)
    whole, alone = [Span(0, 66, 72, 0)], [Span(0, 68, 69, 3)]
    test_attention.same_bits(test_attention.SMALL, whole, [alone], *where)


def test_the_index_of_a_lower_level_chooses_the_same(level):
    test_index.test_a_choice_does_not_depend_on_the_call(torch.float32, native, "cpu")


@pytest.mark.parametrize("shape", ["odd channels", "long window"])
def test_grouped_attention_of_a_lower_level_is_dense_attention_and_exact(shape, level):
    own = test_grouped.SHAPES[shape], "fp32", test_grouped.Set(native_grouped)
    test_grouped.test_it_is_dense_attention(*own)
    test_grouped.test_a_token_has_the_same_bits_in_every_schedule(*own)


def test_every_level_has_an_identity_of_its_own():
    usual, found = native.level(), set()
    for each in native.AVAILABLE:
        native.use_level(each)
        found.add(kernels_digest(native))
    native.use_level(usual)
    assert len(found) == len(native.AVAILABLE)


# Which level is asked for


@pytest.mark.parametrize("wish", ["native:v9", "native:"])
def test_a_level_that_this_cpu_can_not_run_is_refused(wish):
    with pytest.raises(ConfigError, match=f"this CPU can run {', '.join(native.AVAILABLE)}$"):
        make_kernels(wish)


@pytest.mark.parametrize("wish", ["auto:v3", "reference:v3", "magic"])
def test_only_the_native_kernels_have_levels(wish):
    with pytest.raises(ConfigError, match="must be one of auto, native, cuda, reference, or a level"):
        make_kernels(wish)


ASK = """
from tiercel.kernels.choice import describe, kernels_digest, make_kernels
import sys, torch
print(*describe(make_kernels(sys.argv[1])), torch.backends.cpu.get_cpu_capability(), sep="; ")
"""


@pytest.mark.skipif(len(native.AVAILABLE) == 1, reason="this CPU runs one level only")
def test_a_lower_level_is_that_of_torch_too():
    """Else machines with other CPUs would share no pages."""
    lowest, highest = native.AVAILABLE[0], native.AVAILABLE[-1]
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    command = [sys.executable, "-c", ASK, f"native:{lowest}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"native:{lowest}; asked for; this CPU can also run {highest}; DEFAULT\n"
    with pytest.raises(ConfigError, match="torch computes with .* already; set ATEN_CPU_CAPABILITY=default"):
        make_kernels(f"native:{lowest}")
    assert native.level() == highest
