"""Which faults each slow file of tests notices: what may be cut from a file is what no fault needs.

    python -m tests.mutants tests/engine/test_exact.py tests/engine/test_store.py

The faults are those of the simulations, and some in a model. A file runs once with each, in a process of its
own (`-p tests.mutants`, TIERCEL_MUTANT). A file that hangs has noticed, too.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch

from tiercel.kernels import native
from tiercel.models.base import at_once
from tiercel.models.frame import Frame

VARIABLE = "TIERCEL_MUTANT"
TIMEOUT_S = 300

real_restore, real_tails, real_forward = native.restore, native.write_tails, Frame.forward


def a_ring_goes_on_one_row_off(kept, tails, moves, ring_rows):
    real_restore(kept, tails, moves + torch.tensor([0, 1, 0], dtype=torch.int32), ring_rows)


def a_tail_misses_its_last_row(recent, tails, moves, ring_rows):
    real_tails(recent, tails, moves - torch.tensor([0, 1, 0, 0, 0], dtype=torch.int32), ring_rows)


def layers_are_computed_before_their_bytes_come(self, spans, rows=None, before=at_once):
    logits = real_forward(self, spans, rows)
    before(self.stage.end - 1)
    return logits


OF_MODELS = {
    a_ring_goes_on_one_row_off: (native, "restore"),
    a_tail_misses_its_last_row: (native, "write_tails"),
    layers_are_computed_before_their_bytes_come: (Frame, "forward"),
}


def mutants():
    """Every fault by its name: (where it goes, the name there, the fault)."""
    from tests.simulation import test_mutants, test_schedule

    known = test_mutants.MUTANTS | test_mutants.SPARSE_MUTANTS
    known |= test_schedule.MUTANTS | test_schedule.SPARSE_MUTANTS | OF_MODELS
    return {mutant.__name__: (*where, mutant) for mutant, where in known.items()}


def pytest_configure():
    if name := os.environ.get(VARIABLE):
        owner, attribute, mutant = mutants()[name]
        if isinstance(vars(owner).get(attribute), property):
            mutant = property(mutant)
        patch.object(owner, attribute, mutant).start()


def notices(file, name):
    command = [sys.executable, "-m", "pytest", "-x", "-p", "tests.mutants", "-p", "no:cacheprovider", file]
    environment = {**os.environ, VARIABLE: name, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
    return done.returncode == 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--at-once", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", help="Some faults, by name.")
    options = parser.parse_args()
    pairs = [(file, name) for file in options.files for name in options.only or ["", *mutants()]]
    with ThreadPoolExecutor(options.at_once) as processes:
        for (file, name), noticed in zip(
            pairs, processes.map(lambda pair: notices(*pair), pairs), strict=True
        ):
            print(file, name or "(no fault)", "notices" if noticed else "-", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
