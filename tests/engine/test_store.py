"""Goal: a store changes nothing but the time, on a real model, with a real file store. Method: engines that
end and begin again on the same folder; every logprob compared bit by bit; stores that hang, die and come back
under a living service."""

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.engine.drive import (
    FOLDER,
    LOOPS,
    PAGE,
    deltas_of,
    logprobs_of,
    make_ask,
    make_engine,
    run,
    settle,
    steps_of,
    tokens_of,
    words,
)
from tiercel.cache import Wait
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.service import EngineService
from tiercel.engine.waiting import PASSED_MOST
from tiercel.errors import ConfigError, StoreError
from tiercel.models import digest
from tiercel.storage.memory import MemoryStore
from tiercel.storage.open import open_store
from tiercel.types import Kind, Tier
from tiercel.verify import EXAMS, answer_one, exams_of, score_of

MIB = 1024**2


@pytest.fixture(scope="module")
def cold():
    return make_engine(cache={"force_miss": True})


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store?size=256MiB"


def stored_engine(url, **options):
    cache = {"fetch": "wait"} | options.pop("cache", {})
    engine = make_engine(host_pages=200, cache=cache, **options)
    engine.cache.attach(open_store(url) if isinstance(url, str) else url)
    return engine


def test_a_conversation_goes_on_after_a_restart_from_the_store_bit_for_bit(cold, url):
    text = words(2048)
    first = stored_engine(url)
    [answer] = run(first, make_ask("a", text, 24))
    first.cache.close()
    turn = [*text, *tokens_of(answer), *words(10, seed=4)]
    again = stored_engine(url)
    [hit] = run(again, make_ask("b", turn))
    [truth] = run(cold, make_ask("t", turn))
    assert hit.usage.store_tokens >= 0.95 * len(turn)
    assert hit.usage.device_tokens == hit.usage.host_tokens == 0
    assert tokens_of(hit) == tokens_of(truth) and logprobs_of(hit) == logprobs_of(truth)
    assert again.explain("b").reuse.store_tokens == hit.usage.store_tokens
    again.cache.check()
    again.cache.close()


@pytest.mark.parametrize("evict", ["value", "lru"])
def test_the_tail_that_a_conversation_goes_on_from_is_in_the_store(url, evict):
    """Four conversations pass through a device and a host that hold two of them. An engine that has only
    the store goes on at the end of the last turn of each."""
    small = make_engine(pages=4, host_pages=20, cache={"evict": evict})
    small.cache.attach(open_store(url))
    texts = [words(120 + i, seed=i) for i in range(4)]
    for turn in range(2):
        for i, text in enumerate(texts):
            [answer] = run(small, make_ask(f"{i} {turn}", text, 12))
            settle(small)
            text += [*tokens_of(answer), *words(PAGE - 12, seed=100 + turn)]
    while isinstance(room := small.cache.places.reserve(small, small.cache.pages.capacity), Wait):
        settle(small)  # everything leaves the device
    with room:
        pass
    settle(small)
    assert small.cache.tree.copies.evicted[Tier.HOST, Kind.TAIL, "room"] >= len(texts)
    small.cache.close()
    again = stored_engine(url)
    for i, text in enumerate(texts):
        again.cache.compute.forget()  # computing may be sooner than a store on a busy machine
        [hit] = run(again, make_ask(str(i), text, 1))
        written = len(text) - (PAGE - 12) - 1  # the last token of an answer is not computed
        assert hit.usage.store_tokens == written // PAGE * PAGE, again.explain(str(i))
    again.cache.close()


def test_the_score_of_recall_is_the_same_through_the_store(cold, url):
    exams = list(exams_of(cold, "tiny-v4"))[: 2 * EXAMS]
    score = score_of(cold, exams)
    first = stored_engine(url)
    assert score_of(first, exams) == score
    first.cache.close()
    again = stored_engine(url)
    assert score_of(again, exams) == score
    assert again.cache.counters["tokens_store"] > 0
    again.cache.close()


