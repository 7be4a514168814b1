"""Goal: pages are found by those who would have computed the same, and by nobody else. Method: the package is
copied, its source changed by a comment, its kernels built again by `setup.py`; each copy runs in a process of
its own, on one store of files."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.kernels import native

ROOT = Path(__file__).parents[2]
PAGE = 128
RUN = """
import sys
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.verify import answer_one
store, kernels, share = sys.argv[1:]
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


def copy_of(folder: Path, changed: str | None = None, options: str = "") -> Path:
    """The package somewhere else, built there unless only Python has changed."""
    package = folder / "src" / "tiercel"
    shutil.copytree(ROOT / "src" / "tiercel", package, ignore=shutil.ignore_patterns("__pycache__"))
    if changed is not None:
        comment = "\n/* A comment. */\n" if changed.endswith(".c") else "\n# A comment.\n"
        with (package / changed).open("a") as source:
            source.write(comment)
    if changed is None or changed.endswith(".c"):
        for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, folder)
        for library in (package / "kernels").glob("_native*"):
            library.unlink()
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=folder, env={**os.environ, "CFLAGS": options}, check=True, timeout=300)
    return folder / "src"


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    """The package as it is, built."""
    return copy_of(tmp_path_factory.mktemp("same"))


def reused(source: Path, store: str, kernels: str = "native", share: str = "bits") -> int:
    """How many tokens of a text a process on this source finds in the store. It leaves them there."""
    command = [sys.executable, "-c", RUN, store, kernels, share]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(re.search(r"store tokens: (\d+)", done.stdout)[1])


def built_from(source: Path) -> bytes:
    (library,) = (source / "tiercel" / "kernels").glob("_native*")
    function = ctypes.CDLL(str(library)).built_from
    function.restype = ctypes.c_char_p
    return function()


@needs_gcc
def test_kernels_built_elsewhere_share_and_kernels_of_another_source_do_not(tmp_path, same, store):
    again, other = copy_of(tmp_path / "again"), copy_of(tmp_path / "other", "kernels/native.c")
    assert built_from(same) == built_from(again) != built_from(other)
    assert reused(same, store) == 0
    assert reused(other, store) == 0, "one comment in C"
    assert reused(again, store) == PAGE
    assert reused(other, store, share="numbers") == 0, "nobody has shared numbers yet"
    assert reused(again, store, share="numbers") == PAGE
    assert reused(other, store, "reference", "numbers") == PAGE, "a mixed fleet"


@needs_gcc
def test_options_of_the_compiler_are_part_of_what_kernels_are(tmp_path, same):
    assert built_from(copy_of(tmp_path, options="-fno-trapping-math")) != built_from(same)


def test_every_source_that_computes_is_part_of_whose_numbers_they_are(tmp_path, store):
    assert reused(ROOT / "src", store, "reference") == 0
    for changed in ("kernels/reference.py", "models/deepseek_v4/layer.py"):
        other = copy_of(tmp_path / changed, changed)
        assert reused(other, store, "reference") == 0, changed
    other = copy_of(tmp_path / "server", "server/app.py")
    assert reused(other, store, "reference") == PAGE, "who answers does not compute"
