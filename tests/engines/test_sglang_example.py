"""Goal: the examples for SGLang do what they say. Method: each is a process of its own; of the command that
needs a GPU, SGLang's own parser reads the words."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

from sglang.srt.server_args import ServerArgs  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples" / "sglang"


def test_pages_are_found_after_a_restart():
    ran = subprocess.run([sys.executable, FOLDER / "restart.py"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("saved", "found"))]
    assert lines == ["saved 160 tokens", "found 160 of 160 tokens after a restart; 0 of 10 pages differ"]


def test_sglang_understands_the_command(tmp_path):
    """`python` is a program here that tells its words."""
    told = tmp_path / "python"
    told.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    told.chmod(0o755)
    ran = subprocess.run(
        [FOLDER / "serve.sh", "a/model", "/a/folder", "5GiB"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True,
    )  # fmt: skip
    words = json.loads(ran.stdout)
    assert words[:2] == ["-m", "sglang.launch_server"], shlex.join(words)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = vars(parser.parse_args(words[2:]))
    extra = json.loads(known["hicache_storage_backend_extra_config"])
    assert extra["store"] == "shared:///a/folder?size=5GiB" and known["hicache_storage_backend"] == "dynamic"