def test_weights_format_and_tenant_are_part_of_the_name(tmp_path, url):
    """What was stored by one model, form or tenant is not found by another."""
    text = words(3 * PAGE + 5)
    config = EngineConfig()
    config = replace(config, cache=replace(config.cache, host_bytes=64 * MIB, fetch="wait"))
    other = shutil.copytree(FOLDER, tmp_path / "other" / FOLDER.name)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)

    def reused(build, **options):
        engine, _ = open_engine(replace(build, store=url, device_bytes=16 * MIB), config)
        told = answer_one(engine, text, 1, **options)
        engine.cache.close()
        return told.usage.store_tokens

    same = Build()
    assert reused(same) == 0
    assert reused(same) == 3 * PAGE
    assert reused(replace(same, model=str(other))) == 0, "one weight is another"
    assert reused(replace(same, format="bf16")) == 0
    assert reused(replace(same, page_tokens=256)) == 0
    assert reused(same, namespace=("tenant", "b")) == 0
    assert reused(replace(same, kernels="reference")) == 0, "other kernels, other bits"
    assert reused(replace(same, share="numbers")) == 0, "what is shared with fewer is not found among more"
    assert reused(replace(same, kernels="reference", share="numbers")) == 3 * PAGE
    assert reused(replace(same, model=str(other), share="numbers")) == 0
    assert reused(same) == 3 * PAGE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", 1e-5),
        ("hc_eps", 1e-5),
        ("routed_scaling_factor", 1.75),
        ("swiglu_limit", 7.0),
        ("index_topk", 32),
        ("rope_theta", 20_000.0),
        ("factor", 8.0),
    ],
)
def test_every_number_of_the_config_that_the_model_reads_is_part_of_the_name(tmp_path, url, field, value):
    """What one arithmetic has made is not found by another; in a folder of another name it is."""
    text = words(PAGE + 5)
    config = EngineConfig()
    config = replace(config, cache=replace(config.cache, host_bytes=64 * MIB, fetch="wait"))

    def reused(folder):
        engine, _ = open_engine(
            Build(str(folder), page_tokens=PAGE, store=url, device_bytes=16 * MIB), config
        )
        told = answer_one(engine, text, 1)
        engine.cache.close()
        return told.usage.store_tokens

    same, other = (shutil.copytree(FOLDER, tmp_path / name) for name in ("same", "other"))
    settings = json.loads((other / "config.json").read_text())
    assert change(settings, field, value), "the config has this field"
    (other / "config.json").write_text(json.dumps(settings))
    assert reused(FOLDER) == 0
    assert reused(same) == PAGE
    assert reused(other) == 0


def test_weights_are_read_at_the_first_start_and_not_at_the_second(tmp_path, monkeypatch):
    folder, read, real = shutil.copytree(FOLDER, tmp_path / "model"), [], digest.hash_file
    monkeypatch.setattr(digest, "hash_file", lambda file: read.append(file.stat().st_size) or real(file))
    monkeypatch.setattr(digest, "SETTLED_S", 0.0)
    names = set()
    for _ in range(3):
        engine, _ = open_engine(Build(str(folder), device_bytes=16 * MIB), EngineConfig())
        names.add(engine.cache.identity)
        engine.cache.close()
    assert len(names) == 1 and read == [(folder / "model.safetensors").stat().st_size]


def change(settings, field, value):
    """Set a field wherever it is, also inside others; how often."""
    count = 0
    for name, old in settings.items():
        if name == field and old != value:
            settings[name], count = value, count + 1
        elif isinstance(old, dict):
            count += change(old, field, value)
    return count


