"""Goal: whatever computes a number is part of whose number it is, and nothing else. Method: the modules that
a model loads, held against the list of its sources."""

import sys
from pathlib import Path

import pytest

import tiercel.models
from tests.models.folders import make_config
from tiercel.kernels import entries
from tiercel.models.families import FAMILIES, family_of, sources_of

READERS = {"__init__", "base", "checkpoint", "digest", "families"}
"""What finds, checks and names models. What these modules read is in the digests of weights and config."""


@pytest.mark.parametrize("name", FAMILIES)
def test_every_module_that_a_model_computes_with_is_among_its_sources(name):
    config = make_config(model_type=name, architectures=None)
    family_of(config)
    own = FAMILIES[name].removesuffix("model")
    files = {Path(module.__file__) for each, module in sys.modules.items() if each.startswith(own)}
    files |= {path for path in Path(tiercel.models.__file__).parent.glob("*.py") if path.stem not in READERS}
    assert len(files) > 3 and files | {Path(entries.__file__)} <= set(sources_of(config))


def test_kernels_and_files_have_words_of_their_own():
    names = {path.name for path in sources_of(make_config())}
    assert {"layer.py", "batch.py", "rotary.py", "entries.py", "weights.py"} <= names
    assert not names & {f"{name}.py" for name in ("native", "reference", "choice", *READERS - {"__init__"})}
