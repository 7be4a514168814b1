"""Goal: records in a real Mooncake cluster, also when its master or a holder goes away. Method: processes of
their own where one may crash; what is registered is watched, because TCP does not mind."""

import ctypes
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.servers import free_port, mooncake_holder, mooncake_master
from tests.wait import until
from tiercel.errors import StoreError
from tiercel.storage.base import Get, Put
from tiercel.storage.conformance.samples import Read, Sample, expect_absent, expect_there, keep
from tiercel.storage.mooncake import MooncakeStore

SEGMENT = 32 << 20
SAMPLES = [Sample(number, size) for number, size in enumerate((1, 4096, 300_000, 2 << 20))]


@pytest.fixture(scope="module")
def master():
    with mooncake_master() as own, mooncake_holder(own, SEGMENT):
        yield own


@pytest.fixture
def store(master):
    with MooncakeStore(master.address, metrics_port=master.metrics_port) as own:
        own.clear()
        yield own


def run(code: str, *arguments: str) -> str:
    """In a process of its own, which nobody told anything; what it said. A crash or a hang is a failure."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


READ = """
import sys
from tiercel.storage.mooncake import MooncakeStore
from tiercel.storage.conformance.samples import Sample, expect_there, keep
with MooncakeStore(sys.argv[1]) as store:
    expect_there(store, [Sample(n, size) for n, size in enumerate((1, 4096, 300_000, 2 << 20))], "read")
    keep(store, [Sample(100, 50_000)])
"""


def test_a_record_put_by_one_process_is_read_by_another(master, store):
    keep(store, SAMPLES)
    run(READ, master.address)
    expect_there(store, [Sample(100, 50_000)], "put by another process")


def test_a_record_is_found_under_its_hexadecimal_name(master, store):
    keep(store, SAMPLES[:2])
    assert dict(store.keys()) == {sample.key: sample.form.record_bytes for sample in SAMPLES[:2]}
    assert store._client.is_exist("tiercel:2:" + SAMPLES[0].key.hex()) == 1


def test_records_of_others_are_left_alone(store):
    client = store._client
    with store._staging.lend(100) as (_, address):
        assert client.put_from("somebody else's", address, 100) == 0
    keep(store, SAMPLES[:1])
    store.clear()
    assert client.is_exist("somebody else's") == 1
    assert list(store.keys()) == []
    client.remove("somebody else's", True)


def test_a_lease_that_ended_too_early_is_an_error_and_not_a_value_that_is_lost(store, monkeypatch):
    """What may be read a moment later must not be taken for damage, and deleted."""
    keep(store, SAMPLES[:1])

    class TooLate:
        def __init__(self, client):
            self._client = client

        def __getattr__(self, name):
            return getattr(self._client, name)

        def batch_get_into_multi_buffers(self, keys, addresses, sizes):
            return [-707] * len(keys)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_client", TooLate(store._client))
        with pytest.raises(StoreError, match="LEASE_ENDED"):
            store.get([Read(SAMPLES[0]).get])
    expect_there(store, SAMPLES[:1], "a moment later")


def test_the_engine_is_given_only_memory_it_knows(store, monkeypatch):
    known, used = [], []

    class Watched:
        """The client, with notes of what it was told. TCP takes any address, RDMA does not."""

        def __init__(self, client):
            self._client = client

        def __getattr__(self, name):
            return getattr(self._client, name)

        def register_buffer(self, address, size):
            known.append(range(address, address + size))
            return self._client.register_buffer(address, size)

        def batch_put_from_multi_buffers(self, keys, addresses, sizes, how):
            used.extend(zip(sum(addresses, []), sum(sizes, []), strict=True))
            return self._client.batch_put_from_multi_buffers(keys, addresses, sizes, how)

        def batch_get_into_multi_buffers(self, keys, addresses, sizes):
            used.extend(zip(sum(addresses, []), sum(sizes, []), strict=True))
            return self._client.batch_get_into_multi_buffers(keys, addresses, sizes)

    store._staging.close()  # of an area that was registered when the store was opened
    monkeypatch.setattr(store, "_client", Watched(store._client))
    monkeypatch.setattr(store._staging, "_client", store._client)
    memory = memoryview(bytearray(5 << 20))
    store.register(memory)
    sample = Sample(1, 2 << 20)
    inside = memory[100 : 100 + (2 << 20)]
    inside[:] = sample.payload
    for parts in ([sample.header, inside], [sample.header, sample.payload], [sample.header + sample.payload]):
        store.delete([sample.key])
        assert store.put([Put(sample.key, parts)]) == [True]
        header = memoryview(bytearray(len(sample.header)))
        assert store.get([Read(sample).get, Get(sample.key, [header, inside])]) == [True, True]
    store.get([Read(Sample(2, 20 << 20)).get])
    assert used
    for address, size in used:
        assert any(address in memory and address + size <= memory.stop for memory in known)
    start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    assert (start + 100, 2 << 20) in used, "a long part in registered memory is sent from where it lies"


class GivesUp:
    """The client when a holder sends too slowly: it answers after a while, and its bytes come later."""

    def __init__(self, client):
        self._client, self.late = client, []

    def __getattr__(self, name):
        return getattr(self._client, name)

    def batch_get_into_multi_buffers(self, keys, addresses, sizes):
        self.late += zip(sum(addresses, []), sum(sizes, []), strict=True)
        time.sleep(0.01)
        return [-800] * len(keys)

    def arrive(self):
        for address, size in self.late:
            ctypes.memset(address, 1, size)


def test_late_bytes_of_a_call_that_was_given_up_reach_nobodys_memory(store, monkeypatch):
    """`tests/storage/slow_holder.py` has a real holder that sends too slowly. That takes two minutes."""
    sample, memory = Sample(1, 2 << 20), memoryview(bytearray(5 << 20))
    keep(store, [sample])
    store.register(memory)
    inside = memory[: sample.form.record_bytes]
    slow = GivesUp(store._client)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_client", slow)
        patch.setattr("tiercel.storage.mooncake._GIVES_UP_S", 0.005)
        with pytest.raises(StoreError, match="TRANSFER_FAILED"):
            store.get([Get(sample.key, [inside])])
        patch.setattr("tiercel.storage.mooncake._GIVEN_UP_MOST", 1)
        with pytest.raises(StoreError, match="too many calls did not end"):
            store.get([Get(sample.key, [inside])])
    inside[:] = b"\7" * len(inside)
    with store._staging.lend(100) as (area, _):
        area[:] = b"\7" * len(area)
        slow.arrive()
        assert set(bytes(area)) == set(bytes(inside)) == {7}
    expect_there(store, [sample], "the next read")


def test_small_parts_travel_together(store):
    sample = Sample(1, 100_000)
    parts = [sample.header, *(sample.payload[at : at + 100] for at in range(0, 100_000, 100))]
    with store._laid([Put(sample.key, parts)], in_place=True) as laid:
        assert [each.sizes for each in laid] == [[sample.form.record_bytes]]


def test_a_cluster_without_memory_answers_false():
    with mooncake_master() as master, MooncakeStore(master.address) as store:
        assert store.put([SAMPLES[1].put()]) == [False]
        expect_absent(store, SAMPLES, "nobody gave memory")
        assert "keeps nothing" in store.trouble and "local_segment=4GiB" in store.trouble
        with mooncake_holder(master, 32 << 20), MooncakeStore(master.address) as another:
            assert not another.trouble


OUTLIVE = """
from tests.servers import mooncake_master
from tests.wait import until
from tiercel.errors import StoreError
from tiercel.storage.mooncake import MooncakeStore
from tiercel.storage.conformance.samples import Read, Sample, expect_absent, expect_there, keep

