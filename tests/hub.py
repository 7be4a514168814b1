"""A Hugging Face Hub on loopback, with models of ours. It answers what `huggingface_hub` asks for a download.

    GET  /api/models/OWNER/NAME[/revision/REVISION]     the commit and its files
    HEAD /OWNER/NAME/resolve/REVISION/FILE              a file's size and ETag; of a large one where it lies
    GET  /cdn/OWNER/NAME/COMMIT/FILE                    a large file, from any byte on

As there, who has no token is told 401 of a model that does not exist or is private, and may list a gated one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_ours"
LARGE = 4096
"""Files of more bytes lie elsewhere, and the Hub says where."""

Files = Mapping[str, bytes]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@dataclass
class Repository:
    open_to: str = "all"
    """`all`; `private`: who has the token; `gated`: all may list it, nobody may read it."""
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)
    """Sizes that are not true."""
    pushed: Files | None = None
    """What `main` becomes as soon as it was listed."""

    def commit(self, files: Files, *refs: str) -> str:
        """Returns the commit, which `refs` name from now on."""
        text = repr(sorted((name, sha1(data)) for name, data in files.items()))
        sha = sha1(text.encode())
        self.commits[sha] = files
        self.refs |= dict.fromkeys(refs, sha)
        return sha


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.elsewhere = f"http://localhost:{self.server_port}/cdn"
        """Another host, as there."""
        self.models: dict[str, Repository] = {}
        self.asked: list[str] = []
        """`GET path`, and the range if there is one."""
        self.breaks: dict[str, int] = {}
        """The connection ends after so many bytes of this file, once."""
        self.fails: set[str] = set()
        """Files that are answered with 500."""

    def add(self, name: str, files: Files, open_to: str = "all") -> Repository:
        self.models[name] = made = Repository(open_to)
        made.commit(files, "main")
        return made

    def asked_for(self, *words: str) -> list[str]:
        return [each for each in self.asked if all(word in each for word in words)]


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, args=[0.05])
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        told = {"X-Error-Code": code, "X-Error-Message": message}
        self.status, self.headers = status, {name: value for name, value in told.items() if value}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/api/agent-harnesses":  # is asked for where agents run
            self._answer(404, b"", {})
            return
        asked = self.command, unquote(path), self.headers.get("Range", "")
        self.server.asked.append(" ".join(asked).strip())
        try:
            if path.startswith("/api/models/"):
                self._list(path.removeprefix("/api/models/"))
            elif path.startswith("/cdn/"):
                _, _, owner, name, sha, file = path.split("/", 5)
                self._send(self.server.models[f"{owner}/{name}"].commits[sha][file], file, {})
            else:
                self._resolve(path[1:])
        except _Refused as no:
            self._answer(no.status, b"{}", no.headers)

    def _repository(self, name: str) -> Repository:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            raise _Refused(401, message="Invalid credentials in Authorization header")
        found = self.server.models.get(name)
        if found is None or (found.open_to == "private" and not token):
            if token:
                raise _Refused(404, "RepoNotFound", "Repository not found")
            raise _Refused(401, "RepoNotFound", "Invalid username or password.")
        return found

    def _commit(self, found: Repository, revision: str) -> str:
        sha = found.refs.get(revision, revision)
        if sha not in found.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def _list(self, path: str) -> None:
        name, _, revision = map(unquote, path.partition("/revision/"))
        found = self._repository(name)
        sha = self._commit(found, revision or "main")
        files = found.commits[sha].items()
        told = [{"rfilename": file, "size": found.claims.get(file, len(data))} for file, data in files]
        if found.pushed is not None:
            found.commit(found.pushed, "main")
        body = json.dumps({"id": name, "sha": sha, "siblings": told}).encode()
        self._answer(200, body, {"Content-Type": "application/json"})

    def _resolve(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = map(unquote, rest.partition("/"))  # a revision may have a slash
        found = self._repository(name)
        if found.open_to == "gated":
            raise _Refused(403, "GatedRepo", "Access to this model is restricted.")
        sha = self._commit(found, revision)
        if file not in found.commits[sha]:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        data, told = found.commits[sha][file], {"X-Repo-Commit": sha}
        if len(data) <= LARGE:
            self._send(data, file, told)
            return
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'}
        where = {"Location": f"{self.server.elsewhere}/{name}/{sha}/{file}"}
        self._answer(302, b"", told | linked | where)

    def _send(self, data: bytes, file: str, told: Mapping[str, str]) -> None:
        """A file, from the byte on that was asked for."""
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {**told, "ETag": f'"{sha1(data)}"'}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        breaks = None
        if self.command == "GET":
            breaks = self.server.breaks.pop(file, None)
            if file in self.server.fails:
                raise _Refused(500)
        self._answer(206 if first else 200, data[first:], headers, breaks)

    def _answer(
        self, status: int, body: bytes, headers: Mapping[str, str], breaks: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:breaks])
            self.close_connection = breaks is not None
