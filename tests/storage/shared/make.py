"""Small shared stores, and processes that use them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.storage.file.make import SEGMENT_BYTES, SIZE
from tiercel.storage.shared import SharedStore

LINGER_S = 0.5


def make_shared(path: Path, size: int = SIZE, **options) -> SharedStore:
    small = {"segment_bytes": SEGMENT_BYTES, "free": 0, "linger_s": LINGER_S}
    return SharedStore(path, size, **(small | options))


def owner_of(store: SharedStore) -> int:
    return store.stats()["owner"]


def kill_owner(store: SharedStore) -> None:
    """Returns when it is dead."""
    owner = owner_of(store)
    os.kill(owner, signal.SIGKILL)
    wait_for_end(owner)


def wait_for_end(process: int) -> None:
    until_s = time.monotonic() + 60
    with suppress(ProcessLookupError):
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.kill(process, 0)
            assert time.monotonic() < until_s, f"process {process} does not end"
            time.sleep(0.01)
