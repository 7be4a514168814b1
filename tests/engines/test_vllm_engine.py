"""Goal: vLLM with our tier gives the texts that it gives without, whatever happens to the store; and after a
restart it finds the tokens that it had.
Method: whole engines with tiny random models on the CPU, several kinds of layers; vLLM's own scheduler,
connector, manager and CPU tier (`vllm_cpu` has the only stand-in: the copies from the device and back). Few
blocks, so that prompts are split, blocks are reused and requests wait for each other."""

import random
import time
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

# first, because it sets what vLLM reads when it is imported
from tests.engines.vllm_cpu import WORDS, CpuWorker, register, save_model
from tests.storage.shared.make import kill_owner
from tiercel.errors import StoreError

# isort: split
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams

register()
BLOCKS = {"qwen3": 24, "gemma3": 72, "gpt_oss": 48}
CHUNK = {"qwen3": 32 * 1024, "gemma3": 16 * 1024, "gpt_oss": 32 * 1024}
"""Bytes of 32 tokens of a group of layers: a row of the CPU tier."""
ENOUGH = 200
"""Rows of the CPU tier that hold all prompts."""


def prompts():
    """Three texts with the same beginning about each of six documents."""
    rng = random.Random(1)
    words = lambda count: [rng.randrange(2, WORDS) for _ in range(count)]  # noqa: E731
    documents = [words(count) for count in (300, 260, 200, 330, 290, 310)]
    found = [each[: len(each) - rng.randrange(40)] + words(5) for each in documents for _ in range(3)]
    rng.shuffle(found)
    return found


PROMPTS = prompts()


class Engine:
    def __init__(self, model, name, store=None, rows=ENOUGH):
        self.runs = 0
        more = {"kv_transfer_config": configured(store, rows * CHUNK[name])} if store else {}
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            num_gpu_blocks_override=BLOCKS[name],
            max_num_batched_tokens=128,
            max_num_seqs=4,
            max_model_len=512,
            disable_log_stats=False,
            **more,
        )

    @property
    def tier(self):
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]

    def texts(self, between=lambda: None):
        """Texts and their log probabilities. `between` is called after each step."""
        self.runs += 1
        engine, ended, last_s = self.llm.llm_engine, {}, time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(f"{self.runs}-{number}", TokensPrompt(prompt_token_ids=prompt), params)
        while engine.has_unfinished_requests():
            assert time.monotonic() - last_s < 60, f"it never ends: {len(ended)} of {len(PROMPTS)} did"
            for output in engine.step():
                if output.finished:
                    last_s, answer = time.monotonic(), output.outputs[0]
                    chosen = zip(answer.logprobs, answer.token_ids, strict=True)
                    scores = [each[token].logprob for each, token in chosen]
                    ended[int(output.request_id.split("-")[1])] = (answer.text, scores)
            between()
        return [ended[number] for number in range(len(PROMPTS))]

    def forget(self):
        """What the device and the CPU tier hold is forgotten; what the store holds is not."""
        while self.llm.llm_engine.engine_core.engine_core.scheduler.connector.has_pending_push_work():
            self.llm.llm_engine.step()
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def metric(self, name, **labels):
        """The sum over all series of this counter that have these labels."""
        found = [each for each in self.llm.get_metrics() if each.name == f"vllm:{name}"]
        assert found, f"vLLM has no metric {name}"
        return sum(each.value for each in found if labels.items() <= each.labels.items())


def configured(store, host_bytes):
    tier = {"type": "Tier", "module_path": "tiercel.integrations.vllm", "store": store}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [tier],
        },
    }


