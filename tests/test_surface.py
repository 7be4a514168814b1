"""Goal: the front door opens, and opening it does not load what is not asked for."""

import subprocess
import sys

import pytest

import tiercel


@pytest.mark.parametrize("name", tiercel.__all__)
def test_every_name_of_the_front_door_is_there(name):
    assert getattr(tiercel, name).__name__ == name


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="Nobody"):
        _ = tiercel.Nobody


def test_a_spec_is_had_without_torch():
    code = "import sys; from tiercel import CacheSpec, CacheConfig; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
