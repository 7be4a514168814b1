"""An adapter of LMCache's, made by its factory, driven as its controllers do, on its own memory objects."""

import json
import random
import select
import time
from argparse import Namespace
from contextlib import contextmanager

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd


def layout(*shape, dtype=torch.bfloat16):
    return MemoryLayoutDesc([torch.Size(shape)], [dtype])


ATTENTION, WINDOW = layout(2, 2, 16, 64), layout(2, 1, 16, 80)
GROUPS = {0: ATTENTION, 1: WINDOW}
KEYS = [ObjectKey(bytes([n]) * 32, "a/model", 0x01000100, n % 2, "salt") for n in range(40)]


def ours(store):
    return {
        "type": "plugin",
        "module_path": "tiercel.integrations.lmcache",
        "class_name": "Adapter",
        "adapter_params": {"store": store},
    }


def make(spec):
    (config,) = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(spec)])).adapters
    return create_l2_adapter(config)


def memory(shape, data=None):
    (tensor,), (dtype,) = shape.shapes, shape.dtypes
    size = tensor.numel() * dtype.itemsize
    raw = torch.frombuffer(bytearray(data or size), dtype=torch.uint8)
    about = MemoryObjMetadata(tensor, dtype, 0, size, 1, fmt=MemoryFormat.KV_2LTD)
    about.shapes, about.dtypes = shape.shapes, shape.dtypes
    return TensorMemoryObj(raw, about, None)


def data_of(key, shape):
    return random.Random(f"{key} {shape}").randbytes(memory(shape).get_size())


@contextmanager
def driven(spec):
    driver = Driver(make(spec))
    try:
        yield driver
    finally:
        driver.adapter.close()


class Driver:
    """What LMCache's store controller and prefetch controller do with one adapter."""

    def __init__(self, adapter):
        self.adapter = adapter

    def store(self, keys, groups=GROUPS):
        return self.stored(self.begin_store(keys, groups))

    def begin_store(self, keys, groups=GROUPS):
        objects = [
            memory(groups[key.object_group_id], data_of(key, groups[key.object_group_id])) for key in keys
        ]
        return self.adapter.submit_store_task(keys, objects)

    def stored(self, number):
        pop = self.adapter.pop_completed_store_tasks
        return self.wait(self.adapter.get_store_event_fd(), lambda: pop().get(number))

    def found(self, keys, groups=GROUPS):
        """Which of these keys are there, by a lookup that locks them."""
        number = self.adapter.submit_lookup_and_lock_task(keys, groups)
        query = self.adapter.query_lookup_and_lock_result
        bits = self.wait(self.adapter.get_lookup_and_lock_event_fd(), lambda: query(number))
        return [bits.test(place) for place in range(len(keys))]

    def loaded(self, keys, groups=GROUPS):
        """What comes for each key: right bytes, wrong bytes, or nothing."""
        objects = [memory(groups[key.object_group_id]) for key in keys]
        number = self.adapter.submit_load_task(keys, objects)
        query = self.adapter.query_load_result
        bits = self.wait(self.adapter.get_load_event_fd(), lambda: query(number))
        return [
            "missed"
            if not bits.test(place)
            else "right"
            if bytes(item.byte_array) == data_of(key, groups[key.object_group_id])
            else "wrong"
            for place, (key, item) in enumerate(zip(keys, objects, strict=True))
        ]

    def wait(self, descriptor, asked):
        until_s = time.monotonic() + 60
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while (answer := asked()) is None:
            assert time.monotonic() < until_s, "it never ends"
            for number, _ in poll.poll(1000):
                consume_fd(number)
        return answer

    def signalled(self, descriptor):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
