"""A holder of a Mooncake store that sends so slowly that Mooncake no longer waits: what it sends then reaches
nobody's memory. It takes two minutes. No rights are needed where users may have namespaces.

unshare --map-root-user --net python -m tests.storage.slow_holder
"""

from __future__ import annotations

import mmap
import time

from tests.peers.two_hosts import do
from tests.servers import mooncake_holder, mooncake_master
from tiercel.errors import StoreError
from tiercel.storage import mooncake
from tiercel.storage.base import Get
from tiercel.storage.conformance.samples import Sample, keep

SAMPLE = Sample(1, 15 << 20)
SLOW = ("tbf", "rate", "1500kbit", "burst", "32kb", "latency", "200ms")


def main() -> None:
    do("ip", "link", "set", "lo", "up", "mtu", "1500")
    with mooncake_master() as master, mooncake_holder(master, 64 << 20):
        store = mooncake.MooncakeStore(master.address)
        keep(store, [SAMPLE])
        memory = memoryview(mmap.mmap(-1, SAMPLE.form.record_bytes))
        store.register(memory)
        do("tc", "qdisc", "add", "dev", "lo", "root", *SLOW)
        try:
            store.get([Get(SAMPLE.key, [memory])])
            raise AssertionError("all of it came in time")
        except StoreError as error:
            print(error, flush=True)  # noqa: T201
        [(area, _)] = mooncake._given_up
        area = area[: len(memory)]
        area[:] = memory[:] = b"\7" * len(memory)
        with store._staging.lend(len(memory)) as (another, _):
            another[:] = b"\7" * len(another)
            time.sleep(20)
            late = len(memory) - bytes(area).count(7)
            print(f"{late:,} B came late", flush=True)  # noqa: T201
            assert late, "the holder did not send any more"
            assert set(bytes(memory)) == set(bytes(another)) == {7}, "they reached memory of others"
        do("tc", "qdisc", "del", "dev", "lo", "root")


if __name__ == "__main__":
    main()
