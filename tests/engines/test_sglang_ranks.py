"""Goal: several ranks of a server share one store, each finds what it saved, and they agree on what all of
them can resume; a rank that is killed harms nobody. Method: processes with SGLang's tree and controller,
which agree over gloo as SGLang's do, on one `shared://` store."""

import os
import random
from array import array
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import wait

import pytest

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

from tests.engines.sglang_cpu import MODELS, server, store_of  # noqa: E402
from tiercel.errors import ConfigError  # noqa: E402

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.engines.conftest", "tests.engines.sglang_cpu"])
"""SGLang is imported once, and not once for each rank."""


def text(page, *pages):
    tokens = array("q")
    for number in pages:
        chance = random.Random(number)
        tokens.extend(chance.randrange(1000) for _ in range(page))
    return tokens


def do(made, verb, pool="kv", pages=()):
    tokens = text(made.model.page, *pages)
    if verb == "save":
        return made.save(tokens)
    if verb == "load":
        return made.load(tokens) // made.model.page
    if verb == "stats":
        return made.storage.stats()
    assert verb == "lose"
    keys = get_storage_hash_str(RadixKey(tokens), None, page_size=made.model.page)
    return made.storage._hosts[pool].pages.delete(keys[-1:])


def rank(number, count, meeting, store, orders):
    """One rank: for each order a server's cache, and all that is asked of it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=count)
    while (order := orders.recv()) is not None:
        name, steps = order
        try:
            with server(store, MODELS[name], rank=number, ranks=count, group=dist.group.WORLD) as made:
                for step in steps:
                    orders.send(do(made, *step))
        except ConfigError as error:
            orders.send(str(error))


class Ranks:
    def __init__(self, folder, count=2):
        meeting, store = folder / f"meeting {os.urandom(4).hex()}", store_of(folder, "shared")
        pipes = [PROCESSES.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            PROCESSES.Process(target=rank, args=(number, count, meeting, store, theirs), daemon=True)
            for number, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __call__(self, name, *steps):
        """What each rank answers to each step."""
        self.order(name, *steps)
        return [[self.answer(number) for _ in steps] for number in range(len(self.pipes))]

    def order(self, name, *steps):
        for pipe in self.pipes:
            pipe.send((name, steps))

    def answer(self, number):
        assert wait([self.pipes[number]], 120), "a rank does not answer"
        return self.pipes[number].recv()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(20)
            process.kill()


def save(*pages):
    return "save", "kv", pages


def load(*pages):
    return "load", "kv", pages


def test_ranks_find_what_each_saved_and_agree_on_what_all_have(tmp_path):
    first, longer = range(4), range(6)
    with Ranks(tmp_path) as ranks:
        for name in ("mha", "windows", "recurrent"):
            ranks(name, save(*first), save(*longer))
            assert ranks(name, load(*longer), load(*range(50, 54))) == [[6, 0], [6, 0]]
            # Rank 1 alone loses a page: no rank goes on behind it.
            ranks.pipes[1].send((name, [("lose", "kv", range(5))]))
            ranks.pipes[0].send((name, [("stats",)]))
            assert ranks.answer(1) == 1 and ranks.answer(0)["misses"] == 0
            assert ranks(name, load(*longer)) == [[4], [4]]
        # Rank 0 has no state at 4 pages any more, and rank 1 none behind them.
        ranks.pipes[0].send(("recurrent", [("lose", "mamba", first)]))
        ranks.pipes[1].send(("recurrent", [("stats",)]))
        assert ranks.answer(0) == 1 and ranks.answer(1)["misses"] == 0
        assert ranks("recurrent", load(*longer)) == [[0], [0]]


def test_ranks_with_the_same_kv_have_it_from_one_writer_and_states_of_their_own(tmp_path):
    with Ranks(tmp_path) as ranks:
        for name, kept in (("mla", [4, 0]), ("sparse", [8, 0]), ("recurrent_mla", [5, 1])):
            saved = ranks(name, save(*range(4)), ("stats",))
            assert [each["kept"] for _, each in saved] == kept
            assert ranks(name, load(*range(4))) == [[4], [4]]


def test_heads_of_a_draft_that_only_one_rank_would_save_are_refused(tmp_path):
    with Ranks(tmp_path) as ranks:
        why = "pool = 'draft': each of 2 ranks has other heads of it, and SGLang saves those of rank 0 only"
        assert ranks("mla_with_heads", ("stats",)) == [[why], [why]]


def test_a_killed_rank_harms_nobody(tmp_path):
    """Texts that both ranks had saved are found by the next ones; another server goes on meanwhile."""
    with Ranks(tmp_path, 1) as other:
        other("windows", save(*range(100, 104)))
        with Ranks(tmp_path) as ranks:
            ranks.order("mha", *(save(n, n + 1) for n in range(0, 1000, 2)))
            for _ in range(8):
                for number in (0, 1):
                    ranks.answer(number)
            ranks.processes[1].kill()
            ranks.processes[1].join(20)
            assert other("windows", load(*range(100, 104)), save(*range(200, 204))) == [[4, None]]
            ranks.processes[0].kill()
        assert other("windows", load(*range(200, 204))) == [[4]]
        with Ranks(tmp_path) as ranks:
            assert ranks("mha", *(load(n, n + 1) for n in range(0, 16, 2))) == [[2] * 8] * 2
