"""Requests of the field's clients, as they were sent or as their types' defaults say.

`SGLANG_…`, `VLLM_…`: every field of the request types at its default, as JSON (SGLang: `GenerateReqInput`,
`SamplingParams`, `ChatCompletionRequest`, `CompletionRequest` of October 2026; vLLM: `ChatCompletionRequest`,
`CompletionRequest` of the same time). Fields a client must fill in are left out. `ROUTER_…`: what SGLang's
router adds of its own. `CLIENTS`: whole bodies. `PD`: bodies of the router with `--pd-disaggregation`; it
sends the same one to both servers. `ROUTER_CALLS`: its other calls of a server.
"""

from typing import Any

_SGLANG_OPENAI: dict[str, Any] = {
    "best_of": None,
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "cache_salt": None,
    "custom_logit_processor": None,
    "custom_params": None,
    "data_parallel_rank": None,
    "disagg_prefill_dp_rank": None,
    "ebnf": None,
    "extra_key": None,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "images_config": None,
    "logit_bias": None,
    "lora_path": None,
    "min_tokens": 0,
    "model": "default",
    "n": 1,
    "ngram_corpus_id": None,
    "no_stop_trim": False,
    "presence_penalty": 0.0,
    "priority": None,
    "regex": None,
    "response_format": None,
    "return_cached_tokens_details": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_token_ids": False,
    "rid": None,
    "routed_dp_rank": None,
    "routed_experts_start_len": 0,
    "seed": None,
    "session_id": None,
    "session_params": None,
    "skip_special_tokens": True,
    "stop": None,
    "stop_regex": None,
    "stop_token_ids": None,
    "stream": False,
    "stream_options": None,
    "user": None,
}

SGLANG_COMPLETION = _SGLANG_OPENAI | {
    "custom_labels": None,
    "echo": False,
    "json_schema": None,
    "logprobs": None,
    "max_tokens": 16,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "suffix": None,
    "temperature": 1.0,
    "top_k": -1,
    "top_p": 1.0,
}

SGLANG_CHAT = {name: value for name, value in _SGLANG_OPENAI.items() if name != "best_of"} | {
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "input_ids": None,
    "logprobs": False,
    "max_completion_tokens": None,
    "max_dynamic_patch": None,
    "max_tokens": None,
    "min_dynamic_patch": None,
    "min_p": None,
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "repetition_penalty": None,
    "return_meta_info": False,
    "return_prompt_token_ids": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "task": None,
    "temperature": None,
    "tool_choice": "auto",
    "tools": None,
    "top_k": None,
    "top_logprobs": None,
    "top_p": None,
    "use_audio_in_video": False,
}

SGLANG_SAMPLING = {
    "beam_width": 1,
    "custom_params": None,
    "ebnf": None,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "json_schema": None,
    "logit_bias": None,
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "n": 1,
    "no_stop_trim": False,
    "presence_penalty": 0.0,
    "regex": None,
    "repetition_penalty": 1.0,
    "sampling_seed": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": None,
    "stop_regex": None,
    "stop_token_ids": None,
    "stream_interval": None,
    "structural_tag": None,
    "temperature": 1.0,
    "top_k": 1 << 30,
    "top_p": 1.0,
}

SGLANG_GENERATE = {
    "audio_data": None,
    "background": False,
    "bootstrap_host": None,
    "bootstrap_pair_key": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "cache_salt": None,
    "conversation_id": None,
    "custom_labels": None,
    "custom_logit_processor": None,
    "data_parallel_rank": None,
    "decode_tp_size": None,
    "disagg_prefill_dp_rank": None,
    "encoder_urls": None,
    "external_trace_header": None,
    "extra_key": None,
    "http_worker_ipc": None,
    "image_data": None,
    "image_max_dynamic_patch": None,
    "images_config": None,
    "input_embeds": None,
    "input_ids": None,
    "kv_router_hint": None,
    "log_metrics": True,
    "logprob_start_len": None,
    "lora_id": None,
    "lora_path": None,
    "max_dynamic_patch": None,
    "max_thinking_tokens": None,
    "min_dynamic_patch": None,
    "mm_content_hashes": None,
    "mm_hashes": None,
    "modalities": None,
    "multi_item_delimiter_indices": None,
    "need_wait_for_mm_inputs": None,
    "no_logs": False,
    "num_items_assigned": None,
    "positional_embed_overrides": None,
    "priority": None,
    "received_time": None,
    "require_reasoning": False,
    "return_bytes": False,
    "return_entropy": False,
    "return_flat_raw_top_logprobs": False,
    "return_flat_raw_top_logprobs_b64": False,
    "return_hidden_states": False,
    "return_indexer_topk": False,
    "return_logprob": None,
    "return_prompt_token_ids": False,
    "return_routed_experts": False,
    "return_sampling_mask": None,
    "return_text_in_logprobs": False,
    "rid": None,
    "routed_dp_rank": None,
    "routed_experts_start_len": 0,
    "routing_key": None,
    "sampling_params": SGLANG_SAMPLING,
    "session_id": None,
    "session_params": None,
    "stream": False,
    "token_ids_logprob": None,
    "top_logprobs_num": None,
    "use_audio_in_video": False,
    "video_config": None,
    "video_data": None,
    "video_max_dynamic_patch": None,
}

