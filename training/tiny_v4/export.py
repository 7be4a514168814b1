"""The model as a Hugging Face folder: config.json, model.safetensors, tokenizer, chat template; and back."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model import Config, TinyV4

# few values, kept in fp32
WIDE = ("sinks", "base", "scale", "position_bias", "e_score_correction_bias", "norm.weight")
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<|pad|>",
    "bos_token": "<|bos|>",
    "eos_token": "<|end|>",
    "model_max_length": Config.max_position_embeddings,
    "clean_up_tokenization_spaces": False,
}
SHIPPED = Path(__file__).parents[2] / "src" / "tiercel" / "models" / "tiny_v4"


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


def export_model(model: TinyV4, folder: Path, dtype: torch.dtype) -> None:
    def narrowed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if name.endswith(WIDE) or not tensor.is_floating_point() else tensor.to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    state = {k: narrowed(k, v).detach().contiguous().cpu() for k, v in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_json(model.config), indent=2) + "\n")


def export_tokenizer(work: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "recall.json"):
        shutil.copy(work / name, folder / name)
    shutil.copy(SHIPPED / "chat_template.jinja", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")


def load_model(folder: Path) -> TinyV4:
    raw = json.loads((folder / "config.json").read_text())
    known = {k: raw[k] for k in asdict(Config())}
    known["compress_ratios"] = tuple(raw["compress_ratios"][: raw["num_hidden_layers"]])
    model = TinyV4(Config(**known))
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    return model
