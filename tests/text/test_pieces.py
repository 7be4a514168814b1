"""Goal: tokens become text as their own tokenizer would have it, whole and streamed. Method: small tokenizers
of the kinds people have, any text and any tokens, against the library's `decode`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tiercel.errors import WeightsError
from tiercel.text.pieces import BYTES, Pieces
from tiercel.text.stream import TextStream
from tiercel.text.text import Text

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "a", "b", "c", "é", "漢", "▁a", "ab", "▁ab", "▁abc", "c▁", "<0x", "A>"]
SPACES = normalizers.Replace(" ", "▁")


def bpe(decoder: decoders.Decoder, normalizer: normalizers.Normalizer) -> Tokenizer:
    """As Llama 2 and Gemma have it: merges of characters, and bytes where there is no character."""
    names = ["<unk>", "</s>", *BYTE_TOKENS, *WORDS, "▁abc▁"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁ab", "c"), ("c", "▁"), ("▁", "▁")]
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoder
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def unigram(decoder: decoders.Decoder, *, byte_fallback: bool) -> Tokenizer:
    """As SentencePiece's own models have it."""
    names = ["<unk>", "</s>", *(BYTE_TOKENS if byte_fallback else []), *WORDS]
    scores = [(name, -float(len(names) - place)) for place, name in enumerate(names)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def steps(*each: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence(list(each))


REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
KINDS = {
    "llama": bpe(
        steps(REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)),
        normalizers.Sequence([normalizers.Prepend("▁"), SPACES]),
    ),
    "gemma": bpe(steps(REPLACE, FALLBACK, FUSE), SPACES),
    "unigram": unigram(decoders.Metaspace(), byte_fallback=False),
    "unigram that falls back": unigram(steps(FALLBACK, decoders.Metaspace()), byte_fallback=True),
    "metaspace without a first": unigram(decoders.Metaspace(prepend_scheme="never"), byte_fallback=False),
}
SAID = st.text(st.sampled_from("abc é漢😀▁<0xA>")) | st.text()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    return {kind: Text(folder_of(tmp_path_factory.mktemp("model"), kind)) for kind in KINDS}


def folder_of(path: Path, kind: str) -> Path:
    KINDS[kind].save(str(path / "tokenizer.json"))
    return path


def streamed(text: Text, tokens: Iterable[int]) -> str:
    stream = TextStream(text)
    return "".join(stream.push(token).text for token in tokens) + stream.finish()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(said=SAID)
def test_text_is_decoded_as_its_tokenizer_does(texts: dict[str, Text], kind: str, said: str) -> None:
    tokens = texts[kind].encode(said)
    assert texts[kind].decode(tokens) == KINDS[kind].decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_are_decoded_as_their_tokenizer_does(
    texts: dict[str, Text], kind: str, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, KINDS[kind].get_vocab_size() + 1), max_size=12))
    expected = KINDS[kind].decode(tokens)
    if "\ufffd" not in expected:  # the library gives up a whole run of bytes for one that is wrong
        assert texts[kind].decode(tokens) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(said=SAID, data=st.data())
def test_an_answer_goes_on_where_its_prompt_ends(
    texts: dict[str, Text], kind: str, said: str, data: st.DataObject
) -> None:
    text = texts[kind]
    tokens = text.encode("ab" + said)
    cut = data.draw(st.integers(1, len(tokens)))
    prompt = text.decode(tokens[:cut])
    if not prompt.endswith("\ufffd"):
        assert prompt + streamed(text, tokens[cut:]) == text.decode(tokens)


def test_a_character_in_bytes_is_held_back_until_it_is_whole(texts: dict[str, Text]) -> None:
    stream = TextStream(texts["llama"])
    tokens = [2 + byte for byte in "a😀".encode()]
    assert [stream.push(token).text for token in tokens] == ["a", "", "", "", "😀"]


def test_the_first_space_of_an_answer_is_shown(texts: dict[str, Text]) -> None:
    token = KINDS["llama"].token_to_id("▁ab")
    assert streamed(texts["llama"], [token]) == " ab"
    assert texts["llama"].decode([token]) == "ab"
    assert texts["llama"].piece_bytes(token) == b" ab"


# Control tokens that somebody wrote

CHAT = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
CONTROL = ["<|end|>", "<|user|>"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    return {kind: chat_of(tmp_path_factory.mktemp("model"), kind) for kind in [*KINDS, "bytes"]}


def chat_of(folder: Path, kind: str) -> Text:
    if kind == "bytes":
        names = [*BYTES, "ab"]
        tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("a", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer.from_str(KINDS[kind].to_str())
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return Text(folder)


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@pytest.mark.parametrize(
    "said", ["a<|end|>b", "<|end|>", "a <|e", "ab <|user|> c", "<|end|><|user|>", "a<|end|> b"]
)
def test_a_control_token_that_is_cut_gains_no_space(chats: dict[str, Text], kind: str, said: str) -> None:
    text = chats[kind]
    prompt = text.chat([{"role": "user", "content": said}] * 2, add_generation_prompt=False)
    plain = text.chat([{"role": "user", "content": "ab"}] * 2, add_generation_prompt=False)
    shown, usual = (text.decode(each.tokens, skip_special_tokens=False) for each in (prompt, plain))
    if "unk" not in shown:  # a tokenizer without bytes knows no <
        assert shown == usual.replace("ab", said)
    control = [text._tokenizer.token_to_id(name) for name in CONTROL]
    assert [token for token in prompt.tokens if token in control] == control[::-1] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_inside_another_one_begins_with_no_space(chats: dict[str, Text], kind: str) -> None:
    text = chats[kind]
    assert b"".join(map(text.piece_bytes, text.tokens_within("ab c"))) == b"ab c"


@pytest.mark.parametrize(
    ("decoder", "why"),
    [
        (None, "has no decoder"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}, "Replace"),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 0}, "Strip"),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}],
            },
            "Strip",
        ),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "ByteFallback"}]}, "ByteLevel"),
    ],
)
def test_a_decoder_that_can_not_be_streamed_is_named(tmp_path: Path, decoder: Any, why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        Pieces(tmp_path / "tokenizer.json", decoder)


def test_a_tokenizer_of_an_older_library_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "unigram")
    file = folder / "tokenizer.json"
    old = json.loads(file.read_text())
    old["decoder"] = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    file.write_text(json.dumps(old))
    assert Text(folder).decode(Text(folder).encode("ab c")) == "ab c"
