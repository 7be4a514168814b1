"""Goal: an owner above its limit loses what is too much, and nobody waits for that. Method: pages counted
after each step."""

from tiercel.cache import TieredCache
from tiercel.cache.core import TRIM_ITEMS
from tiercel.cache.request import Request
from tiercel.config import CacheConfig
from tiercel.spec.attention import mha


def test_what_an_owner_may_not_keep_leaves_a_little_in_each_step_until_it_is_gone():
    spec = mha("owned", 4, layers=1, kv_heads=1, head_dim=8)
    cache = TieredCache(spec, CacheConfig(device_pages=3 * TRIM_ITEMS))
    for n in range(3 * TRIM_ITEMS):
        chain = cache.chain([n] * 4, owner="one")
        request = cache.begin(chain)
        assert isinstance(request, Request)
        cache.extend(request, 4)
        cache.commit(request, 4)
        cache.finish(request)
    assert not cache.busy
    cache.limit("one", spec.page_bytes)
    left = []
    while cache.busy:
        cache.step()
        left.append(len(cache.tree.index))
    assert left == [2 * TRIM_ITEMS, TRIM_ITEMS, 1]
    cache.check()
    cache.close()
