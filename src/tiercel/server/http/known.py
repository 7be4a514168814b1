"""Fields of OpenAI's, SGLang's and vLLM's requests that this server knows but does not support.

One table for each object of a request. A line has the values that change nothing, as JSON, and the fields.
These values and null are accepted; any other value is refused, and the error names the field (`body.Body`).
`any`: every value is accepted, because the field is a hint, a label, or for another call. Supported fields
are fields of the request's class.

Known are all fields of OpenAI's client 2.54, of SGLang's `GenerateReqInput`, `SamplingParams`,
`ChatCompletionRequest` and `CompletionRequest` (main of October 2026), of the same types in sglang-router
0.3.2, and of vLLM's `ChatCompletionRequest` and `CompletionRequest` (main of October 2026). The tests have
them with their defaults: `tests/server/recorded.py`.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

ANY: Final = "any"
Known = dict[str, list[Any] | Literal["any"]]


def _table(text: str) -> Known:
    known: Known = {}
    for line in text.strip().splitlines():
        values, *names = line.split()
        known |= dict.fromkeys(names, ANY if values == ANY else json.loads(values))
    return known


# Shared by SGLang's three calls; mostly sent by routers and benchmarks.
_SGLANG = _table("""
    any        custom_labels routed_experts_start_len session_id
    []         custom_logit_processor
    [""]       extra_key lora_path
    [0]        data_parallel_rank disagg_prefill_dp_rank routed_dp_rank
    [false]    return_hidden_states return_prompt_token_ids return_routed_experts
    [{}]       images_config session_params
""")

# Shared by OpenAI's two calls, with SGLang's and vLLM's additions; the last two lines are older vLLM's.
_OPENAI = _SGLANG | _table("""
    any        return_mm_kwargs return_token_offsets routed_experts_prompt_start stream_interval user
    any        routing_id spaces_between_special_tokens truncation_side
    []         logprob_token_ids ngram_corpus_id repetition_detection truncate_prompt_tokens
    ["",[]]    stop_regex
    [-1]       thinking_token_budget
    [1]        length_penalty
    [false]    return_token_ids return_tokens_as_token_ids use_beam_search watermarking
    [[]]       allowed_token_ids bad_words
    [{}]       custom_params ec_transfer_params mm_processor_kwargs
    [{}]       vllm_xargs
    any        guided_decoding_backend guided_whitespace_pattern
    [[]]       logits_processors
""")

CHAT = _OPENAI | _table("""
    any        metadata prediction prompt_cache_key prompt_cache_options prompt_cache_retention
    any        safety_identifier service_tier store stream_reasoning
    []         audio chat_template input_ids max_dynamic_patch min_dynamic_patch moderation task
    []         web_search_options
    [false]    add_special_tokens echo return_meta_info return_prompt_text
    [false]    use_audio_in_video
    [[]]       documents functions
    [{}]       media_io_kwargs reasoning
    [["text"]]         modalities
    ["medium"]         verbosity
    ["none","auto"]    function_call
""")

COMPLETION: Known = _OPENAI | {"suffix": [""], "add_special_tokens": [True], "prompt_embeds": [[]]}

# What vLLM's connectors tell each other, besides where a prompt is computed.
KV_TRANSFER_PARAMS = _table("""
    any        aborted_request dcp_size pp_size remote_block_ids remote_blocks_expiry_time remote_dp_rank
    any        remote_dp_size remote_engine_id remote_handshake_port remote_notify_port remote_num_tokens
    any        remote_tp_size tp_size transfer_mode
""")

STREAM_OPTIONS: Known = {"include_obfuscation": ANY}

_MESSAGE = _table("""
    any        name provider_specific_fields
    []         audio function_call refusal
    [[]]       annotations images thinking_blocks tools
""")

MESSAGE: Known = _MESSAGE | {"reasoning": [""], "reasoning_content": [""], "tool_calls": [[]]}

ASSISTANT_MESSAGE: Known = _MESSAGE | {"tool_call_id": []}

TEXT_PART: Known = {"annotations": [[]]}

CACHE_CONTROL: Known = {"ttl": ANY, "scope": ANY}

# `/v1/responses`. `max_tool_calls` is about tools of OpenAI's own, which do not exist here.
RESPONSES = _table("""
    any        access_programs image max_tool_calls prompt_cache_key prompt_cache_options
    any        prompt_cache_retention safety_identifier service_tier user
    []         conversation moderation prompt
    [false]    background
    [[]]       context_management
    ["disabled"]    truncation
""")

# Of an item that comes back: its id and state, which are not needed.
ITEM_LABELS = _table("any id phase status")

CALL_ITEM: Known = ITEM_LABELS | {"caller": ANY, "namespace": [""], "async": [False]}

CALL_OUTPUT_ITEM: Known = ITEM_LABELS | {"caller": ANY, "name": ANY, "namespace": ANY}

INPUT_PART: Known = {"annotations": ANY, "logprobs": ANY}

BREAK_POINT: Known = {"ttl": ANY}

FUNCTION_TOOL: Known = {
    "allowed_callers": [["direct"]],
    "defer_loading": [False],
    "output_schema": ANY,
    "async": [False],
}

TEXT_FIELDS: Known = {"verbosity": ["medium"]}

REASONING: Known = {"context": ANY, "mode": ["standard"]}

# `/tokenize`, as vLLM has it for chats; `/abort_request`.
TOKENIZE: Known = {"chat_template": [], "mm_processor_kwargs": [{}], "media_io_kwargs": [{}]}

ABORT: Known = {"abort_message": ANY, "finished_reason": ANY, "http_worker_ipc": [], "prefix": [False]}

# `/v1/messages`. `context_management` at the value of a client that keeps everything.
MESSAGES = _table("""
    any        betas diagnostics fallback_credit_token inference_geo metadata service_tier speed
    any        user_profile_id workspace_id
    []         compaction container output_format thread
    [[]]       fallbacks mcp_servers
    [{},{"edits":[]},{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}]    context_management
""")

TEXT_BLOCK: Known = {"citations": ANY}

TOOL_USE: Known = {"caller": ANY, "toolset_name": []}

TOOL_RESULT: Known = {"is_error": ANY, "toolset_name": []}

THINKING: Known = {"budget_tokens": ANY}

ANTHROPIC_TOOL: Known = {
    "allowed_callers": [["direct"]],
    "defer_loading": [False],
    "eager_input_streaming": ANY,
    "input_examples": ANY,
}

# `return_cached_tokens_details`: they are always in meta_info.
GENERATE = _SGLANG | _table("""
    any        conversation_id external_trace_header log_metrics modalities model no_logs received_time
    any        return_cached_tokens_details routing_key stream_options
    []         bootstrap_pair_key decode_tp_size http_worker_ipc image_max_dynamic_patch input_embeds
    []         kv_router_hint max_dynamic_patch max_thinking_tokens min_dynamic_patch
    []         positional_embed_overrides video_max_dynamic_patch
    [""]       lora_id
    [false]    background need_wait_for_mm_inputs require_reasoning return_bytes return_entropy
    [false]    return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 return_indexer_topk
    [false]    return_sampling_mask use_audio_in_video
    [[]]       audio_data encoder_urls image_data mm_content_hashes mm_hashes token_ids_logprob video_data
    [[]]       multi_item_delimiter_indices
    [{}]       num_items_assigned video_config
""")

SAMPLING_PARAMS = _table("""
    any        spaces_between_special_tokens stream_interval
    [""]       structural_tag
    ["",[]]    stop_regex
    [1]        beam_width
    [{}]       custom_params
""")
