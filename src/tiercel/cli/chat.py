"""`tiercel chat`: talk to a server, and see what each turn reused.

Lines can be edited and are remembered where there is a terminal. An error or Ctrl-C ends the answer, not the
conversation.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tiercel.cli.calling import URL, ApiKey, address, headers

HELP = """/explain      what the last answer reused, from which tier, and why not more
/save FILE    write the conversation to a file, as JSON
/reset        forget the conversation
/help         this list
/exit         end, as Ctrl-D does
A message that begins with a slash needs a blank before it."""

HISTORY_LINES = 1000


@dataclass
class ChatTurn:
    """One answer, with its times and usage."""

    text: str = ""
    thought: str = ""
    """The reasoning before the text. It is shown, but not sent back."""
    request_id: str = ""
    first_token_s: float = 0.0
    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    def __str__(self) -> str:
        answer = self.usage.get("completion_tokens", 0)
        rate = answer / self.seconds if self.seconds else 0.0
        first = f"first token after {1e3 * self.first_token_s:.0f} ms"
        return (
            f"{self.cached} of {self.prompt_tokens} tokens cached, {first}, {answer} tokens at {rate:.0f}/s"
        )


class Conversation:
    """What was said so far, and the server that answers."""

    def __init__(self, client: Any, body: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._body = body
        self._begun = [{"role": "system", "content": system}] if system else []
        self._console = Console(highlight=False)
        self.messages = list(self._begun)
        self.last: ChatTurn | None = None
        self.failed = False
        self._page_tokens: int | None = None
        """None: not asked for yet. 0: the server does not tell."""

    def hear(self, said: str) -> None:
        """A line of the user: a command, or a message. Every error is printed."""
        import httpx

        word, _, rest = said.partition(" ")
        command = {"/explain": self._explain, "/save": self._save, "/reset": self._reset, "/help": self._help}
        try:
            if not said.startswith("/"):
                self._answer(said.strip())
            elif word in command:
                command[word](rest.strip())
            else:
                self._tell(f"{word} is not a command; /help lists them")
        except KeyboardInterrupt:
            self._tell("\nstopped; the message and its answer are forgotten")
        except (httpx.HTTPError, OSError, ValueError) as error:
            self.failed = True
            typer.echo(f"\ntiercel: {self._client.base_url}: {error or type(error).__name__}", err=True)

    def _answer(self, said: str) -> None:
        messages = [*self.messages, {"role": "user", "content": said}]
        turn = self.last = _ask(self._client, self._body | {"messages": messages})
        self.messages = [*messages, {"role": "assistant", "content": turn.text}]
        self._tell(f"\n{turn}{self._why_none(turn)}")

    def _why_none(self, turn: ChatTurn) -> str:
        """Why nothing of a short conversation is cached."""
        if turn.cached or not turn.prompt_tokens:
            return ""
        if self._page_tokens is None:
            response = self._client.get("/get_server_info")
            self._page_tokens = 0 if response.is_error else int(response.json().get("page_size", 0))
        if turn.prompt_tokens >= self._page_tokens:
            return ""
        return f"\nwhole pages of {self._page_tokens} tokens are cached, and this is less than one"

    def _explain(self, _: str) -> None:
        if self.last is None:
            self._tell("nothing was answered yet")
            return
        response = self._client.get(f"/v1/cache/explain/{self.last.request_id}")
        _check(response)
        explained = response.json()
        stages = ", ".join(f"{name} {ms:.1f} ms" for name, ms in explained.get("stages_ms", {}).items())
        sparse = explained.get("sparse_pages", 0)
        far = f"; of {sparse} reused pages selected entries were read on the host" if sparse else ""
        self._tell(f"{explained['summary']}{far}\n{stages}")

    def _save(self, name: str) -> None:
        if not name:
            self._tell("/save needs the name of a file")
            return
        path = Path(name).expanduser()
        path.write_text(json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n")
        self._tell(f"{len(self.messages)} messages are in {path}")

    def _reset(self, _: str) -> None:
        self.messages, self.last = list(self._begun), None

    def _help(self, _: str) -> None:
        self._tell(HELP)

    def _tell(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/dim]")


def chat(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = URL,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the best token.", min=0)] = 0.0,
    api_key: ApiKey = None,
) -> None:
    """A small chat in the terminal: cached tokens and time to first token after each turn."""
    import httpx

    body = {"max_tokens": max_tokens, "temperature": temperature}
    with httpx.Client(base_url=address(url), headers=headers(api_key), timeout=600.0) as client:
        conversation = Conversation(client, body, system)
        for said in _lines():
            conversation.hear(said)
    if conversation.failed and not sys.stdin.isatty():
        raise typer.Exit(2)  # a script can not read the message


def _lines() -> Iterator[str]:
    """The user's lines, without empty ones."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip() == "/exit":
                return
            if line.strip():
                yield line.rstrip("\n")
        return
    typer.echo("/help lists commands")
    with _line_editing():
        while True:
            try:
                line = input("> ")
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                typer.echo()
                continue
            if line.strip() == "/exit":
                return
            if line.strip():
                yield line


@contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys, and the lines of earlier conversations. Python may be built without readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / "tiercel" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)


def _check(response: Any) -> None:
    """Raises an error with the server's own words."""
    import httpx

    if response.is_error:
        response.read()
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{response.status_code} {response.reason_phrase}"
        raise httpx.HTTPStatusError(message, request=response.request, response=response)


def _ask(client: Any, body: dict[str, Any]) -> ChatTurn:
    """Prints an answer while it arrives."""
    import httpx

    turn, start = ChatTurn(), time.perf_counter()
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        _check(response)
        turn.request_id = response.headers.get("x-request-id", "")
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
