"""Goal: vLLM with our host tier gives the texts that it gives without, whatever is loaded, lost or fails.
Method: whole engines with tiny random models on the CPU, several kinds of layers; nothing of vLLM is
replaced. Few blocks, so that prompts are split, blocks are reused and requests wait for each other."""

import json
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

# first, because it sets what vLLM reads when it is imported
from tests.engines.vllm_cpu import WORDS, save_model
from tiercel.errors import ConfigError
from tiercel.integrations.vllm.groups import Group, Groups
from tiercel.integrations.vllm.model import extra_of, namespace_of
from tiercel.integrations.vllm.scheduler import Scheduler
from tiercel.integrations.vllm.worker import blocks_of
from tiercel.spec import Identity
from tiercel.spec.stream import PREFIX, Window
from tiercel.transfer.copier import DirectCopier
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.types import Kind

# isort: split
import torch
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams

BLOCKS = {"qwen3": 24, "gemma3": 72, "gpt_oss": 48}


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
    def __init__(self, model, name, transfer=None, **how):
        self.runs = 0
        settings = {
            "dtype": "float32", "enforce_eager": True, "block_size": 32,
            "num_gpu_blocks_override": BLOCKS[name], "max_num_batched_tokens": 128, "max_num_seqs": 4,
            "max_model_len": 512, "disable_log_stats": False,
        }  # fmt: skip
        more = {"kv_transfer_config": transfer} if transfer else {}
        self.llm = LLM(model, **settings | more | how)

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def half(self):
        """The half that decides."""
        return self.core.scheduler.connector.scheduler

    @property
    def counted(self):
        return self.half.cache.counters

    def texts(self, between=lambda: None, tokens=8):
        """Texts and their log probabilities. `between` is called after each step."""
        self.runs += 1
        engine, ended, last_s = self.llm.llm_engine, {}, time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True)
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
        """What the device holds is forgotten; what the host holds is not."""
        assert self.llm.reset_prefix_cache()

    def external(self):
        """Tokens that vLLM says it had from us."""
        found = self.llm.get_metrics()
        return sum(each.value for each in found if each.name == "vllm:external_prefix_cache_hits")


def configured(host_memory="64MiB", **options):
    return {
        "kv_connector": "TiercelConnector",
        "kv_connector_module_path": "tiercel.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_memory": host_memory, **options},
    }