_VLLM: dict[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "cache_salt": None,
    "ec_transfer_params": None,
    "frequency_penalty": None,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "kv_transfer_params": None,
    "length_penalty": 1.0,
    "logit_bias": None,
    "logprob_token_ids": None,
    "min_p": None,
    "min_tokens": 0,
    "model": None,
    "n": 1,
    "presence_penalty": None,
    "priority": 0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "repetition_penalty": None,
    "request_id": "0123456789abcdef0123456789abcdef",
    "response_format": None,
    "return_mm_kwargs": True,
    "return_token_ids": None,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0,
    "seed": None,
    "session_id": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "stream": False,
    "stream_interval": None,
    "stream_options": None,
    "structured_outputs": None,
    "temperature": None,
    "thinking_token_budget": None,
    "top_k": None,
    "top_p": None,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "use_beam_search": False,
    "user": None,
    "vllm_xargs": None,
    "watermarking": None,
}

VLLM_COMPLETION = _VLLM | {
    "add_special_tokens": True,
    "echo": False,
    "logprobs": None,
    "max_tokens": 16,
    "prompt_embeds": None,
    "suffix": None,
}

VLLM_CHAT = _VLLM | {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "documents": None,
    "echo": False,
    "include_reasoning": True,
    "logprobs": False,
    "max_completion_tokens": None,
    "max_tokens": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "return_prompt_text": None,
    "tool_choice": "none",
    "tools": None,
    "top_logprobs": 0,
}

ROUTER_OPENAI = {"sampling_seed": None}
ROUTER_COMPLETION = SGLANG_COMPLETION | ROUTER_OPENAI | {"routing_id": None}
ROUTER_CHAT = SGLANG_CHAT | ROUTER_OPENAI

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = {"role": "user", "content": "Hello"}

_ROUTED_GENERATE = {
    "model": None,
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 4},
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
_ROUTED_CHAT = {
    "messages": [USER],
    "model": "scripted",
    "logprobs": False,
    "max_completion_tokens": 4,  # the client had sent max_tokens
    "stream": False,
    "temperature": 0.0,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
}
_ROUTED_COMPLETION = {
    "model": "scripted",
    "max_tokens": 4,
    "temperature": 0.0,
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


def _bootstrap(*rooms: int) -> dict[str, Any]:
    """Lists where the router sees several prompts, or several answers of a chat."""
    if len(rooms) == 1:
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9001, "bootstrap_room": rooms[0]}
    return {
        "bootstrap_host": ["127.0.0.1"] * len(rooms),
        "bootstrap_port": [9001] * len(rooms),
        "bootstrap_room": list(rooms),
    }


PD: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (GENERATE, _ROUTED_GENERATE | {"text": "Hello"} | _bootstrap(1704100025462917972)),
    "generate of two prompts": (
        GENERATE,
        _ROUTED_GENERATE
        | {"text": None, "input_ids": [[5, 6, 7], [8, 9]]}
        | _bootstrap(4389742920043250862, 359660706250878416),
    ),
    "completions": (COMPLETIONS, _ROUTED_COMPLETION | {"prompt": "Hello"} | _bootstrap(7892200510166103080)),
    "completions of two prompts": (
        COMPLETIONS,
        _ROUTED_COMPLETION
        | {"prompt": ["Hello", "one"]}
        | _bootstrap(7687644325089985043, 1317362188177457028),
    ),
    "chat": (CHAT, _ROUTED_CHAT | _bootstrap(5393051053036372050)),
    "chat with n": (CHAT, _ROUTED_CHAT | {"n": 2} | _bootstrap(5748768613603497380, 3187376665267788999)),
}

