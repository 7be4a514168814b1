"""Goal: numbers of the host arrive on a device as they were when they were sent, whatever the device is busy
with. Method: many of them, of several types and sizes, behind work that takes long."""

import numpy as np
import pytest
import torch

from tests.kernels.devices import on_gpu
from tiercel.models.flat import send, send_to


@pytest.mark.parametrize("device", [on_gpu])
def test_numbers_arrive_as_they_were_sent(device):
    where, random = torch.device(device), np.random.default_rng(0)
    sent = []
    torch.cuda._sleep(200_000_000)  # a tenth of a second: no kernel has read its buffer yet
    for size in (1, 7, 1024, 1025, 40_000, 0, 3) * 3:
        for dtype in (np.int32, np.int64, np.float64):
            numbers = random.integers(-(2**31), 2**31 - 1, size).astype(dtype)
            sent.append((numbers.copy(), send(numbers, where)))
            numbers.fill(0)
    for numbers, there in sent:
        assert there.is_cuda and torch.equal(there.cpu(), torch.from_numpy(numbers))
    target = torch.zeros(9, dtype=torch.int32, device=where)
    for i in range(100):  # buffers are used again
        send_to(np.arange(i, i + 9, dtype=np.int32), target)
    assert target.tolist() == list(range(99, 108))
