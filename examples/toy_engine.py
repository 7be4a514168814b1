"""An engine of your own on `TieredCache`: the device memory is the cache's.
Run: python examples/toy_engine.py

The model is a toy with one layer of attention and one recurrent layer. What it stores is what hybrid models
store: a row of keys and values for each token (pages), and a state from which a text can go on (tails).
"""

import torch

from tiercel import CacheConfig, CacheSpec, DeviceMemory, Staging, TieredCache, Wait, make_memories, place
from tiercel.cache.request import RequestState, rows_of
from tiercel.spec import Part, State, Stream

PAGE, WIDTH, WORDS = 16, 8, 100
SPEC = CacheSpec(
    "toy",
    PAGE,
    (
        Stream("kv", layers=(0,), parts=(Part("key", 4 * WIDTH), Part("value", 4 * WIDTH))),
        Stream("state", layers=(1,), parts=(Part("fp32", 4 * WIDTH),), keep=State()),
    ),
)
EMBEDDING = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))


class ToyEngine:
    def __init__(self) -> None:
        settings = CacheConfig(device_pages=18, staging_tails=1, host_bytes=2**20)
        device = DeviceMemory(SPEC, settings.device_pages, settings.staging_tails)  # on "cuda" as well
        self.cache = TieredCache(SPEC, settings, make_memories(SPEC, settings, device))
        # `view` takes the name of a stream and a layer: [places, bytes of a row].
        self.kv = device.view("kv", 0).view(torch.float32).view(-1, PAGE, 2, WIDTH)
        # A tail is kept in places of pages. The model reads and writes it in one piece, in a staging place.
        self.state = device.view("state", 1).view(torch.float32)
        self.staging = Staging(device)

    def step(self) -> None:
        self.cache.wait(0.1)  # until a copy ends
        self.cache.step()  # what arrived is shared, what is queued is sent

    def answer(self, prompt: list[int], count: int) -> tuple[list[int], str]:
        """(the tokens of the answer, what the cache says about the prompt)."""
        chain = self.cache.chain(prompt)  # the names of its pages; a namespace would keep tenants apart
        while isinstance(request := self.cache.begin(chain), Wait):
            self.step()  # something is on its way; nothing is held meanwhile
        while request.state is RequestState.LOADING:  # the host's part is being copied to the device
            self.step()
        state = torch.zeros(WIDTH)
        for _, rows in request.tail_places(PAGE):  # the state after the tokens that are reused
            self.staging.collect([(0, rows)])
            state = self.state[0].clone()
        tokens, done = list(prompt), request.reuse.cached_tokens
        while len(tokens) < len(prompt) + count:
            while isinstance(room := self.cache.extend(request, upto=len(tokens)), Wait):
                self.step()  # the coldest pages are leaving the device
            (pages,) = rows_of(request.table, pools=1)  # the places of its pages
            for at in range(done, len(tokens)):
                state = 0.5 * state + EMBEDDING[tokens[at]]
                self.kv[pages[at // PAGE], at % PAGE] = torch.stack((state, EMBEDDING[tokens[at]]))
                if at + 1 in room.tails:  # the cache wants the state after this token
                    self.state[0] = state
                    # An id names a place and who has it now: `place` is the number of the place alone.
                    self.staging.pour([(0, tuple(map(place, room.tails[at + 1])))])
            done = len(tokens)
            self.cache.commit(
                request, upto=done
            )  # full pages and tails are shared now, and saved to the host
            self.cache.step()
            keys, values = self.kv[list(pages)].flatten(0, 1)[:done].unbind(1)
            seen = (keys @ state).softmax(0) @ values
            tokens.append(int((EMBEDDING @ (seen + state)).argmax()))
            chain.extend(tokens[-1:])
        self.cache.finish(request)
        return tokens[len(prompt) :], str(request.reuse)


def main() -> None:
    engine, others = ToyEngine(), [[i] * 200 for i in range(1, 4)]
    prompt = [7 * i % WORDS for i in range(150)]
    first, told = engine.answer(prompt, 10)
    print(told)
    turn = [*prompt, *first, 1, 2, 3]
    second, told = engine.answer(turn, 10)
    print(told)
    for other in others:  # these push the conversation off the small device
        engine.answer(other, 1)
    again, told = engine.answer(turn, 10)
    print(told)
    cold, _ = ToyEngine().answer(turn, 10)
    assert second == again == cold, "the cache changes no answer"
    engine.cache.close()


if __name__ == "__main__":
    main()
