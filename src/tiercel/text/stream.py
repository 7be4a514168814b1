"""From a stream of tokens to a stream of text, with stop strings."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from tiercel.text.text import Text


class TextPiece(NamedTuple):
    """Text that may be shown now, and the stop string that was found, if any."""

    text: str
    stopped_by: str | None = None


class TextStream:
    """Decodes tokens one by one. The pieces together are what the tokens add to the text before them, up to
    the stop string: an answer goes on from its prompt, so a space that begins it is shown. (`decode` of a
    whole text leaves out a first space that its tokenizer adds.) Every answer is made of these pieces,
    streamed or not.

    Half characters, and text that may become a stop string, are held back. The stop string that is complete
    first wins, then the longest: the result does not depend on how the text was split into tokens.
    """

    def __init__(
        self,
        text: Text,
        stop: tuple[str, ...] = (),
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._text = text
        self._hidden = text.hidden if skip_special_tokens else frozenset()
        self._stops = [StopString(each) for each in stop]
        self._keep_stop = keep_stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> TextPiece:
        assert not self._stopped, "a stop string was found"
        return self._given(self.decode(token))

    def decode(self, token: int) -> str:
        """What a token adds to the text, without a search for stop strings."""
        return "" if token in self._hidden else self._utf8.decode(self._text.piece_bytes(token))

    def finish(self) -> str:
        """The text that was held back."""
        if self._stopped:
            return ""
        last = self._given(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return last.text + held

    def _given(self, new: str) -> TextPiece:
        if not self._stops:
            return TextPiece(new)
        text, self._held = self._held + new, ""
        for end, char in enumerate(new, start=len(text) - len(new) + 1):
            if whole := [each.text for each in self._stops if each.next(char)]:
                stop = max(whole, key=len)
                self._stopped = True
                return TextPiece(text[: end if self._keep_stop else end - len(stop)], stop)
        sure = len(text) - max(each.matched for each in self._stops)
        self._held = text[sure:]
        return TextPiece(text[:sure])


class StopString:
    """How much of one stop string the text ends with, by Knuth, Morris and Pratt."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0]
        """For each prefix: the length of the longest shorter prefix that it ends with."""
        for char in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], char))

    def next(self, char: str) -> bool:
        """Adds a character. True: the stop string is complete."""
        self.matched = self._longer(self.matched, char)
        return self.matched == len(self.text)

    def _longer(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == char)