@contextmanager
def running(model, name, transfer=None, **how):
    engine = Engine(model, name, transfer, **how)
    try:
        yield engine
        if transfer:
            engine.half.cache.check()
    finally:
        engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a model, and the texts that vLLM gives without a connector."""
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


def erase(copy, kinds):
    """A copier that loads zeros."""

    def call(self, direction, leg):
        copy(self, direction, leg)
        if direction is Direction.LOAD and leg.kind in kinds:
            for stream in self.device.spec.streams_of(leg.kind):
                for layer in stream.layers:
                    buffer, pieces = self.device.rows[stream.name, layer]
                    for part, piece in pieces:
                        for places in leg.device:
                            if places[part] >= 0:
                                begin, size = piece.at(places[part])
                                buffer[begin : begin + size] = 0

    return call


def test_the_texts_are_those_without_it(model, monkeypatch):
    name, folder, texts = model
    with running(folder, name, configured()) as engine:

        def all_saved():
            under_way = engine.half.cache.flights._sent.values()
            assert all(flight.direction is Direction.LOAD for flight in under_way)

        assert engine.texts(between=all_saved) == texts
        first = engine.external()
        assert engine.texts() == texts
        hits = engine.external() - first
        assert hits > 1000, (first, hits)
        assert engine.counted["loads"] > 5 and not engine.counted["loads_failed"]
        assert bool(engine.counted["tails_loaded"]) == (name != "qwen3")
        copy = DirectCopier.copy
        for kinds in [{Kind.PAGE}] + [{Kind.TAIL}] * (name != "qwen3"):
            engine.forget()
            monkeypatch.setattr(DirectCopier, "copy", erase(copy, kinds))
            assert engine.texts() != texts, "what is loaded does not matter: this test can not fail"


def test_after_a_restart_the_tokens_are_found(model, tmp_path, monkeypatch):
    name, folder, texts = model
    store = f"file://{tmp_path}/store?size=64MiB"
    with running(folder, name, configured(store=store)) as first:
        assert first.texts() == texts
        found = first.external()
    with running(folder, name, configured(store=store)) as second:
        assert second.texts() == texts
        assert second.external() > found + 1000 and second.counted["tokens_store"] > 1000
    monkeypatch.setattr(DirectCopier, "copy", erase(DirectCopier.copy, set(Kind)))
    with running(folder, name, configured(store=store)) as control:
        assert control.texts() != texts, "what is loaded does not matter: this test can not fail"


@pytest.mark.parametrize("share", [0.3, 1])
def test_a_load_that_fails_costs_hits_only(model, monkeypatch, share):
    """Several fail in one step. What the load would have written is not left as it was."""
    name, folder, texts = model
    copy, rng = erase(DirectCopier.copy, set(Kind)), random.Random(5)
    whole = DirectCopier.copy

    def some(self, direction, leg):
        if direction is Direction.LOAD and rng.random() < share:
            copy(self, direction, leg)
            raise OSError("the copy failed")
        whole(self, direction, leg)

    with running(folder, name, configured()) as engine:
        assert engine.texts() == texts
        monkeypatch.setattr(DirectCopier, "copy", some)
        before = engine.counted["loads"]
        for _ in range(3):
            engine.forget()
            assert engine.texts() == texts
        assert engine.counted["loads_failed"] > 2
        assert (engine.counted["loads"] > before) == (share < 1)


def test_a_save_that_fails_costs_hits_only(model, monkeypatch):
    name, folder, texts = model
    whole, rng = DirectCopier.copy, random.Random(6)

    def some(self, direction, leg):
        if direction is Direction.SAVE and rng.random() < 0.3:
            raise OSError("the copy failed")
        whole(self, direction, leg)

    monkeypatch.setattr(DirectCopier, "copy", some)
    with running(folder, name, configured()) as engine:
        for _ in range(3):
            assert engine.texts() == texts
            engine.forget()
        assert engine.counted["saves_failed"] > 2 and engine.counted["loads"] > 2


def test_a_host_that_is_too_small_for_all_texts_is_enough(model):
    name, folder, texts = model
    with running(folder, name, configured()) as engine:
        pages = 20 * engine.half.cache.spec.place_bytes
    with running(folder, name, configured(pages)) as engine:
        for _ in range(3):
            assert engine.texts() == texts
        assert engine.counted["pages_saved"] > 40


def test_long_answers_and_preemptions_change_no_text(model):
    name, folder, _ = model
    blocks = {"num_gpu_blocks_override": BLOCKS[name] * 3 // 4}
    with running(folder, name, **blocks) as plain:
        texts = plain.texts(tokens=60)
    with running(folder, name, configured(), **blocks) as engine:
        for _ in range(2):
            assert engine.texts(tokens=60) == texts
        preempted = [each.value for each in engine.llm.get_metrics() if each.name == "vllm:num_preemptions"]
        assert sum(preempted) > 0 and engine.external() > 1000, preempted


def test_after_a_reset_nothing_of_before_is_found(models, tmp_path):
    """The weights may be others then."""
    folder, texts = models("gemma3")
    with running(folder, "gemma3", configured(store=f"file://{tmp_path}/store?size=64MiB")) as engine:
        chains = lambda: {key for text in engine.half.texts.values() for key in text.chain.keys}  # noqa: E731
        before, after = set(), set()
        assert engine.texts(between=lambda: before.update(chains())) == texts
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.texts(between=lambda: after.update(chains())) == texts
        assert len(before) > 40 and len(after) > 40 and not before & after


def test_what_would_go_wrong_is_refused(models):
    folder, _ = models("qwen3")
    fail = configured() | {"kv_load_failure_policy": "fail"}
    for transfer, why in ((fail, "recompute"), (configured(stores="x"), "no options")):
        with pytest.raises((ConfigError, RuntimeError, ValueError)) as error:
            Engine(folder, "qwen3", transfer)
        assert why in str(error.value)


OTHER_PROCESS = """
import json, os, sys
from tests.engines.test_vllm_connector import PROMPTS, Engine, configured
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
folder, name, how = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if __name__ == "__main__":
    engine = Engine(folder, name, configured(), **how)
    texts = [engine.texts() for _ in range(2)]
    print("RESULT", json.dumps([texts, engine.external(), type(engine.llm.llm_engine.engine_core).__name__]))
