"""Goal: what can not fit is refused before it is encoded, and nothing that fits ever is. Method: tokenizers
of every kind, the bound against what they really make of random texts."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import tiercel.models
from tests.text.test_text import TEXT, make_folder, user
from tiercel.errors import LengthError
from tiercel.text.pieces import BYTES, NORMAL_SHRINKS, bytes_per_token_most
from tiercel.text.text import Text

TINY = Path(tiercel.models.__file__).parent / "tiny_v4"


def byte_level(normalizer=None, pre_tokenizer=None, added=()):
    """Every byte is a token, and a few longer ones."""
    names = [*BYTES, "ĠĠ", "ĠĠĠĠ", "ab"]
    tokenizer = Tokenizer(
        models.BPE({n: i for i, n in enumerate(names)}, [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("a", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


def bound_of(tokenizer):
    return bytes_per_token_most(json.loads(tokenizer.to_str()), [4])


FORMS = [
    byte_level(),
    byte_level(normalizers.NFC()),
    byte_level(normalizers.NFKC()),
    byte_level(normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])),
    byte_level(normalizers.Sequence([normalizers.Prepend("x"), normalizers.Replace(" ", "__")])),
    byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
]
SHRINKING = st.text(
    st.sampled_from("각ᄀ\u1161\u11a8𝐀Ａ\u030aA\u0302\u0301α\u0313\u0342\u0345①KİĲ ab"), max_size=40
)


@pytest.mark.parametrize("tokenizer", FORMS)
@given(text=st.one_of(st.text(max_size=40), SHRINKING))
@settings(max_examples=200, deadline=None)
def test_a_text_has_at_least_as_many_tokens_as_its_length_says(tokenizer, text):
    assert bound_of(tokenizer) is not None
    assert len(text.encode()) <= bound_of(tokenizer) * len(tokenizer.encode(text).ids)


def test_no_character_shrinks_more_than_is_said():
    for code in [*range(0xD800), *range(0xE000, 0x110000, 1)]:
        char = chr(code)
        for form in (normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()):
            if len(char.encode()) == 1:
                break
            assert len(char.encode()) <= NORMAL_SHRINKS * max(1, len(form.normalize_str(char).encode())), hex(
                code
            )


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace("aa", "a")),
        byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        byte_level(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        byte_level(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        byte_level(added=[AddedToken("<mask>", lstrip=True)]),
        Tokenizer(models.BPE({"a": 0}, [])),
        Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    ],
)
def test_where_something_of_a_text_may_be_lost_nothing_is_said(tokenizer):
    assert bound_of(tokenizer) is None


def test_what_can_not_fit_is_refused_and_not_encoded(monkeypatch):
    long = "The sea is blue. " * 20_000
    monkeypatch.setattr(Text, "_encode", lambda *_, **__: pytest.fail("encoded"))
    with pytest.raises(LengthError) as caught:
        TEXT.encode(long, field="prompt[1]", tokens_max=100)
    assert caught.value.field == "prompt[1]" and caught.value.tokens > 100
    with pytest.raises(LengthError, match="messages"):
        TEXT.chat([user(long)], tokens_max=100)


def test_what_fits_is_encoded_whatever_its_length():
    text = " " * 4000
    assert TEXT.encode(text, tokens_max=len(TEXT.encode(text))) == TEXT.encode(text)


def test_a_tokenizer_without_a_bound_encodes_everything(tmp_path):
    folder = make_folder(tmp_path / "model", added=[AddedToken("<mask>", lstrip=True)])
    assert len(Text(folder).encode("a" * 1000, tokens_max=1)) > 1


def rendered(text, monkeypatch):
    """The lengths of all conversations that are rendered from now on."""
    lengths = []
    own = text._format.render
    monkeypatch.setattr(text._format, "render", lambda talk: lengths.append(len(talk.messages)) or own(talk))
    return lengths


def test_a_conversation_that_can_not_fit_is_refused_before_it_is_rendered(monkeypatch):
    lengths = rendered(TEXT, monkeypatch)
    parts = [{"type": "text", "text": "The sea is blue. "}] * 20_000
    for messages in ([user("a")] * 101, [user("The sea is blue. " * 20_000)], [user(parts)]):
        with pytest.raises(LengthError, match="messages"):
            TEXT.chat(messages, tokens_max=100)
    assert lengths == []


def test_what_a_template_may_leave_out_does_not_count_before_it_is_rendered(tmp_path):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    )
    text = Text(make_folder(tmp_path / "model", template))
    thoughts = {"role": "assistant", "content": "hmm " * 20_000 + "</think>yes"}
    assert len(text.chat([user("a" + " " * 100_000), thoughts], tokens_max=100).tokens) < 20


def test_of_a_conversation_that_does_not_fit_no_ends_are_sought(monkeypatch):
    lengths = rendered(TEXT, monkeypatch)
    prompt = TEXT.chat([user("a b c d")] * 50, tokens_max=100)
    assert len(prompt.tokens) > 100 and prompt.turn_ends == () and lengths == [50]


def test_the_ends_of_a_long_conversation_are_sought_within_a_number_of_messages(monkeypatch):
    lengths = rendered(TEXT, monkeypatch)
    monkeypatch.setattr("tiercel.text.text.ENDS_MESSAGES", 250)
    prompt = TEXT.chat([user("a")] * 100)
    assert lengths == [100, 100, 99, 51]  # the whole, its newest ends, and what is left is spent
    assert len(prompt.turn_ends) == 3
