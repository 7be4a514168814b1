"""Goal: a URL opens the store it names, and a wrong one says what is wrong with it."""

import socket
import subprocess
import sys

import pytest

from tests.servers import redis_server
from tiercel.errors import ConfigError
from tiercel.storage.file import FileStore
from tiercel.storage.memory import MemoryStore
from tiercel.storage.open import open_store
from tiercel.storage.redis import RedisStore


class Own(MemoryStore):
    """Somebody's own store."""

    def __init__(self, colour: str = "none", read_only: bool = False) -> None:
        super().__init__()
        self.colour = colour
        self.read_only = read_only


class NotAStore:
    pass


def test_a_memory_store_with_and_without_a_size():
    with open_store("memory:") as plain, open_store("memory:?size=1KiB") as small:
        assert isinstance(plain, MemoryStore)
        assert plain.stats()["bytes_most"] is None
        assert small.stats()["bytes_most"] == 1024


def test_a_folder_with_options(tmp_path):
    with open_store(f"file://{tmp_path}/a%20b?size=64MiB&free=0&evict=lfu") as store:
        assert isinstance(store, FileStore)
        assert (tmp_path / "a b").is_dir()


def test_a_folder_can_be_read_while_another_writes_it(tmp_path):
    url = f"file://{tmp_path}/store?size=64MiB&free=0"
    with open_store(url), open_store(url, read_only=True) as reader:
        assert list(reader.keys()) == []


def test_redis_by_each_of_its_names():
    with redis_server() as server:
        for url in (server.url, f"valkey://127.0.0.1:{server.port}/1", f"{server.url}?timeout_s=2.5"):
            with open_store(url) as store:
                assert isinstance(store, RedisStore)
                store.clear()


def test_redis_by_a_unix_socket_and_a_number_of_a_database():
    with redis_server(unix=True) as server, open_store(f"{server.url}?db=3") as store:
        assert store.contains([]) == []


def test_a_class_of_ones_own_gets_its_options_as_text():
    with open_store("tests.storage.test_open:Own?colour=blue%20green") as store:
        assert isinstance(store, Own)
        assert store.colour == "blue green"


def test_read_only_is_told_to_those_who_know_it():
    assert open_store("tests.storage.test_open:Own", read_only=True).read_only  # type: ignore[attr-defined]
    assert isinstance(open_store("memory:", read_only=True), MemoryStore)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket", "is none of file:, shared:, redis:"),
        ("/var/cache", "is none of file:"),
        ("", "is none of file:"),
        ("memory:?sise=3", "has no option sise; options are size"),
        ("memory:?size=three", "size: is not a size such as 40GiB"),
        ("memory:?size=1&size=2", "option size is there twice"),
        ("memory:?size", "write options as name=value"),
        ("file://var/cache", "three slashes"),
        ("file:///var/cache?evict=oldest", "evict: "),
        ("file:///var/cache?read_only=1", "has no option read_only"),
        ("redis:///0", "host:port/db"),
        ("redis://host:port/0", "host:port/db"),
        ("redis://host/cache", "host:port/db"),
        ("redis://host?timeout_s=0", "option timeout_s: '0' is not a number above 0"),
        ("redis+unix://tmp/redis.sock", "three slashes"),
        ("mooncake://master", "host:port"),
        ("mooncake://master:1?replicas=0", "replicas: must be at least 1"),
        ("mooncake://master:1?segment=1", "options are local_segment, replicas, protocol"),
        ("no.such.module:Class", "can not be loaded: No module named 'no'"),
        ("tests.storage.test_open:Missing", "can not be loaded: module 'tests.storage.test_open' has no"),
        ("tests.storage.test_open:Own?size=3", "got an unexpected keyword"),
        ("tests.storage.test_open:NotAStore", "is not a class derived from tiercel.storage.base.Store"),
    ],
)
def test_what_is_wrong_is_said(url, why):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert caught.value.field == "store"
    assert why in caught.value.why


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:hidden@host/cache",
        "redis://me:hid?den@host:1/0",
        "redis://me:hid/den@host:1/0?wrong=1",
        "redis://:hidden@host:1/0?wrong=1",
        "s3://me:hidden@bucket",
        "redis://host:1/0?password=hidden",
        "tests.storage.test_open:Own?api_token=hidden",
    ],
)
def test_no_message_tells_a_password(url):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "hid" not in str(caught.value)
    assert "den" not in str(caught.value)


def run_without(module: str, url: str) -> str:
    """What is said where a client is not installed."""
    code = f"""
import sys
sys.modules[{module!r}] = None
from tiercel.errors import ConfigError
from tiercel.storage.open import open_store
try:
    open_store({url!r})
except ConfigError as error:
    print(error.why)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


def test_a_missing_client_says_what_to_install(free_listener):
    assert 'pip install "redis[hiredis]"' in run_without("redis", "redis://host:1/0")
    told = run_without("mooncake", f"mooncake://127.0.0.1:{free_listener}")
    assert "pip install mooncake-transfer-engine-non-cuda" in told
    assert "libibverbs1" in told


@pytest.fixture
def free_listener():
    """A port where somebody listens: the client is loaded only then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_back_end_is_imported_only_when_it_is_chosen():
    code = """
import sys
from tiercel.storage.open import open_store
open_store("memory:")
sys.exit(any(name in sys.modules for name in ("redis", "mooncake", "torch", "tiercel.storage.file")))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
