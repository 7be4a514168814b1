"""`HostCache` for an engine that owns its device memory. Run: python examples/host_cache.py

The engine allocates its tensors and gives out its places, as vLLM and SGLang do. The cache has host memory,
and a store if one is attached. The engine saves pages before it needs their places for others, and loads them
into any places later. `toy_engine.py` shows the other way, where the device memory is the cache's.
"""

import torch

from tiercel import BorrowedMemory, CacheConfig, CacheSpec, HostCache, Transfer, Wait, make_memories
from tiercel.spec import Part, State, Stream

PAGE, WIDTH = 16, 8
SPEC = CacheSpec(
    "toy",
    PAGE,
    (
        Stream("kv", layers=(0, 1), parts=(Part("key", 4 * WIDTH), Part("value", 4 * WIDTH))),
        Stream("state", layers=(2,), parts=(Part("fp32", 4 * WIDTH),), keep=State()),
    ),
)


def main() -> None:
    # The engine's own memory: a tensor for each stream and layer, [places, …]. They may be views of a larger
    # one, on a CPU or on CUDA; only the bytes of one place must lie together.
    kv = torch.zeros(2, 12, PAGE, 2, WIDTH)
    states = torch.zeros(4, WIDTH)
    memory = BorrowedMemory(SPEC, {("kv", 0): kv[0], ("kv", 1): kv[1], ("state", 2): states})
    settings = CacheConfig(host_bytes=2**20)
    cache = HostCache(SPEC, settings, make_memories(SPEC, settings, memory))

    def finish(transfer: Transfer) -> None:
        """Until `step` tells that a transfer has ended, its places belong to it."""
        while True:
            for ended in cache.step():
                if ended.error is not None:
                    raise ended.error
                if ended.transfer is transfer:
                    return
            cache.wait(0.1)

    # A text of three full pages was computed: its pages lie in places 5, 0 and 9, and the state after the
    # third page in place 1.
    text = list(range(50))
    kv[:, [5, 0, 9]] = torch.randn(2, 3, PAGE, 2, WIDTH)
    states[1] = torch.randn(WIDTH)
    pages, state = kv[:, [5, 0, 9]].clone(), states[1].clone()
    finish(cache.save(cache.chain(text, namespace=("tenant",)), 0, [5, 0, 9], tails={3: 1}))

    # The engine uses these places for others. Later a longer text begins alike.
    kv.zero_()
    states.zero_()
    chain = cache.chain([*text, 1, 2, 3], namespace=("tenant",))
    found = cache.find(chain, hold=True)  # held on the host until it is loaded or released
    assert not isinstance(found, Wait), "no store is attached: nothing is on its way"
    print(found.reuse)
    places = [2, 3, 4][: found.pages]  # the engine gives out places of its own
    loading = cache.load(found, places, tails=[0])
    assert isinstance(loading, Transfer), "what is held can not have left"
    finish(loading)
    assert torch.equal(kv[:, places], pages) and torch.equal(states[0], state), "not one bit differs"
    cache.close()


if __name__ == "__main__":
    main()
