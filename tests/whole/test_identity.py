"""Goal: pages are found by those who would have computed the same, and by nobody else. Method: the package is
copied, its source changed by comments or in what it says, its kernels built again by `setup.py`; each copy
runs in a process of its own, on one store of files."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pytest

from tiercel.kernels import native
from tiercel.kernels.levels import BUILD, MACHINE

ROOT = Path(__file__).parents[2]
PAGE = 128
RUN = """
import sys
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.verify import answer_one
store, *runs = sys.argv[1:]
for kernels, share in zip(runs[::2], runs[1::2]):
    cache = CacheConfig(device_pages=1, host_bytes=64 * 2**20, fetch="wait")
    build = Build(device_bytes=16 * 2**20, kernels=kernels, store=store, share=share)
    engine, _ = open_engine(build, EngineConfig(cache))
    told = answer_one(engine, list(range(300, 300 + 133)), 1)
    assert engine.explain("verify").share == engine.stats().identity["share"] == share
    engine.cache.close()
    print("store tokens:", told.usage.store_tokens)
"""
needs_gcc = pytest.mark.skipif(not native.AVAILABLE, reason="there is no compiler here")


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store?size=64MiB"


def copy_of(folder: Path, *, comments: bool = False, said: Mapping[str, str] | None = None) -> Path:
    """The package somewhere else: with comments in all that computes, or with more `said` in some files. Its
    kernels are built with less optimization, for this machine only: that takes a tenth of the time."""
    package = folder / "src" / "tiercel"
    shutil.copytree(ROOT / "src" / "tiercel", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    setup = (folder / "setup.py").read_text()
    (folder / "setup.py").write_text(setup.replace("-O3", "-O1"))
    for file in [*(package / "models").rglob("*"), *(package / "kernels").rglob("*")] if comments else []:
        if mark := {".py": "#", ".c": "//"}.get(file.suffix):
            file.write_text(f"{mark} A comment.\n\n{file.read_text()}\n{mark} Another one.\n")
    for name, more in (said or {}).items():
        changed = package / name
        changed.write_text(f"{changed.read_text()}\n{more}\n")
    return folder / "src"


def build(source: Path) -> Path:
    run_setup(source, "--inplace")
    return source


def run_setup(source: Path, *options: str, **environment: str) -> str:
    command = [sys.executable, "setup.py", "build_ext", "--force", *options]
    done = subprocess.run(
        command,
        cwd=source.parent,
        env={**os.environ, BUILD: MACHINE, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def reused(source: Path, store: str, *runs: tuple[str, str]) -> list[int]:
    """How many tokens of a text a process on this source finds in the store, in each run (kernels, share). It
    leaves them there."""
    command = [sys.executable, "-c", RUN, store, *chain.from_iterable(runs)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [int(found) for found in re.findall(r"store tokens: (\d+)", done.stdout)]


def built_from(source: Path) -> bytes:
    (library,) = (source / "tiercel" / "kernels").glob("_native*")
    function = ctypes.CDLL(str(library)).built_from
    function.restype = ctypes.c_char_p
    return function()


@needs_gcc
def test_kernels_built_elsewhere_share_and_kernels_of_another_source_do_not(tmp_path, store):
    same, again = build(copy_of(tmp_path / "same")), build(copy_of(tmp_path / "again", comments=True))
    other = build(copy_of(tmp_path / "other", said={"kernels/native.c": "int more = 1;"}))
    assert built_from(same) == built_from(again) != built_from(other)
    bits, numbers, mixed = ("native", "bits"), ("native", "numbers"), ("reference", "numbers")
    assert reused(same, store, bits) == [0]
    assert reused(other, store, bits, numbers) == [0, 0], "one line of C; nobody has shared numbers yet"
    assert reused(again, store, bits, numbers) == [PAGE, PAGE], "comments in Python and C"
    assert reused(other, store, mixed) == [PAGE], "a mixed fleet"


def test_options_of_the_build_are_part_of_what_kernels_are(tmp_path):
    """The compiler does nothing here: the name of the library is among what it is told. Several compilers run
    at once, so that the lines of what they are told come in any order."""
    source = copy_of(tmp_path)
    setup = source.parent / "setup.py"

    def name(**environment: str) -> str:
        told = run_setup(source, CC="true", **environment)
        return re.search(r'BUILT_FROM=\\?"(\w+).*kernels/native\.c', told)[1]

    before = name()
    names = [before, name(CFLAGS="-fno-trapping-math"), name(LDFLAGS="-ffast-math")]
    assert name(LDFLAGS="-L/elsewhere") == before
    header = source / "tiercel" / "kernels" / "vector.h"
    header.write_text(header.read_text() + "/* A comment. */\n")
    assert name() == before
    header.write_text(header.read_text() + "#define MORE 1\n")
    names.append(before := name())
    text = setup.read_text()
    setup.write_text(f"# A comment.\n\n{text}")
    assert name() == before
    setup.write_text(text.replace("-ffp-contract=off", "-ffp-contract=fast"))
    assert len({*names, name()}) == 5


def test_every_source_that_computes_is_part_of_whose_numbers_they_are(tmp_path, store):
    plain = "reference", "bits"
    assert reused(ROOT / "src", store, plain) == [0]
    for changed in ("kernels/reference/rows.py", "models/deepseek_v4/layer.py"):
        other = copy_of(tmp_path / changed, said={changed: "MORE = 1"})
        assert reused(other, store, plain) == [0], changed
    other = copy_of(tmp_path / "server", comments=True, said={"server/app.py": "MORE = 1"})
    assert reused(other, store, plain) == [PAGE], "who answers does not compute, and comments say nothing"
