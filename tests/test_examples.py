"""Goal: every program in `examples/` runs, and reuses what its comments promise. Method: each is a process of
its own. Each compares what came from the cache with what was computed, and fails if a bit differs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
REUSED = {
    "toy_engine.py": [
        "0 of 150 (0 device, 0 host",
        "144 of 163 (144 device, 0 host",
        "160 of 163 (0 device, 160 host",
    ],
    "host_cache.py": ["48 of 53 (0 device, 48 host"],
    "named_pages.py": ["0 of 150 (0 device, 0 host", "144 of 150 (0 device, 0 host"],
}


def test_no_example_is_forgotten():
    assert {path.name for path in FOLDER.glob("*.py")} == set(REUSED)


@pytest.mark.parametrize("name", REUSED)
def test_an_example_reuses_what_it_says(name, tmp_path):
    command = [sys.executable, str(FOLDER / name)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = re.findall(r"^reused (\d+ of \d+) tokens (\(\d+ device, \d+ host)", ran.stdout, re.MULTILINE)
    assert [" ".join(each) for each in told] == REUSED[name]
