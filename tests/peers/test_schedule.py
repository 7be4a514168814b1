"""Goal: whatever happens in whatever phase of a transfer, answers are right, requests end once, nothing is
lost, and the next request pulls again. Method: `tests/peers/schedule.py`; `make soak` runs more seeds."""

import subprocess
import sys

import pytest

from tests.peers.schedule import FAULTS, PHASES, Plan, pair

SEEDS = range(20)


@pytest.fixture(scope="module")
def both():
    with pair(stopped_s=1.5) as own:
        yield own


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: "{0.fault} in {0.phase}".format(Plan.of(seed)))
def test_a_fault_costs_no_answer_and_no_place(both, seed):
    both.trial(Plan.of(seed))


def test_these_seeds_have_every_fault_and_every_phase():
    plans = [Plan.of(seed) for seed in SEEDS]
    assert {plan.fault for plan in plans} == set(FAULTS)
    assert {plan.phase for plan in plans} == set(PHASES)


def test_a_link_between_two_machines_that_is_cut_costs_no_answer_either():
    """Over both transports; in namespaces of its own, see `tests/peers/two_hosts.py`."""
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-m", "tests.peers.two_hosts"]
    subprocess.run(command, check=True, timeout=120)
