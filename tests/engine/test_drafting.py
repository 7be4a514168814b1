"""Goal: the last tokens of a text are found where they stood before, whatever the text and however it grew.
Method: the index against a search from end to end, on texts of few words, token by token and all at once."""

from random import Random

import numpy as np
import pytest
import torch

from tests.engine.drive import PAGE, make_engine
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import GUESSERS, Build, EngineConfig
from tiercel.engine.drafting import (
    LOOKED_AT,
    MATCH_LEAST,
    MATCH_MOST,
    TEXT_DRAFTERS,
    DraftText,
    ModelDrafter,
    NgramDrafter,
    PairIndex,
    make_drafter,
)
from tiercel.errors import ConfigError
from tiercel.models.families import EMBEDDED
from tiercel.spec.stream import Prefix


def searched(tokens):
    """The longest match of the last tokens, the latest of equals; of the last places where two stood."""
    pairs = [at for at in range(len(tokens) - 2, 0, -1) if tokens[at - 1 : at + 1] == tokens[-2:]]
    best, start = MATCH_LEAST - 1, None
    for at in pairs[:LOOKED_AT]:
        same = 0
        while same < min(MATCH_MOST, at + 1) and tokens[at - same] == tokens[-1 - same]:
            same += 1
        if same > best:
            best, start = same, at + 1
    return start


@pytest.mark.parametrize("seed", range(6))
def test_the_index_finds_what_a_search_finds(seed):
    random = Random(seed)
    words = random.choice([3, 8, 30])
    text = [random.randrange(words) for _ in range(400)]
    index, end = PairIndex(400), 0
    while end < 400:
        end = min(400, end + random.choice([1, 1, 1, 5, 60]))
        own = np.array(text[:end])
        index.add(own)
        found, expected = index.find(own), searched(text[:end])
        assert (found is None) == (expected is None)
        if found is not None:  # pairs of other tokens may share a hash, and are looked at in vain
            assert text[found - 2 : found] == text[end - 2 : end]
            if words < 30:
                assert found == expected


def text_of(tokens, ring=0):
    return DraftText(ring, np.array(tokens), torch.empty(0, dtype=torch.int64), 100)


def test_what_followed_before_is_guessed():
    drafter = NgramDrafter()
    story = [5, 6, 7, 8, 9, 1, 5, 6]
    assert drafter.guess([text_of(story)], [3]) == [[7, 8, 9]]
    assert drafter.guess([text_of([*story, 7])], [2]) == [[8, 9]]
    assert drafter.guess([text_of([*story, 7, 1])], [2]) == [[]]


def test_a_text_that_repeats_itself_goes_on_so():
    assert NgramDrafter().guess([text_of([1, 2, 3, 1, 2, 3, 1, 2])], [4]) == [[3, 1, 2, 3]]


def test_the_longer_match_wins():
    tokens = [9, 1, 2, 3, 50, 8, 2, 3, 60, 9, 1, 2, 3]
    assert NgramDrafter().guess([text_of(tokens)], [1]) == [[50]]


def test_another_text_in_the_ring_knows_nothing_of_the_first():
    drafter = NgramDrafter()
    assert drafter.guess([text_of([1, 2, 3, 4, 1, 2])], [1]) == [[3]]
    drafter.begin(0)
    assert drafter.guess([text_of([1, 2])], [4]) == [[]]
    assert drafter.guess([text_of([7, 1, 2, 8, 1, 2])], [1]) == [[8]]


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 3]])
def test_a_short_text_has_nothing_to_look_up(tokens):
    assert NgramDrafter().guess([text_of(tokens)], [4]) == [[]]


def test_who_guesses_goes_by_the_model():
    plain, drafted = (make_engine(speculate=kind).runner.model for kind in ("ngram", "mtp"))
    assert make_drafter("off", drafted, PAGE) is None
    assert make_drafter("auto", drafted, PAGE) is None, "it is decided where a model is opened"
    for name, drafter in TEXT_DRAFTERS.items():
        assert name in GUESSERS, f"say in GUESSERS of engine/config.py what {name} does"
        assert isinstance(make_drafter(name, plain, PAGE), drafter)
    assert isinstance(make_drafter("mtp", drafted, PAGE), ModelDrafter)
    with pytest.raises(ConfigError, match="speculate = 'mtp': needs a model with a draft"):
        make_drafter("mtp", plain, PAGE)


def test_a_draft_writes_only_to_the_pages_that_a_text_has():
    """The second text's only page is full, and it is asked for together with one that gets more guesses."""
    config = EngineConfig(CacheConfig(), running_max=2)
    engine, _ = open_engine(Build(device_bytes=16 * 2**20, draft=EMBEDDED), config)
    memory, drafter = engine.cache.device, engine.runner._drafter  # type: ignore[attr-defined]
    texts = [
        DraftText(0, np.arange(40), torch.tensor([[3, 1]]), 200),
        DraftText(1, np.arange(PAGE), torch.tensor([[2]]), 200),
    ]
    memory.flat_pages.fill_(1)
    together = drafter.guess(texts, [4, 1])
    assert [len(own) for own in together] == [4, 1]
    written = {
        place
        for stream in memory.spec.streams
        if isinstance(stream.keep, Prefix)
        for layer in stream.layers
        for place in (memory.view(stream.name, layer) != 1).any(1).nonzero().flatten().tolist()
    }
    assert written == {2, 3}
