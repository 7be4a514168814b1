"""Goal: whatever computes a number is part of whose number it is, and nothing else. Method: the modules that
a model imports, held against the list of its sources."""

import ast
import json
from inspect import getfile, signature
from pathlib import Path

import pytest
import torch

import tiercel.models
from tests.kernels.devices import CUDA
from tests.models.folders import make_config
from tiercel.errors import WeightsError
from tiercel.kernels import entries, native, reference
from tiercel.kernels.choice import Kernels
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.hyper import Hyper, hyper_of
from tiercel.models.deepseek_v4.weights import WEIGHTS
from tiercel.models.families import FAMILIES, family_of, folder_of, sources_of, text_folder_of
from tiercel.spec import load
from tiercel.text.text import Text

READERS = {"__init__", "base", "checkpoint", "digest", "families", "files", "hub", "opening", "wish"}
"""What finds, checks and names models. What these modules read is in the digests of weights and config."""


MODELS = Path(tiercel.models.__file__).parent


def imported_by(file: Path) -> set[Path]:
    """The files of `models/` that a file imports, in functions too."""
    named = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            named |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    inside = (name.removeprefix("tiercel.models.") for name in named if name.startswith("tiercel.models."))
    return {path for name in inside if (path := MODELS / f"{name.replace('.', '/')}.py").exists()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_module_that_a_model_computes_with_is_among_its_sources(name):
    sources = set(sources_of({"model_type": name}))
    found = todo = {MODELS / f"{FAMILIES[name].removeprefix('tiercel.models.').replace('.', '/')}.py"}
    while todo := {each for path in todo for each in imported_by(path)} - found:
        found |= todo
    found |= {*MODELS.glob("*.py")}
    forgotten = {str(path.relative_to(MODELS)) for path in found - sources if path.stem not in READERS}
    assert len(found & sources) > 3 and not forgotten, (
        f"{name} computes with {forgotten}: what families share is in models/ and in SHARED_SOURCES"
    )
    assert Path(entries.__file__) in sources


def test_kernels_and_files_have_words_of_their_own():
    names = {path.name for path in sources_of(make_config())}
    assert {"layer.py", "frame.py", "rotary.py", "entries.py", "weights.py"} <= names
    assert not names & {f"{name}.py" for name in ("native", "reference", "choice", *READERS - {"__init__"})}


@pytest.mark.parametrize("kernels", [CUDA, native, reference], ids=lambda each: each.NAME)
def test_hyper_connections_are_v4s_own_and_part_of_whose_numbers_they_are(kernels):
    own, twins = hyper_of(kernels), hyper_of(reference)
    names = [name for name in vars(Hyper) if not name.startswith("_")]
    assert names == ["read", "write", "head"]
    assert all(signature(getattr(own, name)) == signature(getattr(twins, name)) for name in names)
    assert not [name for name in (*dir(Kernels), *dir(kernels)) if name.startswith("hyper_")]
    assert Path(getfile(own.read)) in kernels.SOURCES


def test_the_model_for_measurements_has_the_cache_of_v4_flash_and_weights_from_a_seed():
    checkpoint = Checkpoint(folder_of("v4-flash-8e"))
    family = family_of(checkpoint.config)
    own = family.read(checkpoint.config)
    flash = load("deepseek-v4-flash")
    assert family.declare(checkpoint.config, 256, "fp8").streams == flash.streams
    assert (own.layers, own.experts, own.experts_per_token) == (43, 8, 6)
    assert Text(text_folder_of("v4-flash-8e")).decode([129_000]) == "", "most of its tokens have no text"
    small = V4Config.from_hf(make_config())
    first, again, other = (WEIGHTS.random(small, seed).read() for seed in (0, 0, 1))
    drafted = WEIGHTS.random(small, 0, draft=True).read()
    assert all(torch.equal(first[name], each[name]) for each in (again, drafted) for name in first)
    assert {name.partition(".")[0] for name in drafted.keys() - first.keys()} == {"mtp"}
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_weights_from_a_seed_that_is_none_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(make_config(random_weights="yes")))
    with pytest.raises(WeightsError, match="random_weights = 'yes' is no seed"):
        Checkpoint(tmp_path)
