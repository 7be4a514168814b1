"""A trained checkpoint to a Hugging Face folder: config.json, model.safetensors, tokenizer, chat template.

python export.py CHECKPOINT_DIR WORK_DIR FOLDER      # CHECKPOINT_DIR holds ckpt.0, ckpt.1, ... of train.py
"""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from train import load

from model import Config, TinyV4

WIDE = (
    "sinks",
    "base",
    "scale",
    "position_bias",
    "e_score_correction_bias",
    "norm.weight",
)  # few values, kept in fp32
CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NAMED = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|end|>"}


def config_json(config: Config) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **asdict(config),
        "compress_ratios": [*config.compress_ratios, 0],
        "num_hidden_layers": len(config.compress_ratios),
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def narrowed(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    def keep(name: str, tensor: torch.Tensor) -> bool:
        return not tensor.is_floating_point() or name.endswith(WIDE)

    return {k: (v if keep(k, v) else v.to(dtype)).detach().contiguous().cpu() for k, v in state.items()}


def export_folder(model: TinyV4, folder: Path, dtype: torch.dtype) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(narrowed(model.state_dict(), dtype), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_json(model.config), indent=2) + "\n")


def load_folder(folder: Path) -> TinyV4:
    raw = json.loads((folder / "config.json").read_text())
    known = {k: raw[k] for k in asdict(Config())}
    known["compress_ratios"] = tuple(raw["compress_ratios"][: raw["num_hidden_layers"]])
    model = TinyV4(Config(**known))
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    return model.eval()


def main(checkpoint: Path, work: Path, folder: Path) -> None:
    saved = load(checkpoint)
    model = TinyV4(saved["config"])
    model.load_state_dict(saved["model"])
    export_folder(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "recall.json"):
        shutil.copy(work / name, folder / name)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **NAMED,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
