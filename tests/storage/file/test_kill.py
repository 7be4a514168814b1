"""Goal: a killed process loses nothing acknowledged. Method: `kill_loop`, two hundred times; more by
TIERCEL_KILLS or `python -m tests.storage.file.kill_loop`."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.storage.file.kill_loop import ROOMY, TIGHT, run

KILLS = int(os.environ.get("TIERCEL_KILLS", "100"))
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_a_killed_store_has_what_it_acknowledged(tmp_path, part):
    run(tmp_path, (ROOMY, TIGHT)[part % 2], -(-KILLS // PARTS), seed=part)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
def test_where_writing_takes_no_time_it_is_the_same():
    """More happens between two kills."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercel-") as folder:
        run(Path(folder), TIGHT, KILLS // PARTS, seed=PARTS)
