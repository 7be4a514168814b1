"""Asks a server of vLLM the same three times, and says how much of the prompt it found in its caches.
Run: python examples/vllm/ask.py [http://127.0.0.1:8000], restart the server, and run it again.

The prompt are numbers of tokens that any model has. The server needs --enable-prompt-tokens-details.
"""

import json
import re
import sys
from urllib.request import Request, urlopen

SERVER = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
PROMPT = [10 + number * number % 199 for number in range(300)]


def get(path: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(SERVER + path, data, {"Content-Type": "application/json"})) as answer:
        return answer.read().decode()


model = json.loads(get("/v1/models"))["data"][0]["id"]
for _ in range(3):
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = json.loads(get("/v1/completions", asked))
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    print(f"found {found} of {len(PROMPT)} tokens, wrote {answer['choices'][0]['text']!r}")

for name, tier, value in re.findall(
    r'^vllm:kv_offload_tiering_(chunk_hits|read_bytes|write_bytes)_total\{.*tier="(\d:\w+)".*\} (\S+)',
    get("/metrics"),
    re.MULTILINE,
):
    print(f"{tier} {name} {float(value):.0f}")