ROUTER_CALLS = (
    ("GET", "/health"),
    ("GET", "/server_info"),
    ("GET", "/model_info"),
    ("GET", "/get_model_info"),
    ("GET", "/get_load"),
    ("GET", "/metrics"),
    ("POST", "/flush_cache"),
)
"""`/health` at the start and every minute, both infos at the start; the others when it is asked for them.

Its `--mini-lb` also asks for `/health_generate` and `/get_server_info`, newer ones for
`/v1/loads?include=core`. None of them sends HEAD.
"""

CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang-router 0.3.2, generate": (GENERATE, _ROUTED_GENERATE | {"text": "Hello"}),
    "sglang-router 0.3.2, generate with logprobs, streamed": (
        GENERATE,
        _ROUTED_GENERATE
        | {
            "text": "Hello",
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "stream": True,
        },
    ),
    "sglang-router 0.3.2, chat": (CHAT, _ROUTED_CHAT),
    "sglang-router 0.3.2, chat with n": (
        CHAT,
        _ROUTED_CHAT | {"n": 2, "logprobs": True, "top_logprobs": 1, "stop": ["x"]},
    ),
    "sglang-router 0.3.2, completions": (COMPLETIONS, _ROUTED_COMPLETION | {"prompt": "Hello"}),
    "sglang-router 0.3.2, completions of two prompts": (
        COMPLETIONS,
        _ROUTED_COMPLETION | {"prompt": ["Hello", "one"], "logprobs": 1, "echo": True, "stop": "x", "n": 1},
    ),
    "guidellm 0.8.1, chat": (
        CHAT,
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    "guidellm 0.8.1, completions": (
        COMPLETIONS,
        {
            "model": "scripted",
            "prompt": "Hello",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    "SGLang's bench_serving, sglang": (
        GENERATE,
        {
            "text": "Hello",
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
            "stream": True,
            "lora_path": "",
            "return_logprob": False,
            "return_routed_experts": False,
            "logprob_start_len": -1,
        },
    ),
    "SGLang's bench_serving, sglang-oai": (
        COMPLETIONS,
        {
            "model": "scripted",
            "prompt": "Hello",
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": 8,
            "stream": True,
            "ignore_eos": True,
        },
    ),
    "SGLang's bench_serving, sglang-oai-chat with a cache report": (
        CHAT,
        {
            "model": "scripted",
            "messages": [USER],
            "temperature": 0.0,
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_cached_tokens_details": True,
        },
    ),
    "SGLang's bench_multiturn, --api-format sglang": (
        GENERATE,
        {
            "input_ids": [256, 257],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
            "stream": True,
            "stream_options": {"include_usage": True},
            "lora_path": "",
            "return_logprob": False,
            "logprob_start_len": -1,
        },
    ),
    "SGLang's bench_multiturn, --api-format openai": (
        CHAT,
        {
            "model": "/models/scripted",  # its --model-path, from which it also loads the tokenizer
            "messages": [USER, {"role": "assistant", "content": "Hi"}, USER],
            "max_tokens": 8,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "SGLang's frontend language": (
        GENERATE,
        {
            "text": "Hello",
            "sampling_params": {
                "skip_special_tokens": True,
                "spaces_between_special_tokens": True,
                "max_new_tokens": 8,
                "min_new_tokens": 0,
                "n": 1,
                "stop": [],
                "stop_token_ids": [],
                "stop_regex": [],
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "ignore_eos": False,
                "regex": None,
                "json_schema": None,
            },
        },
    ),
    "litellm, with its own answer echoed": (
        CHAT,
        {
            "model": "scripted",
            "messages": [
                USER,
                {
                    "content": "Hi",
                    "role": "assistant",
                    "tool_calls": None,
                    "function_call": None,
                    "audio": None,
                    "annotations": [],
                    "reasoning_content": None,
                    "thinking_blocks": None,
                    "provider_specific_fields": {"refusal": None},
                },
                {"role": "user", "content": "Hello", "name": None, "cache_control": None},
            ],
        },
    ),
}

# Every field of `MessageCountTokensParams`, `MessageCreateParams`, their beta twins, and `ToolParam` of
# `anthropic` 2.8.0, and those for sampling of earlier versions.
ANTHROPIC_COUNT = """
    betas cache_control context_management mcp_servers messages model output_config output_format speed system
    thinking tool_choice tools user_profile_id workspace_id
"""
ANTHROPIC_MESSAGES = f"""{ANTHROPIC_COUNT}
    compaction container diagnostics fallback_credit_token fallbacks inference_geo max_tokens metadata
    service_tier stop_sequences stream temperature thread top_k top_p
"""
ANTHROPIC_TOOL = """
    allowed_callers cache_control defer_loading description eager_input_streaming input_examples input_schema
    name strict type
"""
