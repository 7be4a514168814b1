"""Fields of OpenAI's, SGLang's and vLLM's requests that this server knows but does not support.

One table for each object of a request: a field, and the values that change nothing. These values and null are
accepted; any other value is refused, and the error names the field (see `fields.Body`). Supported fields are
fields of the request's class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

ANY: Final = "any"
"""Every value is accepted: the field changes no answer. It is a hint, a label, or for another call."""

Known = dict[str, Sequence[Any] | Literal["any"]]

# Shared by SGLang's three calls; mostly sent by routers and benchmarks.
_SGLANG: Known = {
    "bootstrap_host": [],
    "bootstrap_port": [],
    "bootstrap_room": [],
    "custom_labels": ANY,
    "custom_logit_processor": [],
    "data_parallel_rank": [0],
    "disagg_prefill_dp_rank": [],
    "extra_key": [""],
    "images_config": [{}],
    "lora_path": [""],
    "return_hidden_states": [False],
    "return_prompt_token_ids": [False],
    "return_routed_experts": [False],
    "routed_dp_rank": [0],
    "routed_experts_start_len": ANY,
    "session_id": ANY,
    "session_params": [{}],
}

# Shared by OpenAI's two calls, with SGLang's and vLLM's additions.
_OPENAI: Known = _SGLANG | {
    "user": ANY,
    # SGLang
    "custom_params": [{}],
    "ebnf": [""],
    "json_schema": [""],
    "ngram_corpus_id": [],
    "regex": [""],
    "return_token_ids": [False],
    "skip_special_tokens": [True],
    "stop_regex": ["", []],
    # vLLM
    "allowed_token_ids": [[]],
    "bad_words": [[]],
    "ec_transfer_params": [{}],
    "kv_transfer_params": [{}],
    "length_penalty": [1],
    "logprob_token_ids": [],
    "min_tokens": [0],
    "mm_processor_kwargs": [{}],
    "repetition_detection": [],
    "response_format": [{"type": "text"}],
    "return_mm_kwargs": ANY,
    "return_token_offsets": ANY,
    "return_tokens_as_token_ids": [False],
    "routed_experts_prompt_start": ANY,
    "spaces_between_special_tokens": ANY,
    "stream_interval": ANY,
    "structured_outputs": [{}],
    "thinking_token_budget": [-1],
    "truncate_prompt_tokens": [],
    "truncation_side": ANY,
    "use_beam_search": [False],
    "vllm_xargs": [{}],
    "watermarking": [False],
    # older vLLM
    "guided_choice": [[]],
    "guided_decoding_backend": ANY,
    "guided_grammar": [""],
    "guided_json": ["", {}],
    "guided_regex": [""],
    "guided_whitespace_pattern": ANY,
    "logits_processors": [[]],
}

CHAT: Known = _OPENAI | {
    "audio": [],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "metadata": ANY,
    "modalities": [["text"]],
    "moderation": [],
    "prediction": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_options": ANY,
    "prompt_cache_retention": ANY,
    "safety_identifier": ANY,
    "service_tier": ANY,
    "store": ANY,
    "verbosity": ["medium"],
    "web_search_options": [],
    # SGLang
    "continue_final_message": [False],
    "input_ids": [],
    "max_dynamic_patch": [],
    "min_dynamic_patch": [],
    "reasoning": [{}],
    "return_meta_info": [False],
    "stream_reasoning": ANY,
    "task": [],
    "use_audio_in_video": [False],
    # vLLM
    "add_generation_prompt": [True],
    "add_special_tokens": [False],
    "chat_template": [],
    "documents": [[]],
    "echo": [False],
    "media_io_kwargs": [{}],
    "return_prompt_text": [False],
}

COMPLETION: Known = _OPENAI | {
    "suffix": [""],
    "add_special_tokens": [True],
    "prompt_embeds": [[]],
}

STREAM_OPTIONS: Known = {"include_obfuscation": ANY}

_MESSAGE: Known = {
    "annotations": [[]],
    "audio": [],
    "function_call": [],
    "name": ANY,
    "refusal": [],
    # SGLang, vLLM, litellm
    "images": [[]],
    "provider_specific_fields": ANY,
    "thinking_blocks": [[]],
    "tools": [[]],
}

MESSAGE: Known = _MESSAGE | {"reasoning": [""], "reasoning_content": [""], "tool_calls": [[]]}

ASSISTANT_MESSAGE: Known = _MESSAGE | {"tool_call_id": []}

TEXT_PART: Known = {"annotations": [[]]}

CACHE_CONTROL: Known = {"ttl": ANY}

GENERATE: Known = _SGLANG | {
    "audio_data": [[]],
    "background": [False],
    "bootstrap_pair_key": [],
    "conversation_id": ANY,
    "decode_tp_size": [],
    "encoder_urls": [[]],
    "external_trace_header": ANY,
    "http_worker_ipc": [],
    "image_data": [[]],
    "image_max_dynamic_patch": [],
    "input_embeds": [],
    "kv_router_hint": [],
    "log_metrics": ANY,
    "lora_id": [""],
    "max_dynamic_patch": [],
    "max_thinking_tokens": [],
    "min_dynamic_patch": [],
    "mm_content_hashes": [[]],
    "mm_hashes": [[]],
    "modalities": ANY,
    "model": ANY,
    "multi_item_delimiter_indices": [[]],
    "need_wait_for_mm_inputs": [False],
    "no_logs": ANY,
    "num_items_assigned": [{}],
    "positional_embed_overrides": [],
    "received_time": ANY,
    "require_reasoning": [False],
    "return_bytes": [False],
    "return_cached_tokens_details": ANY,  # they are always in meta_info
    "return_entropy": [False],
    "return_flat_raw_top_logprobs": [False],
    "return_flat_raw_top_logprobs_b64": [False],
    "return_indexer_topk": [False],
    "return_sampling_mask": [False],
    "routing_key": ANY,
    "stream_options": ANY,
    "token_ids_logprob": [[]],
    "use_audio_in_video": [False],
    "video_config": [{}],
    "video_data": [[]],
    "video_max_dynamic_patch": [],
}

SAMPLING_PARAMS: Known = {
    "beam_width": [1],
    "custom_params": [{}],
    "ebnf": [""],
    "json_schema": [""],
    "min_new_tokens": [0],
    "regex": [""],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": ANY,
    "stop_regex": ["", []],
    "stream_interval": ANY,
    "structural_tag": [""],
}
