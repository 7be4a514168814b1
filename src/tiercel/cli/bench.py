"""`tiercel bench`: a load on a running server, measured from outside."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli.calling import URL, ApiKey, address, headers
from tiercel.cli.options import PIPE_WIDTH
from tiercel.errors import ConfigError
from tiercel.progress import progress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from tiercel.bench.client import Client
    from tiercel.bench.load import Conversation
    from tiercel.bench.report import Report
    from tiercel.bench.run import Run
    from tiercel.bench.sending import Form
    from tiercel.replay.report import Times

CONVERSATIONS, TURNS, CONCURRENCY = 16, 4, 4
PROMPT_TOKENS, ANSWER_TOKENS = "256", "32"
CLIENT_LATE_S = 0.005
"""A client that is later than this once in a hundred times is told to be no good clock."""

Url = Annotated[str, typer.Argument(help="The server, with or without /v1.")]
Model = Annotated[str | None, typer.Option(help="The model's name. Default: the first one of /v1/models.")]
Send = Annotated[
    str, typer.Option(help="How prompts are written: ids (their length is exact), text, or chat.")
]
Conversations = Annotated[int | None, typer.Option(help=f"Default: {CONVERSATIONS}.", min=1)]
Turns = Annotated[int | None, typer.Option(help=f"Of each conversation. Default: {TURNS}.", min=1)]
Concurrency = Annotated[
    int | None,
    typer.Option(help=f"Requests at the same time. Default: {CONCURRENCY}; with a trace: no limit.", min=1),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt-tokens", help=f"Of the message of a turn: 512, or 200-800. Default: {PROMPT_TOKENS}."
    ),
]
Answer = Annotated[
    str | None, typer.Option("--answer-tokens", help=f"The same for answers. Default: {ANSWER_TOKENS}.")
]
Shared = Annotated[
    int | None, typer.Option("--shared-tokens", help="What all conversations begin with. Default: 0.", min=0)
]
Traces = Annotated[list[str] | None, typer.Option("--trace", help="Recorded traffic: docs/replay.md.")]
Speed = Annotated[float | None, typer.Option(help="How many times as fast as recorded; inf: all at once.")]
Limit = Annotated[int | None, typer.Option("--requests", help="Only the first ones of a trace.", min=1)]
Seed = Annotated[int, typer.Option(help="Two runs with one seed send the same.", min=0)]
Plain = Annotated[
    bool, typer.Option("--plain", help="Send only OpenAI's own fields. Answers may then end early.")
]
Flush = Annotated[
    bool, typer.Option("--flush", help="First empty the cache, but not the store (an admin call).")
]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="All figures; - is stdout.")]
Plot = Annotated[str | None, typer.Option("--plot", help="Draw a picture: out.svg, out.png, …")]


def bench(  # noqa: PLR0913
    url: Url = URL,
    conversations: Conversations = None,
    turns: Turns = None,
    prompt_tokens: Prompt = None,
    answer_tokens: Answer = None,
    shared_tokens: Shared = None,
    concurrency: Concurrency = None,
    trace: Traces = None,
    speed: Speed = None,
    requests: Limit = None,
    send: Send = "ids",
    model: Model = None,
    seed: Seed = 0,
    plain: Plain = False,
    flush: Flush = False,
    api_key: ApiKey = None,
    as_json: Json = None,
    plot: Plot = None,
) -> None:
    """A load on a running server of OpenAI's API: times, rates, hits by tier. Exit code 1: nothing was
    answered."""
    from tiercel.bench.client import connected
    from tiercel.bench.report import Report, rows_of

    form = _form(send)
    _check_files(as_json, plot)
    shape = {
        "--conversations": conversations,
        "--turns": turns,
        "--prompt-tokens": prompt_tokens,
        "--answer-tokens": answer_tokens,
        "--shared-tokens": shared_tokens,
    }
    asked = _recorded(trace, shape, speed, requests, seed) if trace else _made(shape, speed, requests, seed)
    server = connected(address(url), headers(api_key), model=model, plain=plain)
    concurrency = concurrency if trace else concurrency or CONCURRENCY
    run = asyncio.run(_run(server, asked, form, concurrency, timed=bool(trace), flush=flush))
    report = Report.of(run, [[turn.answer.tokens for turn in each.turns] for each in asked])
    if as_json is not None:
        _write(as_json, {"url": address(url), **report.as_dict(), "rows": rows_of(run.measured)})
    if as_json != "-":
        show(report)
    if plot is not None:
        from tiercel.bench.plot import plot_run

        plot_run(run.measured, plot)
    if not report.answered:
        raise typer.Exit(1)


async def _run(
    server: AbstractAsyncContextManager[Client],
    asked: Sequence[Conversation],
    form: Form,
    concurrency: int | None,
    *,
    timed: bool,
    flush: bool,
) -> Run:
    from tiercel.bench.run import run

    async with server as client:
        if flush:
            await client.flush()
        with progress("bench", sum(len(each.turns) for each in asked), counted="requests") as done:
            return await run(client, asked, form, concurrency=concurrency, timed=timed, done=done)


def _form(send: str) -> Form:
    from tiercel.bench.sending import Form

    try:
        return Form(send)
    except ValueError as error:
        raise ConfigError("--send", send, f"must be one of {', '.join(f.value for f in Form)}") from error


def _made(shape: dict[str, Any], speed: float | None, requests: int | None, seed: int) -> list[Conversation]:
    from tiercel.bench.load import Shape, Span, make_conversations

    for option, value in (("--speed", speed), ("--requests", requests)):
        if value is not None:
            raise ConfigError(option, value, "is for a trace (--trace)")
    return make_conversations(
        Shape(
            shape["--conversations"] or CONVERSATIONS,
            shape["--turns"] or TURNS,
            Span.parse("--prompt-tokens", shape["--prompt-tokens"] or PROMPT_TOKENS),
            Span.parse("--answer-tokens", shape["--answer-tokens"] or ANSWER_TOKENS),
            shape["--shared-tokens"] or 0,
            seed,
        )
    )


def _recorded(
    files: list[str], shape: dict[str, Any], speed: float | None, requests: int | None, seed: int
) -> list[Conversation]:
    from tiercel.bench.load import read_conversations

    for option, value in shape.items():
        if value is not None:
            raise ConfigError(option, value, "a trace has requests and lengths of its own")
    if speed is not None and not speed > 0:
        raise ConfigError("--speed", speed, "must be above 0")
    return read_conversations(files, seed=seed, speed=1.0 if speed is None else speed, requests=requests)


def _check_files(as_json: str | None, plot: str | None) -> None:
    if as_json not in (None, "-") and not Path(str(as_json)).parent.is_dir():
        raise ConfigError("--json", as_json, "its folder does not exist")
    if plot is not None:
        from tiercel.replay.figure import check_plot

        check_plot(plot)


def _write(file: str, figures: dict[str, Any]) -> None:
    text = json.dumps(figures, indent=2)
    if file == "-":
        typer.echo(text)
        return
    try:
        Path(file).write_text(text + "\n")
    except OSError as error:
        raise ConfigError("--json", file, f"can not be written: {error}") from error


def show(report: Report) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    ended = ", then it was interrupted" if report.interrupted else ""
    counts = f"{report.answered:,} of {report.requests:,} requests answered in {report.seconds:,.1f} s{ended}"
    table = _table("milliseconds", "mean", "p50", "p90", "p99")
    for name, times in (
        ("time to first token", report.ttft),
        ("between two tokens", report.itl),
        ("for each token, by answer", report.tpot),
        ("whole answer", report.e2e),
        ("begun too late", report.late),
    ):
        if times is not None:
            table.add_row(name, *_ms(times))
    headings = "mean", "p50", "p90", "p99", "requests", "prompt tokens", "share", "tokens/s"
    sources = _table("first token, by slowest source", *headings)
    for name, source in report.sources.items():
        share = f"{source.tokens / max(1, report.prompt_tokens):.1%}"
        tokens = f"{source.tokens:,}", share, f"{source.tokens_s:,.0f}"
        sources.add_row(name, *_ms(source.ttft), f"{source.requests:,}", *tokens)
    console.print(counts)
    if report.answered:
        console.print(table)
        console.print(sources)
        rates = f"{report.requests_s:,.2f} requests/s, {report.prompt_tokens_s:,.0f} prompt tokens/s, "
        rates += f"{report.answer_tokens_s:,.0f} answer tokens/s"
        console.print(f"{rates}; {report.hit_ratio:.1%} of the prompts' tokens reused")
    for note in _notes(report):
        console.print(note, markup=False)


def _notes(report: Report) -> list[str]:
    notes = [f"{count:,} requests ended with {kind}" for kind, count in report.errors.items()]
    notes += [f"{report.unasked:,} requests were not sent"] if report.unasked else []
    notes += [f"{report.short:,} answers were shorter than asked for"] if report.short else []
    if report.client_late is not None and report.client_late.p99_s > CLIENT_LATE_S:
        late = f"{1e3 * report.client_late.p50_s:,.1f} ms (99 %: {1e3 * report.client_late.p99_s:,.1f})"
        notes.append(
            f"this client was itself late by {late}: the machine is busy, or the load is too much for it"
        )
    return notes


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right" if table.columns else "left")
    return table


def _ms(times: Times | None) -> tuple[str, ...]:
    if times is None:
        return ("",) * 4
    return tuple(f"{1e3 * each:,.1f}" for each in (times.mean_s, times.p50_s, times.p90_s, times.p99_s))