def refused(act):
    try:
        act()
    except StoreError:
        return True
    return False

sample = Sample(1, 100_000)
with mooncake_master() as master:
    store = MooncakeStore(master.address, local_segment=32 << 20, timeout_s=2)
    keep(store, [sample])
    expect_there(store, [sample], "before")
    master.kill()
    assert refused(lambda: store.contains([sample.key]))
    assert refused(lambda: store.get([Read(sample).get]))
    until(lambda: store._client.health_check() == 2, "the client knows that the master is gone")
    for _ in range(100):  # each of which would take 4 s
        assert refused(lambda: store.put([sample.put()]))
        assert refused(lambda: store.get([Read(sample).get]))
        assert refused(lambda: store.delete([sample.key]))
        assert refused(store.clear)
        assert refused(store.stats)
        assert refused(lambda: list(store.keys()))
    print("refused")
    master.start()
    until(lambda: not refused(lambda: store.contains([sample.key])), "the new master answers")
    expect_absent(store, [sample], "a new master has forgotten everything")
    until(lambda: store.put([sample.put()]) == [True], "the new master has memory to put into")
    expect_there(store, [sample], "after the restart")
    print("works again")
    master.kill()
    store.close()
    print("closed")
"""


def test_without_its_master_every_call_is_refused_at_once_and_with_a_new_one_it_works_again():
    assert run(OUTLIVE).split("\n") == ["refused", "works again", "closed", ""]


STOPPED = """
import signal
from pathlib import Path
from tests.servers import mooncake_holder, mooncake_master
from tests.wait import until
from tiercel.errors import StoreError
from tiercel.storage.mooncake import MooncakeStore
from tiercel.storage.conformance.samples import Read, Sample, expect_there, keep

