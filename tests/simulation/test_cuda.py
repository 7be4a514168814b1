"""Goal: on a CUDA device no schedule serves a wrong byte. Method: `cuda` runs whole caches from seeds with
real streams, every way to copy, and delays everywhere; 20,000 steps and more."""

import logging

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

STEPS = 500


@pytest.mark.parametrize("seed", range(48))
def test_every_seed_holds_on_a_device(seed):
    from tests.simulation.cuda import CudaWorld
    from tests.simulation.run import numbers_of

    logging.disable(logging.CRITICAL)
    try:
        CudaWorld(seed).run(numbers_of(seed, STEPS))
    finally:
        logging.disable(logging.NOTSET)
