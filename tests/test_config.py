"""Goal: a wrong setting is found at the start, by its name and value."""

import pytest

from tiercel.config import CacheConfig, parse_bytes
from tiercel.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("40GiB", 40 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("200GB", 200 * 10**9),
        (" 7 B ", 7),
        (12, 12),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "forty", "-1", "1 gib", "1e3", "3 XB", None, 1.5])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError, match="host_bytes"):
        parse_bytes(text, "host_bytes")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_pages", -1),
        ("device_pages", "8"),
        ("device_pages", True),
        ("staging_tails", -1),
        ("host_bytes", -1),
        ("tail_every_pages", 0),
        ("tails_per_path", 0),
        ("layout", "page_last"),
        ("copier", "rsync"),
        ("save", "never"),
        ("evict", "mru"),
        ("evict", 3),
    ],
)
def test_a_setting_that_can_not_be_used_is_named_with_its_value(field, value):
    with pytest.raises(ConfigError) as error:
        CacheConfig(**{"device_pages": 8} | {field: value})
    assert error.value.field == field and error.value.value == value and field in str(error.value)
