"""Small traffic: conversations of a few tokens, as files and as values."""

import json
from random import Random

from tiercel.replay.formats import read_trace


def conversations(seed, requests, *, shared=9, turn=7, most=60, recent=6):
    """(prompt, answer) of requests: some go on from an earlier one, some branch off, some are new."""
    random = Random(seed)
    begin = [1] * shared
    asked, known = [], [begin]
    for number in range(requests):
        base = random.choice(known[-recent:]) if random.random() < 0.7 else begin
        new = [random.randrange(2, 50) for _ in range(random.randrange(1, turn))]
        prompt = [*base[:most], *new]
        answer = [1000 + number] * random.randrange(1, turn)
        asked.append((prompt, answer))
        known.append([*prompt, *answer])
    return asked


def write_tokens(file, asked, *, every_s=1.0):
    """As lines of token ids."""
    rows = [
        {"timestamp": number * every_s, "prompt_token_ids": prompt, "output_ids": answer}
        for number, (prompt, answer) in enumerate(asked)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def trace_of(tmp_path, asked, page_tokens, **options):
    return read_trace([write_tokens(tmp_path / "tokens.jsonl", asked, **options)], page_tokens)
