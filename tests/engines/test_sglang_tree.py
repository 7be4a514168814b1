"""Goal: what SGLang's own tree finds again through our store is byte for byte what a model would compute.
Method: its tree, controller, host pools and device pools on a CPU (`sglang_cpu.py`), for each kind of
attention."""

import random
from array import array
from importlib.util import find_spec
from itertools import product

import pytest

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

from sglang.srt.environ import envs  # noqa: E402

from tests.engines.sglang_cpu import MODELS, server, store_of  # noqa: E402

LAYOUTS = ["layer_first", "page_first_direct"]
CASES = [
    (name, layout)
    for name, layout in product(MODELS, LAYOUTS)
    if not (name.startswith("recurrent") and layout == "layer_first")
]
"""SGLang's host pool of states has no layout with layers first."""
FULL = ["mha", "mla", "sparse", "mha_with_draft", "mla_with_heads", "sparse_with_draft"]
"""Models that can resume after any page."""


def text(made, *pages):
    """Pages of tokens, each named by a number."""
    tokens = array("q")
    for page in pages:
        chance = random.Random(page)
        tokens.extend(chance.randrange(1000) for _ in range(made.model.page))
    return tokens


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_tree_finds_what_it_saved_before_it_forgot_and_before_a_restart(tmp_path, name, layout):
    with server(store_of(tmp_path), MODELS[name], layout) as first:
        tokens = text(first, *range(8))
        first.save(tokens)
        first.forget()
        assert first.load(tokens) == len(tokens)
    with server(store_of(tmp_path), MODELS[name], layout) as second:
        assert second.load(tokens) == len(tokens)
        assert second.load(text(second, *range(100, 108))) == 0


def play(folder, name, **more):
    """Texts that share beginnings are saved and asked for, in two lives, with a forgotten device and host now
    and then. `load` looks at every byte. Returns how many pages each text found."""
    chance, saved, counts = random.Random(name), set(), []
    for _ in range(2):
        with server(store_of(folder), MODELS[name], **more) as made:
            for step in range(9):
                pages = tuple(chance.randrange(2) + 2 * n for n in range(chance.randrange(1, 4)))
                if step % 3 == 0:
                    made.forget()
                if chance.random() < 0.4:
                    made.save(text(made, *pages))
                    saved |= {pages[:end] for end in range(1, len(pages) + 1)}
                else:
                    counts.append(made.load(text(made, *pages)) // made.model.page)
                    known = max((end for end in range(len(pages) + 1) if pages[:end] in saved), default=0)
                    assert counts[-1] == known if name in FULL else counts[-1] <= known
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_texts_that_share_beginnings_find_what_they_find_with_sglangs_file_back_end(
    tmp_path, name, monkeypatch
):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "theirs"))
    counts = play(tmp_path, name)
    assert sum(counts) > 3
    if name not in FULL:
        assert counts == play(tmp_path, name, hicache_storage_backend="file")


def flip(folder, page):
    """One bit of each of these pages on the disk. Returns how many are there."""
    found = 0
    for file in folder.glob("**/*.tcs"):
        data = bytearray(file.read_bytes())
        for part in page:
            if (at := data.find(part.numpy().tobytes()[:64])) >= 0:
                data[at + 7] ^= 1
                found += 1
        file.write_bytes(data)
    return found


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_flipped_bits_on_the_disk_bring_no_wrong_page_to_the_device(tmp_path, name, layout):
    """The second page of each text is damaged in all pools that have it."""
    texts = [range(3 * n, 3 * n + 3) for n in range(3)]
    with server(store_of(tmp_path), MODELS[name], layout) as first:
        for pages in texts:
            first.save(text(first, *pages))
        seconds = product([text(first, *pages[:2]) for pages in texts], first.entries)
        rights = [right for prefix, pool in seconds for *_, right in first.right(pool, prefix)]
    assert flip(tmp_path, rights) >= 3
    with server(store_of(tmp_path), MODELS[name], layout) as second:
        counts = {second.load(text(second, *pages)) // second.model.page for pages in texts}
        assert counts == ({1} if name in FULL else {0})
        assert second.storage.stats()["damaged"] >= 3


@pytest.mark.skipif(
    not hasattr(envs, "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"), reason="comes with SGLang 0.5.23"
)
@pytest.mark.parametrize("name", MODELS)
def test_failures_and_delays_that_sglang_injects_bring_no_wrong_page_to_the_device(tmp_path, name):
    """Every fifth call answers that it failed, each after up to 2 ms."""
    found = 0
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.2),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.002),
        server(store_of(tmp_path), MODELS[name]) as made,
    ):
        assert type(made.storage).__name__ == "HiCacheStorageFailureInjector"
        for number in range(8):
            tokens = text(made, number % 2, 10 + number % 4)
            if number < 4:
                made.save(tokens)
            made.forget()
            found += made.load(tokens)
    assert found > 0
