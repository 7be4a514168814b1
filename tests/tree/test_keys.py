"""Goal: a key names a prefix, whose numbers it is of, a page size and a namespace, and nothing else. Method:
golden value, and pairs that must differ."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.make import IDENTITY
from tiercel.errors import TokenError
from tiercel.tree.keys import KeyChain


def keys_of(tokens, namespace=(), page_tokens=4, identity=IDENTITY):
    chain = KeyChain(identity, namespace, page_tokens)
    chain.extend(tokens)
    return chain.keys


def test_the_key_is_what_the_documentation_says():
    parts = (b"tiercel key 2 of 1", IDENTITY, b"\4\0\0\0", b"tenant")
    seed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    tokens = np.arange(8, dtype="<u4").tobytes()
    assert keys_of(range(8), ("tenant",)) == [
        hashlib.sha256(seed + tokens[:16]).digest(),
        hashlib.sha256(seed + tokens).digest(),
    ]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_a_text_extended_piece_by_piece_has_the_keys_of_the_whole(tokens, cuts):
    chain, cuts = KeyChain(IDENTITY, (), 4), sorted(cuts)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        chain.extend(tokens[start:end])
    assert chain.keys == keys_of(tokens) and chain.tokens == len(tokens)
    assert len(chain.keys) == len(tokens) // 4


@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8)
)
def test_equal_keys_mean_equal_prefixes(one, two):
    for i, (a, b) in enumerate(zip(keys_of(one), keys_of(two), strict=True)):
        assert (a == b) == (one[: 4 * i + 4] == two[: 4 * i + 4])


@pytest.mark.parametrize("other", [("ab", "c"), ("abc",), ("a", "bc", ""), ("a", "bC"), ()])
def test_namespaces_never_share_a_key(other):
    assert not set(keys_of(range(8), ("a", "bc"))) & set(keys_of(range(8), other))


def test_a_word_of_a_namespace_is_never_taken_for_tokens():
    """A salt is a client's own text: it could be the bytes of a page of tokens."""
    word = "a\0\0\0b\0\0\0c\0\0\0"
    as_tokens = [len(word), *np.frombuffer(word.encode(), "<u4").tolist()]
    for before in ((), ("tenant",)):
        pages = keys_of(range(8), (*before, word))
        assert not set(pages) & set(keys_of([*as_tokens, *range(8)], before))


def test_two_models_never_share_a_key():
    assert not set(keys_of(range(8))) & set(keys_of(range(8), identity=b"g" * 32))


def test_page_sizes_never_share_a_key():
    assert not set(keys_of(range(8), page_tokens=4)) & set(keys_of(range(8), page_tokens=8))


@pytest.mark.parametrize(
    "tokens", [[1, -1], [2**32], np.array([2**40]), np.array([-5], dtype=np.int32), [0.5], [[1, 2]], ["a"]]
)
def test_tokens_that_can_not_name_a_page_are_refused_and_change_nothing(tokens):
    chain = KeyChain(IDENTITY, (), 2)
    chain.extend([1, 2, 3])
    keys = list(chain.keys)
    with pytest.raises(TokenError, match="tokens"):
        chain.extend(tokens)
    chain.extend([4])
    assert chain.keys == keys_of([1, 2, 3, 4], page_tokens=2) and chain.keys[:1] == keys


@pytest.mark.parametrize("namespace", ["abc", ["abc"], (1, "a"), (None,), None])
def test_a_namespace_that_is_not_a_tuple_of_words_is_refused(namespace):
    with pytest.raises(TokenError, match="namespace"):
        keys_of([1], namespace)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32, np.uint64])
def test_the_type_of_the_token_array_does_not_matter(dtype):
    assert keys_of(np.arange(8, dtype=dtype)) == keys_of(list(range(8)))


# More than tokens


def test_what_else_a_page_stands_for_is_part_of_its_key_and_of_those_after_it():
    plain, chain = keys_of(range(16)), KeyChain(IDENTITY, (), 4)
    chain.extend(range(16), extra={1: b"an image"})
    same = [here == there for here, there in zip(chain.keys, plain, strict=True)]
    assert same == [True, False, False, False]


@given(st.lists(st.integers(0, 16), max_size=4), st.dictionaries(st.integers(0, 3), st.binary(max_size=40)))
def test_texts_with_more_than_tokens_may_be_extended_piece_by_piece(cuts, extra):
    whole, pieces, cuts = KeyChain(IDENTITY, (), 4), KeyChain(IDENTITY, (), 4), sorted(cuts)
    whole.extend(range(16), extra=extra)
    pieces.extend((), extra=extra)
    for start, end in zip([0, *cuts], [*cuts, 16], strict=True):
        pieces.extend(range(start, end))
    assert pieces.keys == whole.keys
    assert (whole.keys == keys_of(range(16))) == (not any(extra.values()))


def test_bytes_of_an_image_are_never_taken_for_tokens():
    image = np.arange(4, 8, dtype="<u4").tobytes()
    with_image = KeyChain(IDENTITY, (), 4)
    with_image.extend(range(4), extra={0: image})
    assert not {*with_image.keys} & {*keys_of(range(8))}


def test_a_page_that_has_its_key_stands_for_nothing_more():
    chain = KeyChain(IDENTITY, (), 4)
    chain.extend(range(6))
    with pytest.raises(TokenError, match="page 0 has its key already"):
        chain.extend([6], extra={0: b"late"})
    assert chain.tokens == 6, "nothing was appended"


def test_pages_may_have_names_of_their_own():
    names = [bytes([i]) * 32 for i in range(3)]
    chain = KeyChain.of_keys(names, 4, owner="team")
    chain.extend(range(7))
    assert (chain.keys, chain.tokens, chain.owner) == (names[:1], 7, "team")
    chain.extend([0] * 2)
    names.append(bytes([9]) * 32)
    chain.extend([0] * 7)
    assert chain.keys == names and chain.tokens == 16
    with pytest.raises(TokenError, match="fill 5 pages; 4 have names"):
        chain.extend([0] * 4)
    with pytest.raises(TokenError, match="names already"):
        chain.extend([0], extra={4: b"an image"})
    assert chain.tokens == 16, "nothing was appended"
