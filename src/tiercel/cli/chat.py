"""`tiercel chat`: talk to a server, and see what each turn reused."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

HELP = "/reset forgets the conversation, /exit or an empty line ends it."


@dataclass
class ChatTurn:
    """One answer, with its times and usage."""

    text: str = ""
    thought: str = ""
    """The reasoning before the text. It is shown, but not sent back."""
    first_token_s: float = 0.0
    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        tokens, answer = self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0)
        rate = answer / self.seconds if self.seconds else 0.0
        first = f"first token after {1e3 * self.first_token_s:.0f} ms"
        return f"{cached} of {tokens} tokens cached, {first}, {answer} tokens at {rate:.0f}/s"


def chat(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the best token.", min=0)] = 0.0,
    api_key: Annotated[str | None, typer.Option(envvar="TIERCEL_API_KEY")] = None,
) -> None:
    """A small chat in the terminal: cached tokens and time to first token after each turn."""
    import httpx

    console = Console(highlight=False)
    begun: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    messages = list(begun)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=600.0) as client:
        console.print(f"[dim]{HELP}[/dim]")
        for said in _lines():
            if said == "/reset":
                messages = list(begun)
                continue
            messages.append({"role": "user", "content": said})
            body = {"model": "", "messages": messages, "max_tokens": max_tokens, "temperature": temperature}
            try:
                turn = _ask(client, body)
            except httpx.HTTPError as error:
                typer.echo(f"tiercel: {url}: {error}", err=True)
                raise typer.Exit(2) from error
            messages.append({"role": "assistant", "content": turn.text})
            console.print(f"\n[dim]{turn}[/dim]")


def _lines() -> Iterator[str]:
    """The user's lines, up to an empty one."""
    while True:
        if sys.stdin.isatty():
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = sys.stdin.readline().strip()
        if not line or line == "/exit":
            return
        yield line


def _ask(client: Any, body: dict[str, Any]) -> ChatTurn:
    """Prints an answer while it arrives."""
    import httpx

    if not body["model"]:
        body["model"] = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    turn, start = ChatTurn(), time.perf_counter()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
            message = response.json()["error"]["message"]
            raise httpx.HTTPStatusError(message, request=response.request, response=response)
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.HTTPError(event["error"]["message"])
            turn.usage = event.get("usage") or turn.usage
            for choice in event.get("choices", ()):
                thought, text = (choice["delta"].get(name) or "" for name in ("reasoning_content", "content"))
                if (thought or text) and not turn.first_token_s:
                    turn.first_token_s = time.perf_counter() - start
                lead = "\n\n" if text and turn.thought and not turn.text else ""
                turn.thought, turn.text = turn.thought + thought, turn.text + text
                sys.stdout.write(thought + lead + text)
                sys.stdout.flush()
    turn.seconds = time.perf_counter() - start
    return turn
