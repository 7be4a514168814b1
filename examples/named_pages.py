"""`NamedPages` for an engine that has a cache of its own and wants a store behind it. Run: python
examples/named_pages.py

The engine names its pages itself. What it puts is found after a restart, and each byte that comes back is the
one that was put. With `shared://` in place of `file://` all processes of a machine find it at once.
"""

import tempfile

from tiercel import NamedPages

TOKENS, PAGE, BYTES = 150, 16, 4096


def computed(number: int) -> bytes:
    """What a model would compute for a page."""
    return bytes([number + 1]) * BYTES


def main() -> None:
    keys = [f"hash of the first {end} tokens" for end in range(PAGE, TOKENS + 1, PAGE)]
    about = {"engine": "toy", "model": "toy-1b", "dtype": "bf16"}  # all that decides what the bytes mean
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the second time is after a restart
            pages = NamedPages(f"file://{folder}/kv?size=16MiB", about)
            pool = pages.pool("kv", BYTES)
            memory = [bytearray(BYTES) for _ in keys]
            found = pool.get(keys, memory)
            count = found.index(False) if False in found else len(found)
            assert all(memory[number] == computed(number) for number in range(count))
            print(f"reused {count * PAGE} of {TOKENS} tokens (0 device, 0 host, {count * PAGE} store)")
            missing = range(count, len(keys))
            pool.put([keys[number] for number in missing], [computed(number) for number in missing])
            print(pages.stats())
            pages.close()


if __name__ == "__main__":
    main()