class Gate(MemoryStore):
    """Lets nobody through while it is shut."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def contains(self, keys):
        self.open.wait(60)
        return super().contains(keys)

    def get(self, wanted):
        self.open.wait(60)
        return super().get(wanted)


def test_who_waits_for_the_store_holds_nobody_up():
    store = Gate()
    engine = stored_engine(store)
    while engine.cache.busy:
        engine.cache.step()
    store.open.clear()
    engine.add(make_ask("waits", words(3 * PAGE), 2))
    assert engine.scheduler.plan() == []
    assert [task.ask.request_id for task in engine.scheduler.waiting] == ["waits"]
    engine.add(make_ask("short", words(10), 2))
    [part] = engine.scheduler.plan()
    assert (part.start, part.end) == (0, 10), "no store has half a page"
    engine.abort("waits")
    engine.scheduler.plan()
    assert not engine.cache.store.fetches.of
    store.open.set()
    engine.cache.close()


def test_any_number_may_wait_for_a_store_that_hangs_and_none_holds_others_up(monkeypatch):
    store = Gate()
    engine = stored_engine(store)
    while engine.cache.busy:
        engine.cache.step()
    store.open.clear()
    names = {f"waits{i}" for i in range(3 * PASSED_MOST)}
    for seed, name in enumerate(sorted(names)):
        engine.add(make_ask(name, words(PAGE + 1, seed), 2))
    scheduler = engine.scheduler
    scheduler.plan()
    engine.add(make_ask("short", words(10), 2))
    [part] = scheduler.plan()
    assert (part.start, part.end) == (0, 10)
    looked_at, real = [], scheduler.admission._begin
    monkeypatch.setattr(
        scheduler.admission, "_begin", lambda task, _: looked_at.append(task.ask.request_id) or real(task)
    )
    scheduler.plan()
    assert 0 < len(looked_at) <= 2 * PASSED_MOST, "a step looks at a part of them"
    for _ in range(4):
        scheduler.plan()
    assert set(looked_at) == names, "and at everyone in turn"
    for name in (*names, "short"):
        engine.abort(name)
    scheduler.plan()
    store.open.set()
    engine.cache.close()


@LOOPS
def test_an_urgent_ask_that_waits_for_the_store_takes_nobody_s_place_before_it_can_begin(overlap):
    store = Gate()
    engine = stored_engine(store, running_max=1)
    while engine.cache.busy:
        engine.cache.step()
    store.open.clear()
    engine.add(make_ask("slow", words(10), 60))
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, overlap, executor)
        next(steps)
        engine.add(make_ask("urgent", words(3 * PAGE), 2, priority=1))
        for _ in range(20):
            next(steps)
        assert engine.counters["preemptions"] == 0 and engine.counters["tokens_drawn"] > 15
        store.open.set()
        while "urgent" in engine.tasks:
            next(steps)
        assert engine.counters["preemptions"] == 1 and "slow" in engine.tasks
        while engine.tasks:
            next(steps)
    engine.cache.close()


@pytest.mark.parametrize("policy", ["deadline", "best_effort"])
def test_a_store_that_hangs_makes_no_answer_wrong_and_none_wait_for_ever(cold, policy):
    text = words(3 * PAGE + 9)
    [truth] = run(cold, make_ask("t", text))
    store = Gate()
    engine = stored_engine(store, cache={"fetch": policy, "fetch_deadline_s": 0.02})
    store.open.clear()
    [answer] = run(engine, make_ask("a", text))
    assert logprobs_of(answer) == logprobs_of(truth) and answer.usage.store_tokens == 0
    assert "store" in engine.explain("a").reuse.why.value
    store.open.set()
    engine.cache.close()


async def ask(service, name, prompt, count=4):
    usage, tokens = None, []
    async for delta in deltas_of(service, make_ask(name, prompt, count)):
        usage = delta.usage
        tokens += [out.token for out in delta.tokens]
    return tokens, usage


def test_a_store_comes_and_goes_under_a_living_service(url):
    text = words(4 * PAGE + 3)
    engine = make_engine(host_pages=200, cache={"fetch": "wait"})
    service = EngineService(engine, "tiny")

    async def main():
        assert (await service.stats()).store is None
        tokens, _ = await ask(service, "a", text)
        await service.attach_store(url)
        assert (await service.stats()).store.state == "working" and service.store_url.startswith("file://")
        with pytest.raises(ConfigError, match="attached already"):
            await service.attach_store("memory:")
        with pytest.raises(ConfigError, match="nonsense"):
            await service.attach_store("nonsense://x")
        load = [asyncio.create_task(ask(service, f"load{i}", words(150, seed=i + 50))) for i in range(6)]
        while (await service.stats()).store.queued_bytes or engine.cache.busy:
            await asyncio.sleep(0.01)
        assert await service.flush(5.0) == 0
        again, usage = await ask(service, "b", text)
        assert again == tokens and usage.store_tokens == 4 * PAGE
        await service.detach_store()
        assert (await service.stats()).store is None
        assert await service.flush(5.0) == 0
        again, usage = await ask(service, "c", text)
        assert again == tokens and usage.store_tokens == 0
        assert await service.flush(5.0) == 0
        await service.attach_store(url)
        await service.clear_store()
        again, usage = await ask(service, "d", text)
        assert again == tokens and usage.store_tokens == 0
        await asyncio.gather(*load)
        await service.detach_store()
        with pytest.raises(StoreError, match="no store"):
            await service.clear_store()

    try:
        asyncio.run(main())
    finally:
        service.close()


def test_a_store_that_dies_and_comes_back_is_used_again(cold):
    """While it is dead every answer is right; what was computed meanwhile is written when it is back."""

    class Mortal(MemoryStore):
        dead = False

        def contains(self, keys):
            if self.dead:
                raise ConnectionError("the store is dead")
            return super().contains(keys)

    store = Mortal()
    engine = stored_engine(store, cache={"fetch": "deadline", "fetch_deadline_s": 60.0})
    service = EngineService(engine, "tiny")
    texts = [words(2 * PAGE + 5, seed=seed) for seed in range(6)]

    async def main():
        store.dead = True
        for i, text in enumerate(texts):
            tokens, usage = await ask(service, f"dead{i}", text)
            [truth] = run(cold, make_ask("t", text, 4))
            assert tokens == tokens_of(truth) and usage.store_tokens == 0
        while (await service.stats()).store.state == "working":
            await asyncio.sleep(0.01)
        store.dead = False
        while (
            (await service.stats()).store.state != "working"
            or engine.cache.stores.pending
            or engine.cache.busy
        ):
            await asyncio.sleep(0.01)
        assert await service.flush(5.0) == 0
        _, usage = await ask(service, "back", texts[0])
        assert usage.store_tokens == 2 * PAGE

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        service.close()


def test_a_load_that_fails_after_a_fetch_is_computed(cold, url):
    text = words(3 * PAGE + 9)
    [truth] = run(cold, make_ask("t", text))
    first = stored_engine(url)
    run(first, make_ask("a", text))
    first.cache.close()
    engine = stored_engine(url)
    controller = engine.cache.flights.controller

    class Broken:
        """Fails once."""

        layers = (0,)

        def copy(self, *_):
            controller._copier = copier
            raise OSError("no copy today")

    copier, controller._copier = controller._copier, Broken()
    [answer] = run(engine, make_ask("b", text))
    assert engine.counters["loads_failed"] == 1
    assert logprobs_of(answer) == logprobs_of(truth)
    engine.cache.close()
