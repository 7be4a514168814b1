"""Hostile bodies: attacks for `benchmarks.hostile`, and what the tests send in small.

bodies(200_000)     every body, with lists of so many items: (path, JSON)
ATTACKS             by name: functions that get a client and go on until they are cancelled
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

CHAT, RESPONSES, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"
USER = {"role": "user", "content": "a"}

ITEMS = 200_000
AT_ONCE = 4
HEADERS = {"content-type": "application/json"}
Attack = Callable[[httpx.AsyncClient], Awaitable[object]]


def bodies(items: int) -> dict[str, tuple[str, bytes]]:
    """Each is refused, or answered as any other."""
    wrong: list[Any] = [{"x": 1}] * items
    chats: dict[str, dict[str, Any]] = {
        "wrong_messages": {"messages": wrong},
        "wrong_parts": {"messages": [{"role": "user", "content": wrong}]},
        "wrong_calls": {"messages": [{"role": "assistant", "tool_calls": wrong}]},
        "wrong_tools": {"messages": [USER], "tools": wrong},
        "wrong_stop": {"messages": [USER], "stop": [1] * items},
        "wrong_stop_tokens": {"messages": [USER], "stop_token_ids": ["a"] * items},
        "wrong_bias": {"messages": [USER], "logit_bias": {f"k{i}": 1 for i in range(items)}},
        "wrong_choices": {"messages": [USER], "guided_choice": [1] * items},
        "unknown_fields": {"messages": [USER]} | {f"k{i}": 1 for i in range(items)},
        "unknown_fields_below": {"messages": [USER | {f"k{i}": 1 for i in range(items)}]},
        "many_messages": {"messages": [USER] * items},
        "just_few_enough_messages": {"messages": [USER] * (items // 12)},
        "large_tool": {"messages": [USER], "tools": [_tool(0, properties=items // 8)]},
        "many_tools": {"messages": [USER], "tools": [_tool(i) for i in range(items // 10)]},
        "long_message": {"messages": [{"role": "user", "content": "The sea. " * 4 * items}]},
    }
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "wrong_input": (RESPONSES, {"input": wrong}),
        "wrong_metadata": (RESPONSES, {"input": "a", "metadata": {f"k{i}": 1 for i in range(items)}}),
        "many_inputs": (RESPONSES, {"input": [USER] * items}),
        "wrong_anthropic": (MESSAGES, {"max_tokens": 1, "messages": wrong}),
        "wrong_blocks": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": wrong}]}),
        "many_anthropic": (MESSAGES, {"max_tokens": 1, "messages": [USER] * items}),
        "many_params": (GENERATE, {"text": "a", "sampling_params": [{}] * items}),
        "many_ids": (GENERATE, {"input_ids": [123456] * 5 * items}),
        "just_few_enough_ids": (GENERATE, {"input_ids": [12] * (items // 2)}),
        "many_texts": (GENERATE, {"text": ["a"] * items}),
        "empty_lists": (GENERATE, {"input_ids": [[]] * 10 * items}),
        "half_numbers": (GENERATE, {"input_ids": [1.0] * 5 * items}),
        "escapes": (GENERATE, {"text": "漢" * 6 * items}),
    }
    every = others | {name: (CHAT, body) for name, body in chats.items()}
    depth = min(items, 2_000_000)
    raw = {
        "deep": (GENERATE, b'{"input_ids":' + b"[" * depth + b"]" * depth + b"}"),
        "deep_objects": (CHAT, b'{"messages":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"),
        "long_number": (GENERATE, b'{"input_ids":[' + b"9" * 20 * items + b"]}"),
    }
    return raw | {
        name: (path, json.dumps(body, separators=(",", ":")).encode()) for name, (path, body) in every.items()
    }


def _tool(number: int, properties: int = 0) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def sending(path: str, body: bytes, at_once: int) -> Attack:
    async def one(client: httpx.AsyncClient) -> None:
        while True:
            with suppress(httpx.HTTPError):
                await client.post(path, content=body, headers=HEADERS)

    return lambda client: asyncio.gather(*(one(client) for _ in range(at_once)))


def _attacks() -> dict[str, Attack]:
    """A body is made when it is first sent: all of them together are 100 MB."""

    def one(name: str) -> Attack:
        async def attack(client: httpx.AsyncClient) -> object:
            return await sending(*bodies(ITEMS)[name], AT_ONCE)(client)

        return attack

    return {name: one(name) for name in bodies(1)}


ATTACKS = _attacks()
