"""Models of the Hugging Face Hub by name: `owner/name`, or `owner/name@revision`.

    name ──the Hub──→ commit ──→ config.json ──its family──→ small files ──→ weights
                                               or refused

`huggingface_hub` keeps the files in its cache, and reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
If the Hub can not be asked, the cache must have all that is needed. Weights are read as safetensors only, so
no other copy of them is fetched.

To run it, a name means one commit in one process: whoever opens a model twice opens the same one.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from tiercel.errors import ConfigError, TiercelError
from tiercel.models.files import CONFIG, INDEX, SINGLE, TEXT, TOKENIZER, read_json, weight_map
from tiercel.progress import progress

log = logging.getLogger(__name__)

NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?", re.ASCII)
FETCHES = 8
"""Files that are fetched at a time: one connection seldom fills a link."""

Check = Callable[[Mapping[str, Any]], object]
"""Raises if a `config.json` is of a model that can not be used."""


def is_hub_name(model: str) -> bool:
    """Whether a model is sought on the Hub. What is here under this name goes first."""
    return NAME.fullmatch(model) is not None and not Path(model).exists()


def parts_of(model: str) -> tuple[str, str | None]:
    """A name of the Hub without its revision, and the revision."""
    found = NAME.fullmatch(model)
    assert found is not None, "whoever asks has asked `is_hub_name`"
    return found[1], found[2]


class Snapshot(NamedTuple):
    """One commit of a model, as the cache of `huggingface_hub` has it."""

    model: str
    """As the user wrote it."""
    name: str
    folder: Path
    sizes: Mapping[str, int]
    """Bytes of each file of the commit. Empty if the Hub was not asked."""
    unasked: str
    """Why the Hub was not asked; empty: it was."""

    @property
    def commit(self) -> str:
        return self.folder.name

    def has(self, file: str) -> bool:
        """Whether the commit has this file, as far as that is known."""
        return (self.folder / file).exists() if self.unasked else file in self.sizes

    def without(self, file: str) -> ConfigError:
        """An error: the model can not be used, because this file is not there."""
        what = f"{SINGLE}, or {INDEX}" if file == INDEX else file
        why = f"is not whole in the cache, and {self.unasked}" if self.unasked else "can not be run"
        return ConfigError("model", self.model, f"{why}: there is no {what}")


def config_of(model: str) -> Snapshot:
    """What a name means, with `config.json` and nothing else fetched. If the Hub can not be asked, or has it
    no more: what the name last meant."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, revision = parts_of(model)
    listed = partial(HfApi().model_info, name, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    config_at = partial(hf_hub_download, name, CONFIG, revision=revision)
    with _in_words(model, "is no folder here, and "):
        try:
            told = listed(revision=revision)
        except (HTTPError, OSError) as error:
            try:
                folder = Path(config_at(local_files_only=True)).parent
            except LocalEntryNotFoundError:
                raise error from None
            unasked = why_not(error, name, revision)
            if not constants.HF_HUB_OFFLINE:
                log.warning("%s is taken from the cache: %s", model, unasked)
            return Snapshot(model, name, folder, {}, unasked)
        folder = Path(config_at(tqdm_class=_bar_for(lambda _: None))).parent
        if folder.name != told.sha:  # the branch has just moved on
            told = listed(revision=folder.name)
    sizes = {each.rfilename: each.size or 0 for each in told.siblings or ()}
    return Snapshot(model, name, folder, sizes, "")


@cache
def snapshot_of(model: str, check: Check) -> Snapshot:
    """A model with all files that are needed to run it. Nothing is fetched that `check` refuses."""
    found = config_of(model)
    check(read_json(found.folder / CONFIG))
    weights = SINGLE if found.has(SINGLE) else INDEX  # as `Checkpoint` chooses
    with _in_words(model):
        _fetch(found, {TOKENIZER, weights, *filter(found.has, TEXT)})
        if weights == INDEX:
            _fetch(found, set(weight_map(found.folder / INDEX).values()))
    return found


def _fetch(found: Snapshot, files: Iterable[str]) -> None:
    """Fetch those of the files that the cache does not have, if the commit has all of them."""
    from huggingface_hub import hf_hub_download

    if lost := sorted(file for file in files if not found.has(file)):
        raise found.without(lost[0])
    absent = sorted(file for file in files if not (found.folder / file).exists())
    if not absent:
        return
    size = sum(found.sizes.get(file, 0) for file in absent)
    free = shutil.disk_usage(found.folder).free
    if size > free:
        why = f"takes {size / 1e9:.2f} GB more, and {found.folder} has {free / 1e9:.2f} GB free"
        raise ConfigError("model", found.model, f"{why} (HF_HOME names another place)")
    given_up = Event()
    with progress(f"{found.name} from the Hub", size) as done, ThreadPoolExecutor(FETCHES) as threads:
        bar = _bar_for(done, given_up)

        def fetch(file: str) -> None:
            hf_hub_download(found.name, file, revision=found.commit, tqdm_class=bar)

        fetches = [threads.submit(fetch, file) for file in absent]
        try:
            for each in as_completed(fetches):
                each.result()
        except BaseException:  # Ctrl-C too: else the others would first be fetched to their ends
            given_up.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _bar_for(done: Callable[[int], None], given_up: Event | None = None) -> type:
    """A progress bar as `huggingface_hub` knows them, which shows nothing and calls `done`. `given_up` ends a
    fetch at its next piece."""

    class Bar:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.update(initial)

        def update(self, size: float | None = 1) -> None:
            if given_up is not None and given_up.is_set():
                raise InterruptedError("another file could not be fetched")
            done(int(size or 0))

        def nothing(self, *_: object, **__: object) -> None:
            pass

        # Of files in pieces (Xet) it also tells what comes over the network: that is less, and is not shown.
        update_transfer = set_postfix_str = set_transfer_postfix_str = refresh = close = nothing

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Bar


@contextmanager
def _in_words(model: str, begun: str = "") -> Iterator[None]:
    """Errors of `huggingface_hub` as errors of ours, which say what to do. `begun`: how each begins."""
    from httpx import HTTPError
    from huggingface_hub.errors import EntryNotFoundError

    try:
        yield
    except TiercelError:
        raise
    except (HTTPError, OSError, ValueError, EntryNotFoundError) as error:
        why = " ".join(why_not(error, *parts_of(model)).split())
        raise ConfigError("model", model, begun + why) from error


def why_not(error: Exception, name: str, revision: str | None) -> str:
    """Why a model of the Hub could not be had."""
    from httpx import HTTPError
    from huggingface_hub import constants, errors

    hub, cache_folder = constants.ENDPOINT, constants.HF_HUB_CACHE
    match error:
        case errors.LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
            return why_not(error.__cause__, name, revision)
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so nothing is fetched"
        case errors.HFValidationError():
            return f"no name of the Hub: {error}"
        case errors.HfHubHTTPError():
            return _refused(error, name, revision)
        case HTTPError():
            return f"{hub} can not be reached: {error or type(error).__name__}"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"{cache_folder} is full (HF_HOME names another place)"
        case ValueError():
            return f"{hub} does not answer as a Hub does: {error}"
        case _:
            return f"it can not be fetched into {cache_folder}: {error}"


def _refused(error: Any, name: str, revision: str | None) -> str:
    """Why the Hub refuses it: an `HfHubHTTPError` in other words."""
    from huggingface_hub import constants, errors, get_token

    hub, status = constants.ENDPOINT, error.response.status_code
    match error:
        case errors.GatedRepoError():
            terms = f"accept its terms at {hub}/{name}"
            return f"{hub} gives it to those who ask: {terms}, and set HF_TOKEN to a token of your account"
        case errors.RepositoryNotFoundError():
            return f"{hub} has no such model; if it is private, set HF_TOKEN to a token that may read it"
        case errors.RevisionNotFoundError():
            return f"{hub}/{name} has no branch, tag or commit {revision!r}"
        case errors.EntryNotFoundError():
            return f"{hub}/{name} has no {CONFIG}"
        case _ if status == 401 and get_token() is not None:
            return f"{hub} knows no such token: HF_TOKEN, or what `hf auth login` has stored"
        case _:
            return f"{hub} answered {status}: {error.server_message or error.response.reason_phrase}"