sample = Sample(1, 100_000)
with mooncake_master() as master, mooncake_holder(master, 32 << 20) as holder:
    store = MooncakeStore(master.address, timeout_s=1)
    keep(store, [sample])
    holder.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{holder.pid}/task")
    until(lambda: all(") T " in each.read_text() for each in threads.glob("*/stat")), "it stands still")
    try:
        store.get([Read(sample).get])
    except StoreError as error:
        print("TRANSFER_FAILED" in str(error))
    holder.send_signal(signal.SIGCONT)
    holder.kill()
    holder.wait()
    try:
        store.get([Read(sample).get])
    except StoreError as error:
        print("TRANSFER_FAILED" in str(error))
    assert store.contains([Sample(2).key]) == [False]
    store.close()
"""


def test_a_holder_that_stands_still_or_dies_is_an_error_of_its_records_only():
    assert run(STOPPED).split() == ["True", "True"]


ENDED = """
import signal
from urllib.request import urlopen
from tests.servers import mooncake_holder, mooncake_master
from tiercel.errors import StoreError
from tiercel.storage.mooncake import MooncakeStore
from tiercel.storage.conformance.samples import Read, Sample, expect_there, keep

def holders():
    return set(urlopen(f"http://127.0.0.1:{master.metrics_port}/get_all_segments").read().decode().split())

first, *others = [Sample(n, 4_000_000) for n in range(3)]
with mooncake_master() as master, mooncake_holder(master, 32 << 20) as killed:
    store = MooncakeStore(master.address, timeout_s=1)
    keep(store, [first])
    before = holders()
    with mooncake_holder(master, 32 << 20) as stopped:
        [store._how.preferred_segment] = holders() - before
        keep(store, others)
        killed.kill()
        killed.wait()
        stopped.send_signal(signal.SIGSTOP)
        try:
            store.get([Read(sample).get for sample in (first, *others)])
        except StoreError as error:
            print("TRANSFER_FAILED" in str(error))
        with store._staging.lend(1) as (area, _):
            area[:] = bytes([7]) * len(area)
            stopped.send_signal(signal.SIGCONT)
            expect_there(store, others, "the stopped holder goes on")
            print(set(bytes(area)) == {7})
        store.close()
"""


def test_a_read_that_failed_has_ended_with_all_its_records():
    """One holder is killed, so its record fails at once. The other is stopped while it sends two records."""
    assert run(ENDED).split() == ["True", "True"]


def test_with_two_replicas_records_outlive_a_holder_once_the_master_knows():
    with (
        mooncake_master("--client_ttl=2") as master,
        mooncake_holder(master, SEGMENT),
        mooncake_holder(master, SEGMENT) as second,
        MooncakeStore(master.address, replicas=2) as store,
    ):
        keep(store, SAMPLES)
        second.kill()
        second.wait()

        def there():
            try:
                expect_there(store, SAMPLES, "one of two holders died")
            except StoreError:
                return False
            return True

        until(there, "the master knows that a holder is gone")


FORGOTTEN = """
import sys
from tiercel.storage.mooncake import MooncakeStore
from tiercel.storage.conformance.samples import Sample, keep
store = MooncakeStore(sys.argv[1], local_segment=16 << 20)
store.register(memoryview(bytearray(1 << 20)))
keep(store, [Sample(1)])
print("end")
"""


def test_a_process_that_forgets_to_close_ends_well(master):
    assert run(FORGOTTEN, master.address) == "end\n"


def test_a_master_that_is_not_there_is_an_error_at_once():
    with pytest.raises(StoreError, match="no master at"):
        MooncakeStore(f"127.0.0.1:{free_port()}")


def test_a_server_that_is_no_master_is_an_error():
    code = """
import os, socket
os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] = "1"
from tiercel.errors import StoreError
from tiercel.storage.mooncake import MooncakeStore
listener = socket.create_server(("127.0.0.1", 0))
try:
    MooncakeStore(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=1)
except StoreError as error:
    print("no client" in str(error))
"""
    assert run(code) == "True\n"


def test_what_the_user_set_stays_and_the_rest_is_set():
    code = """
import os
os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = "17"
from tiercel.storage.mooncake import set_environment
set_environment("10.0.0.1", 2.5)
names = ("TCP_STATUS_TIMEOUT_SEC", "TCP_PROGRESS_TIMEOUT_SEC", "RPC_TIMEOUT_MS", "TCP_BIND_ADDRESS")
print(*(os.environ[f"MC_{name}"] for name in names))
"""
    assert run(code) == "17 3 2500 10.0.0.1\n"