@contextmanager
def running(model, name, store=None, **how):
    engine = Engine(model, name, store, **how)
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a model, and the texts that vLLM gives without offloading."""
    known = {}

    def model(name):
        if name not in known:
            folder = save_model(name, tmp_path_factory.mktemp("models") / name)
            with running(folder, name) as engine:
                known[name] = folder, engine.texts()
        return known[name]

    return model


@pytest.fixture(params=BLOCKS)
def model(request, models):
    """The name of a model, its folder, and its texts."""
    return request.param, *models(request.param)


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store?size=64MiB"


def test_after_a_restart_the_tokens_are_found_and_the_texts_are_the_same(model, store, monkeypatch):
    name, folder, texts = model
    with running(folder, name, store) as first:
        assert first.texts() == texts
        assert first.tier.stats()["hits"] == 0
        computed = first.metric("prompt_tokens_by_source", source="local_compute")
    with running(folder, name, store) as second:
        assert second.texts() == texts
        assert second.metric("external_prefix_cache_hits") > 1000
        assert second.metric("prompt_tokens_by_source", source="local_compute") < computed - 1000
        counted = second.tier.stats()
        assert second.metric("kv_offload_tiering_chunk_hits", tier="1:Tier") == counted["hits"] > 30
        assert counted["misses"] == 0
    monkeypatch.setattr(CpuWorker, "zeros", True)
    with running(folder, name, store) as control:
        assert control.texts() != texts, "what is loaded does not matter: this test can not fail"


def test_flipped_bytes_in_the_store_change_no_text(model, store, tmp_path):
    name, folder, texts = model
    with running(folder, name, store) as engine:
        engine.texts()
        rng = random.Random(2)
        for path in (tmp_path / "store").glob("*.tcs"):
            with path.open("r+b") as file:
                for start in range(0, path.stat().st_size, 4 * CHUNK[name]):
                    at = start + rng.randrange(4 * CHUNK[name])
                    byte = file.seek(at) and file.read(1)
                    if byte:
                        file.seek(at)
                        file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
        engine.forget()
        assert engine.texts() == texts
        counted = engine.tier.stats()
        assert counted["damaged"] > 3 and counted["hits"] > 3, counted
        assert engine.metric("kv_offload_tiering_promotion_job_failures", tier="1:Tier") > 0


@pytest.mark.parametrize("rows", [ENOUGH, 14, 5])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_chunks_that_are_promised_and_not_there_cost_hits_only(models, store, name, rows, monkeypatch):
    """A chunk may be damaged or evicted after vLLM has asked for it. A CPU tier of 14 rows holds a prompt of
    one group, and of 5 none."""
    folder, texts = models(name)
    with running(folder, name, store, rows=rows) as engine:
        assert engine.texts() == texts
        there = engine.tier._pages.store
        get, rng = there.get, random.Random(3)
        for missed in (0, 0.3, 1):
            engine.forget()
            before = engine.tier.stats()

            def some(wanted, missed=missed):
                found = [there and rng.random() >= missed for there in get(wanted)]
                for page, hit in zip(wanted, found, strict=True):
                    if not hit:
                        page.parts[1][:] = bytes(len(page.parts[1]))  # a miss leaves any bytes
                return found

            monkeypatch.setattr(there, "get", some)
            assert engine.texts() == texts, f"{missed} of the chunks are missed"
            counted = {key: engine.tier.stats()[key] - before[key] for key in ("hits", "misses")}
            assert (counted["hits"] > 0) == (missed < 1) and (counted["misses"] > 0) == (missed > 0), counted


def failing(real, rng):
    def call(batch):
        if rng.random() < 0.3:
            raise StoreError("the disk is gone")
        return real(batch)

    return call


def test_a_store_that_fails_now_and_then_costs_hits_only(model, store, monkeypatch):
    name, folder, texts = model
    with running(folder, name, store) as engine:
        engine.texts()
        there, rng = engine.tier._pages.store, random.Random(4)
        for call in ("get", "put", "contains"):
            monkeypatch.setattr(there, call, failing(getattr(there, call), rng))
        engine.forget()
        assert engine.texts() == texts
        assert engine.tier.stats()["failures"] > 0


def test_an_owner_of_a_shared_store_that_is_killed_changes_no_text(models, tmp_path):
    folder, texts = models("gemma3")
    with running(folder, "gemma3", f"shared://{tmp_path}/store?size=64MiB&linger_s=0.5") as engine:
        store, killed = engine.tier._pages.store, []
        assert engine.texts() == texts
        engine.forget()

        def kill():
            if engine.tier.stats()["hits"] > 20 and not killed:
                kill_owner(store)
                killed.append(True)

        assert engine.texts(between=kill) == texts and killed
        assert engine.tier.stats()["hits"] > 40, "the owner was not started again"
