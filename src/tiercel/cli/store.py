"""`tiercel store`: list, check, compact and clear a store; test your own store class.

`stat`, `ls` and `check` open the store for reading, so a server may use it meanwhile. torch is never loaded.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import islice
from typing import Annotated, Any

import typer

from tiercel.errors import ConfigError, StoreError
from tiercel.storage.base import Store
from tiercel.storage.record import VERSION, RecordKey, form_of, is_older, kind_of, page_key_of

app = typer.Typer(no_args_is_help=True, help="Look into a store, check it, compact it, clear it.")

Url = Annotated[str, typer.Argument(metavar="URL", help="Such as file:///path or redis://host:6379.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def stat(url: Url, as_json: AsJson = False) -> None:
    """The store's own statistics, and how much of it is of older formats and no longer read. A page is
    stored as several records."""
    with _open(url, read_only=True) as store:
        older = _older(store)
        of_older = (None, None) if older is None else (len(older), sum(older.values()))
        numbers = store.stats() | dict(zip(("records_older", "bytes_older"), of_older, strict=True))
    if as_json:
        typer.echo(json.dumps(numbers, indent=2, default=str))
        return
    width = max(map(len, numbers), default=0)
    for name, value in numbers.items():
        typer.echo(f"{name:{width}}  {_shown(value)}")


@app.command()
def ls(
    url: Url,
    limit: Annotated[int | None, typer.Option(help="At most this many records.", min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """List every record: kind, form, page key, bytes. The order is not defined. `page, v2` is a page of the
    older format version 2."""
    with _open(url, read_only=True) as store:
        entries = (_entry(key) | {"bytes": size} for key, size in islice(store.keys(), limit))
        if as_json:
            typer.echo(json.dumps(list(entries), indent=2))
        else:
            for entry in entries:
                typer.echo(f"{_line(entry)}  {entry['bytes']:>13,}")


@app.command()
def check(url: Url, as_json: AsJson = False) -> None:
    """Read every record and verify every byte. Exit code 1: bad records, which are listed."""
    with _open(url, read_only=True) as store:
        records, found = store.check()
    bad = [_entry(key) | {"flaw": flaw.name, "why": flaw.value} for key, flaw in found]
    if as_json:
        typer.echo(json.dumps({"records": records, "bad": bad}, indent=2))
    else:
        for each in bad:
            typer.echo(f"{_line(each)}  {each['why']}")
        typer.echo(f"{records:,} records, {len(bad):,} of them bad")
    if bad:
        raise typer.Exit(1)


@app.command()
def compact(url: Url, as_json: AsJson = False) -> None:
    """Remove records of older formats, and free the space of all that is removed. No server may use the
    store."""
    with _open(url, read_only=False) as store:
        older = store.delete(list(_older(store) or {}))
        given = store.compact()
    told = (f"{older:,} records of older formats removed, " if older else "") + f"{given:,} B given back"
    typer.echo(json.dumps({"bytes": given, "records_older": older}) if as_json else told)


@app.command()
def clear(
    url: Url,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove every record. What others keep in the same database stays. The file store of a running server is
    cleared by its own call, POST /v1/cache/store/clear."""
    from tiercel.storage.open import shown

    if not yes and not sys.stdin.isatty():
        raise ConfigError("--yes", "not given", "there is no terminal to ask whether all records may go")
    with _open(url, read_only=False) as store:
        records, size = _count(store)
        told = "all records" if records is None else f"{records:,} records, {size:,} B"
        if not yes:
            typer.confirm(f"Remove {told} from {shown(url)}?", abort=True, err=True)
        store.clear()
    typer.echo(json.dumps({"records": records, "bytes": size}) if as_json else f"removed: {told}")


@app.command()
def conformance(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Such as module:Class?option=value, or any other store. It must be empty."
        ),
    ],
    durable: Annotated[
        bool, typer.Option("--durable", help="Check that records are still there after reopening.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Test a store against the contract of tiercel.storage.base, also with pages of other engines in it
    (tiercel.integrations.named_pages). Exit code 1: a check failed."""
    from tiercel.integrations.conformance import CHECKS as OF_PAGES
    from tiercel.storage.conformance import Verdict, run_checks
    from tiercel.storage.conformance.checks import CHECKS
    from tiercel.storage.conformance.samples import Subject

    _check_empty(url)
    make = partial(_open, url, read_only=False)
    subject = Subject(open=lambda: _emptied(make()), open_again=make if durable else None)
    results = []
    for each in CHECKS + OF_PAGES:
        results += run_checks(subject, [each])
        if not as_json:
            typer.echo(str(results[-1]))
    if as_json:
        rows = [{"check": r.check, "outcome": r.outcome.value.lower(), "why": r.why} for r in results]
        typer.echo(json.dumps(rows, indent=2))
    if any(result.outcome is Verdict.FAILED for result in results):
        raise typer.Exit(1)


def _open(url: str, *, read_only: bool) -> Store:
    from tiercel.storage.open import open_store

    return open_store(url, read_only=read_only)


def _older(store: Store) -> dict[RecordKey, int] | None:
    """The records of older formats, and their sizes. None: the store can not list what it holds."""
    try:
        listed = store.keys()
        return {key: size for key, size in listed if is_older(key)}
    except StoreError:
        return None


def _count(store: Store) -> tuple[int, int] | tuple[None, None]:
    """The records of a store and their bytes. None: the store can not list what it holds."""
    try:
        sizes = list(dict(store.keys()).values())
    except StoreError:
        return None, None
    return len(sizes), sum(sizes)


def _entry(key: RecordKey) -> dict[str, Any]:
    """A record for output: the kind's name, form and page key in hexadecimal digits."""
    known = kind_of(key)
    name = known[0].name.lower() if known else f"kind {key[0]}"
    if known and known[1] != VERSION:
        name += f", v{known[1]}"
    return {"kind": name, "form": form_of(key).hex(), "key": page_key_of(key).hex()}


def _line(entry: dict[str, Any]) -> str:
    return f"{entry['kind']:13} {entry['form']}  {entry['key']}"


def _shown(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _check_empty(url: str) -> None:
    """Refuses a store that can not be opened, or that has records: the checks would remove them."""
    from tiercel.storage.open import shown

    with _open(url, read_only=False) as store:
        records = store.stats()["records"]
    if records:
        raise ConfigError("store", shown(url), f"holds {records:,} records; the checks would remove them")


def _emptied(store: Store) -> Store:
    store.clear()
    return store
