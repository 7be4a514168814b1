"""Goal: the CUDA kernels compile, whether there is a GPU or not; the interpreter takes what a compiler does
not. Method: they are compiled for a Hopper GPU, in a process of their own."""

import json
import os
import subprocess
import sys

SHARED_MOST = 227 * 1024
STACK_MOST = {"_attention": 128, "_grouped": 32}
"""Their sums fill half of the registers; what is used once for each tile or chunk of rows lives elsewhere."""


def test_kernels_compile_for_hopper_and_keep_their_sums_in_registers():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({each["name"] for each in kernels}) >= 22
    for each in kernels:
        assert each["shared"] <= SHARED_MOST and each["stack"] <= STACK_MOST.get(each["name"], 0), each
    names = "_linear", "_ask", "_attention", "_grouped", "_score", "_project"
    products = [each for each in kernels if each["name"] in names]
    assert sum(each["tensor_cores"] for each in products) == len(products) - 2, "all but the two of fp32"
