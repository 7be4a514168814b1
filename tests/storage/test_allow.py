"""Goal: nobody has a store opened outside the places that were named. Method: every way around a name."""

import pytest

from tiercel.errors import ConfigError
from tiercel.storage.open import _PATHS, _PORTS, _SCHEMES, check_allow, why_not


def test_every_scheme_has_places_that_can_be_allowed():
    unknown = _SCHEMES.keys() - {*_PATHS, *_PORTS, "memory"}
    assert not unknown, f"add {unknown} to _PATHS or _PORTS of storage/open.py, and its URLs to this file"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches-of-others").mkdir()
    (tmp_path / "caches" / "way-out").symlink_to(tmp_path / "caches-of-others")
    return tmp_path


@pytest.mark.parametrize(
    "inside", ["caches", "caches/", "caches/one?size=1GiB", "caches/a%20b", "caches/x/../y"]
)
def test_a_named_folder_and_all_in_it_are_allowed(folder, inside):
    assert why_not(f"file://{folder}/{inside}", [f"file://{folder}/caches"]) == ""


@pytest.mark.parametrize(
    "outside",
    [
        "",
        "caches-of-others",
        "caches/../caches-of-others",
        "caches/%2e%2e/caches-of-others",
        "caches/way-out",
        "caches/way-out/deeper",
    ],
)
def test_what_only_begins_like_a_named_folder_or_leads_out_of_it_is_not(folder, outside):
    assert "--store-allow" in why_not(f"file://{folder}/{outside}", [f"file://{folder}/caches"])


@pytest.mark.parametrize(
    ("allowed", "url", "may"),
    [
        ("redis://cache", "redis://cache:6379/0", True),
        ("redis://cache", "redis://user:word@CACHE:7000/0?timeout_s=2", True),
        ("redis://cache:6379", "redis://cache", True),
        ("redis://cache:6379", "redis://cache:6380", False),
        ("redis://cache", "redis://other", False),
        ("redis://cache", "redis://cache@other", False),
        ("redis://cache", "redis://cache:1@other:6379", False),
        ("redis://cache", "redis://cache.evil.example", False),
        ("redis://cache", "rediss://cache", False),
        ("redis://[::1]:6379", "redis://[::1]:6379", True),
        ("mooncake://master:50051", "mooncake://master:50051?replicas=2", True),
        ("mooncake://master:50051", "mooncake://master:22", False),
        ("redis+unix:///run/redis", "redis+unix:///run/redis/a.sock?db=1", True),
        ("redis+unix:///run/redis", "redis+unix:///run/other.sock", False),
        ("memory:", "memory:?size=1GiB", True),
        ("memory:", "file:///tmp", False),
        ("file:///", "redis://cache", False),
    ],
)
def test_a_named_host_is_allowed_and_no_other(allowed, url, may):
    assert (why_not(url, [allowed]) == "") is may


@pytest.mark.parametrize(
    "url",
    [
        "antigravity:Class",
        "tests.storage.test_open:Own?colour=red",
        "file:///tmp/x?evict=os:system",
        "file:///tmp/x?size=1GiB&evict=os%3Asystem",
        "redis:Own",
        "file:Own",
        "file://host/path",
        "redis://",
        "redis://cache:port",
        "",
        "nonsense",
    ],
)
def test_a_class_or_nonsense_is_allowed_to_nobody(url):
    assert why_not(url, ["file:///", "memory:", "redis://cache"]) != ""


@pytest.mark.parametrize("url", ["package.module:Class", "file:cache", "redis://", "here", ""])
def test_a_place_that_is_none_is_refused_at_the_start(url):
    with pytest.raises(ConfigError, match="store_allow"):
        check_allow(url)
