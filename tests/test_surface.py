"""Goal: the front door opens, and opening it does not load what is not asked for."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tiercel


@pytest.mark.parametrize("name", tiercel.__all__)
def test_every_name_of_the_front_door_is_there(name):
    assert getattr(tiercel, name).__name__ == name


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="Nobody"):
        _ = tiercel.Nobody


def test_what_is_said_to_be_without_torch_loads_none():
    """One process imports all that the contract in pyproject.toml lists, the lowest rooms first."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (listed,) = (each["source_modules"] for each in contracts if each.get("forbidden_modules") == ["torch"])
    code = """
import sys
from importlib import import_module
from pkgutil import walk_packages

import tiercel

def look(name):
    if "torch" in sys.modules:
        sys.exit(f"{name} loads torch")

for name in sys.argv[1:]:
    module = import_module(name)
    look(name)
    for each in walk_packages(getattr(module, "__path__", ()), f"{name}."):
        if not each.name.endswith("__main__"):
            import_module(each.name)
            look(each.name)
tiercel.CacheSpec, tiercel.CacheConfig
look("a name of the front door")
print(sum(name.startswith("tiercel.") for name in sys.modules))
"""
    command = [sys.executable, "-c", code, *listed, "tiercel.cli"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert int(done.stdout) > 150, "it looks at whole rooms"
