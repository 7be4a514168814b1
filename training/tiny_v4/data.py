"""Training sequences: text, recall conversations and copying, made on the fly from a seed.

A recall conversation: facts ("Record: K V.") between pieces of text, and questions about any earlier
fact ("Which record has K?", answered "K V"), many of each. Keys and values are single tokens drawn afresh for
every sequence, so nothing can be learned but looking them up. Every token carries the kind of loss it gets as
a target.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

UNSCORED, TEXT, ANSWER, COPY = 0, 1, 2, 3
COPY_INSTRUCTION = "\nRepeat:"
EXAM_TOKENS_PER_FACT = 64


@dataclass(frozen=True)
class Exam:
    """One user turn that ends with a question, and the first token of the answer: a model that knows it says
    `answer`, key and value, at the last two positions."""

    ids: list[int]
    answer: list[int]


class Maker:
    def __init__(self, work: Path, seed: int, split: str = "train") -> None:
        self.tokenizer = tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        recall = json.loads((work / "recall.json").read_text())
        self.text = np.load(work / "tokens.npz")[split]
        self.rng = np.random.default_rng(seed)

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        def around(template: str) -> list[list[int]]:
            return [ids(part) for part in template.replace("{value}", "{key}").split("{key}")]

        self.fact, self.question = around(recall["fact"]), around(recall["question"])
        self.copy = ids(COPY_INSTRUCTION)
        self.keys = np.array([ids(" " + w)[0] for w in recall["keys"]])
        self.values = np.array([ids(" " + w)[0] for w in recall["values"]])
        self.words = np.concatenate((self.keys, self.values))
        self.bos, self.end, self.user, self.assistant = map(
            tokenizer.token_to_id, ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
        )
        self.line_starts = np.flatnonzero(self.text[:-2048] == ids("\n")[0]) + 1

    def filler(self, length: int) -> list[int]:
        start = self.line_starts[self.rng.integers(len(self.line_starts))]
        return self.text[start : start + length].tolist()

    def fact_tokens(self, key: int, value: int) -> tuple[list[int], list[int]]:
        before, middle, after = self.fact
        ids = [*before, key, *middle, value, *after]
        return ids, [UNSCORED if i in (key, value) else TEXT for i in ids]

    def question_tokens(self, key: int) -> tuple[list[int], list[int]]:
        before, after = self.question
        kinds = [TEXT] * len(before) + [UNSCORED] + [TEXT] * (len(after) + 1)
        return [*before, key, *after, self.assistant], kinds

    def conversation(self, length: int) -> tuple[list[int], list[int]]:
        rng = self.rng
        ids, kinds = [self.bos], [UNSCORED]

        def add(more: list[int], kind: int | list[int]) -> None:
            ids.extend(more)
            kinds.extend(kind if isinstance(kind, list) else [kind] * len(more))

        filler_mean = int(rng.choice([n for n in (4, 16, 40, 100) if n <= max(16, length // 16)]))
        keys = rng.permutation(self.keys)
        values = rng.choice(self.values, len(keys))
        known = 0
        while len(ids) < length:
            add([self.user], TEXT)
            for _ in range(rng.integers(1, 7)):
                if (size := int(rng.integers(0, 2 * filler_mean))) > 1:
                    add(self.filler(size), TEXT)
                if known < len(keys):
                    add(*self.fact_tokens(int(keys[known]), int(values[known])))
                    known += 1
            for turn in range(rng.integers(1, 9)):
                if turn:
                    add([self.user], TEXT)
                if rng.random() < 0.06:
                    words = rng.choice(self.words, rng.integers(3, 30)).tolist()
                    add(self.copy, TEXT)
                    add(words, UNSCORED)
                    add([self.assistant], TEXT)
                    add([*words, self.end], COPY)
                else:
                    asked = int(rng.integers(known))
                    add(*self.question_tokens(int(keys[asked])))
                    add([int(keys[asked]), int(values[asked])], [COPY, ANSWER])
                    add([self.end], TEXT)
        return ids[:length], kinds[:length]

    def sequence(self, length: int, text_share: float) -> tuple[list[int], list[int]]:
        if self.rng.random() < text_share:
            start = self.rng.integers(len(self.text) - length)
            return self.text[start : start + length].tolist(), [TEXT] * length
        return self.conversation(length)

    def batch(self, count: int, length: int, text_share: float) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [self.sequence(length, text_share) for _ in range(count)]
        return torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs], dtype=torch.uint8)

    def exam(self, length: int) -> Exam:
        rng, facts = self.rng, length // EXAM_TOKENS_PER_FACT
        keys, values = rng.permutation(self.keys)[:facts].tolist(), rng.choice(self.values, facts).tolist()
        pieces = [self.fact_tokens(k, v)[0] for k, v in zip(keys, values, strict=True)]
        asked = int(rng.integers(facts))
        tail = [*self.question_tokens(keys[asked])[0], keys[asked]]
        room = length - 2 - len(tail) - sum(map(len, pieces))
        cuts = np.sort(rng.integers(0, room + 1, facts)).tolist()
        ids = [self.bos, self.user]
        for cut, done, piece in zip(cuts, [0, *cuts], pieces, strict=False):
            ids += self.filler(cut - done) + piece
        ids += self.filler(room - cuts[-1]) + tail
        assert len(ids) == length
        return Exam(ids, [keys[asked], values[asked]])

    def bytes_per_token(self) -> float:
        return len(self.tokenizer.decode(self.text.tolist()).encode()) / len(self.text)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, work: Path, seed: int, count: int, length: int, text_share: float) -> None:
        self.arguments = (work, seed, count, length, text_share)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        work, seed, count, length, text_share = self.arguments
        info = torch.utils.data.get_worker_info()
        maker = Maker(work, seed * 1000 + (info.id if info else 0))
        while True:
            yield maker.batch(count, length, text_share)
