"""A server on loopback that speaks the part of the Hugging Face Hub's protocol by which models are downloaded."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """What the server has, and what it was asked for.

    Attributes:
        url: Value for `HF_ENDPOINT`.
        models: Folder of the files of each model, by id and revision.
        token: Token that every model needs; None lets all read.
        fails_after: Bytes after which the connection of a longer answer breaks; None breaks none.
        requests: Method, path and `Range` of each request.
    """

    url: str
    models: dict[tuple[str, str], Path] = field(default_factory=dict)
    token: str | None = None
    fails_after: int | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def add(self, repo_id: str, folder: Path, revision: str = "main") -> str:
        """Adds one revision of a model; returns its commit."""
        commit = commit_of(folder)
        self.models[repo_id, revision] = self.models[repo_id, commit] = folder
        return commit

    def downloads(self) -> list[str]:
        """Names of the files whose bytes were sent, in order."""
        return [path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


def commit_of(folder: Path) -> str:
    """A commit for the files of a folder."""
    hashed = hashlib.sha1(usedforsecurity=False)
    for file in sorted(folder.iterdir()):
        hashed.update(file.name.encode() + file.read_bytes())
    return hashed.hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Runs a server while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers["Range"]))
        if self.hub.token is not None and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            self._refuse(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._describe(match[1], match[2] or "revision", match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._send_file(match[1], match[2], match[3])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")

    def _describe(self, repo_id: str, kind: str, revision: str) -> None:
        folder = self._find(repo_id, revision)
        if folder is None:
            return
        files = sorted(folder.iterdir())
        if kind == "tree":
            record: object = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)} for file in files
            ]
        else:
            siblings = [{"rfilename": file.name} for file in files]
            record = {"id": repo_id, "sha": commit_of(folder), "siblings": siblings, "private": False}
        self._send(HTTPStatus.OK, json.dumps(record).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repo_id: str, revision: str, name: str) -> None:
        folder = self._find(repo_id, revision)
        if folder is None:
            return
        file = folder / name
        content = file.read_bytes()
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": commit_of(folder), "Accept-Ranges": "bytes"}
        status = HTTPStatus.OK
        if wanted := re.fullmatch(r"bytes=([0-9]+)-", self.headers["Range"] or ""):
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], HTTPStatus.PARTIAL_CONTENT
        self._send(status, content, headers)

    def _find(self, repo_id: str, revision: str) -> Path | None:
        folder = self.hub.models.get((repo_id, revision))
        if folder is None:
            is_known = any(known == repo_id for known, _ in self.hub.models)
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound" if is_known else "RepoNotFound")
        return folder

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: HTTPStatus, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.hub.fails_after
        if limit is not None and len(content) > limit:
            self.wfile.write(content[:limit])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(content)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
