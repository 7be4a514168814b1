"""Goal: whatever computes a number is part of whose number it is. Method: the modules that a model loads,
held against the list of its sources."""

import sys
from pathlib import Path

from tests.models.folders import make_config
from tiercel.models.families import family_of, sources_of


def test_every_module_that_a_model_is_made_of_is_among_its_sources():
    family_of(make_config())
    rooms = ("tiercel.models.deepseek_v4.", "tiercel.models.rotary", "tiercel.kernels.entries")
    loaded = {Path(own.__file__) for name, own in list(sys.modules.items()) if name.startswith(rooms)}
    assert len(loaded) > 5 and loaded <= set(sources_of(make_config()))


def test_kernels_have_a_word_of_their_own():
    names = {path.name for path in sources_of(make_config())}
    assert {"attention.py", "rings.py", "rotary.py", "entries.py", "weights.py"} <= names
    assert not names & {"native.py", "reference.py", "choice.py"}