"""


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    "how", [{"async_scheduling": True}, {"distributed_executor_backend": "mp"}], ids=["core", "worker"]
)
def test_scheduler_and_worker_may_be_processes_of_their_own(models, tmp_path, name, how):
    """The engine's core is another process than the caller, which plans ahead; or the worker another one than
    the core."""
    folder, texts = models(name)
    (tmp_path / "run.py").write_text(OTHER_PROCESS)
    call = [sys.executable, str(tmp_path / "run.py"), folder, name, json.dumps(how)]
    run = subprocess.run(call, capture_output=True, text=True, timeout=200, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-3000:]
    found, hits, client = json.loads(lines[0].removeprefix("RESULT"))
    assert [[(text, scores) for text, scores in each] for each in found] == [texts, texts]
    assert hits > 1000 and client == "SyncMPClient"


# Keys


def request(**what):
    plain = {"mm_features": [], "prompt_embeds": None, "lora_request": None, "cache_salt": None}
    return SimpleNamespace(**plain | what)


def image(name, offset, length):
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def keys(asked, tokens=100):
    chain = KeyChain(b"identity", namespace_of(asked), 16)
    chain.extend([7] * tokens, extra=extra_of(asked, 16))
    return chain.keys


def test_prompts_that_differ_in_more_than_tokens_share_no_page():
    plain = keys(request())
    cat, dog = (keys(request(mm_features=[image(name, 40, 20)])) for name in ("cat", "dog"))
    assert plain[:2] == cat[:2] == dog[:2], "before the image they are the same"
    assert not {*plain[2:]} & {*cat[2:]} and not {*cat[2:]} & {*dog[2:]}
    later = keys(request(mm_features=[image("cat", 41, 20)]))
    two = keys(request(mm_features=[image("cat", 40, 20), image("dog", 70, 4)]))
    assert later[:2] == cat[:2] and later[2] != cat[2]
    assert two[:4] == cat[:4] and two[4:] != cat[4:]
    rows = torch.arange(100.0).reshape(100, 1)
    some, same = (keys(request(prompt_embeds=each)) for each in (rows, rows.clone()))
    rows[33] = -1
    assert some == same and keys(request(prompt_embeds=rows))[:2] == some[:2]
    assert not {*keys(request(prompt_embeds=rows))[2:]} & {*some[2:]}
    assert keys(request(prompt_embeds=rows.to(torch.bfloat16))) != keys(request(prompt_embeds=rows))
    salt, other = (keys(request(cache_salt=each)) for each in "ab")
    lora = keys(request(lora_request=SimpleNamespace(lora_name="a", lora_path="b")))
    words = [plain, salt, other, lora]
    assert len({key for each in words for key in each}) == sum(map(len, words))


# Blocks


def test_a_block_is_its_bytes_however_they_lie():
    raw = torch.arange(4 * 3 * 2 * 8, dtype=torch.int32)
    plain = raw.view(4, 3, 2, 8)
    assert torch.equal(blocks_of("a", plain, 4, 192).view(torch.int32), raw.view(4, 48))
    turned = raw.view(4, 2, 3, 8).transpose(1, 2)  # tokens before heads
    assert torch.equal(blocks_of("a", turned, 4, 192).view(torch.int32), raw.view(4, 48))
    assert torch.equal(blocks_of("a", plain, 2, 384).view(torch.int32), raw.view(2, 96)), "cut by a kernel"
    between = raw.view(4, 2, 24)[:, 1].view(4, 3, 8)
    assert torch.equal(blocks_of("a", between, 4, 96).view(torch.int32), raw.view(4, 48)[:, 24:])
    for cache, size in ((plain, 96), (raw.view(3, 4, 2, 8).transpose(0, 1), 192)):
        with pytest.raises(ConfigError):
            blocks_of("a", cache, 4, size)


def test_a_tail_whose_blocks_vllm_has_given_away_is_not_saved():
    window = Group(0, Window(33), 16, 8, ("layers.0.a",))
    half = Scheduler(
        Groups("m", (window, Group(1, PREFIX, 16, 8, ("layers.1.a",)))), Identity("m"), 2**16, ""
    )
    text = request(
        request_id="r", resumable=False, all_token_ids=[*range(81)], num_tokens=81, num_prompt_tokens=81,
        num_computed_tokens=64,
    )  # fmt: skip
    assert half.find(text, 64) == (0, False)
    half.texts["r"].boundaries = frozenset(range(1, 6))
    tables = [[0, 0, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]]
    blocks = SimpleNamespace(get_block_ids=lambda name: tables)
    step = {"r": 17}
    (ticket,) = half.plan(
        SimpleNamespace(
            kv_connector_block_state=blocks, num_scheduled_tokens=step, total_num_scheduled_tokens=17
        )
    ).tickets
    pages, tails = ticket.plan.legs
    assert pages.device == ((11,), (12,), (13,), (14,), (15,))
    assert tails.device == ((3,), (4,), (5,)), "those of two windows are gone"
    half.close()
