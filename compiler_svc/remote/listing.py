"""Lists the files of a remote directory that make a checkpoint, or an adapter."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, cast

import fsspec

from bundle.digest import canonical_json, sha256_bytes
from bundle.errors import KilnError
from bundle.host.shortage import name_shortage
from compiler_svc.adapters import config as adapters
from compiler_svc.remote.errors import ModelFetchFailed
from compiler_svc.remote.urls import find_prefix
from compiler_svc.weights.chat_templates import FOLDER, SUFFIX
from compiler_svc.weights.checkpoint import CONFIG_FILE, DESCRIBING_FILES, TOKENIZER_FILES, WEIGHT_FILES
from compiler_svc.weights.directory import MAX_TEXT_BYTES
from compiler_svc.weights.errors import CheckpointInvalid, CheckpointNotFound
from compiler_svc.weights.headers import is_plain_name

#: Entries of one remote directory.
_MAX_ENTRIES: Final = 10_000
_MAX_DETAIL_CHARACTERS: Final = 200
_KEY_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a remote checkpoint; `version` digests what the file system says of it, and changes with the file."""

    name: str
    path: str
    size_bytes: int
    version: str
    is_weights: bool


@dataclass(frozen=True)
class RemoteCheckpoint:
    """The files of a checkpoint that a URL names, as `check_url` returns it."""

    url: str
    file_system: Any
    files: Mapping[str, RemoteFile]

    @property
    def key(self) -> str:
        """Hexadecimal digits that name this state of the checkpoint: URL, names, sizes and versions."""
        files = {file.name: [file.size_bytes, file.version] for file in self.files.values()}
        return sha256_bytes(canonical_json({"url": self.url, "files": files})).removeprefix("sha256:")[:_KEY_DIGITS]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files.values())

    def open(self, file: RemoteFile) -> BinaryIO:
        """Opens a file for reading; use `naming_failures` around it."""
        return cast("BinaryIO", self.file_system.open(file.path, "rb"))


def list_checkpoint(url: str, prefixes: tuple[str, ...]) -> RemoteCheckpoint:
    """Lists a checkpoint's files, or an adapter's: of the weights, those that `Checkpoint.open`, or `open_adapter`,
    would read.
    """
    with naming_failures(url):
        file_system, path = fsspec.url_to_fs(url)
        try:
            entries = [_follow(file_system, entry) for entry in file_system.ls(path, detail=True)]
            templates = next((one["name"] for one in entries if _is_template_folder(one)), None)
            below = [] if templates is None else file_system.ls(templates, detail=True)
            entries_below = [_follow(file_system, entry) for entry in below]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFound(url, "no such directory", "a Hugging Face model directory") from error
    if (count := len(entries) + len(entries_below)) > _MAX_ENTRIES:
        raise CheckpointInvalid(url, ".", f"{count} entries", f"a directory of at most {_MAX_ENTRIES}")
    found = {name: entry for entry in entries if is_plain_name(name := _name(entry))}
    found |= {
        f"{FOLDER}/{name}": entry
        for entry in entries_below
        if is_plain_name(name := _name(entry)) and name.endswith(SUFFIX)
    }
    listed = {name: _describe(name, entry) for name, entry in found.items() if _size(entry) is not None}
    is_adapter = CONFIG_FILE not in listed and adapters.CONFIG_FILE in listed
    if not is_adapter and CONFIG_FILE not in listed:
        raise CheckpointNotFound(url, f"has no {CONFIG_FILE}", f"a directory with {CONFIG_FILE}")
    accepted = adapters.WEIGHT_FILES if is_adapter else WEIGHT_FILES
    weights = next((name for name in accepted if name in listed), None)
    if weights is None:
        raise CheckpointNotFound(url, "has no weights", f"a directory with one of {', '.join(accepted)}")
    chosen = {name: file for name, file in listed.items() if _is_small(name) or name == weights}
    if weights.endswith(".index.json"):
        index = _read_index(RemoteCheckpoint(url, file_system, listed), listed[weights])
        chosen |= {name: listed[name] for name in index if name in listed}
    for name, file in chosen.items():
        if not file.is_weights and file.size_bytes > MAX_TEXT_BYTES:
            raise CheckpointInvalid(url, name, f"{file.size_bytes} bytes", f"a file of at most {MAX_TEXT_BYTES} bytes")
        if url.startswith("file:"):
            _check_link(url, file, prefixes)
    return RemoteCheckpoint(url, file_system, dict(sorted(chosen.items())))


@contextmanager
def naming_failures(url: str) -> Iterator[None]:
    """Raises one named error in place of what a file system of fsspec may raise, which is anything."""
    try:
        yield
    except KilnError:
        raise
    except Exception as error:
        if (shortage := name_shortage(error)) is not None:
            raise shortage from error
        lines = str(error).splitlines() or [""]
        detail = f"{type(error).__name__}: {lines[0][:_MAX_DETAIL_CHARACTERS]}"
        raise ModelFetchFailed(url, detail) from error


def _follow(file_system: Any, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a link leads to, which listings of local directories leave open; the link itself if that is nothing."""
    if not entry.get("islink"):
        return entry
    try:
        followed: Mapping[str, Any] = file_system.info(entry["name"])
    except OSError:
        return entry
    return followed


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_template_folder(entry: Mapping[str, Any]) -> bool:
    return _name(entry) == FOLDER and entry.get("type") == "directory"


def _size(entry: Mapping[str, Any]) -> int | None:
    """The size of a file; None of anything else."""
    size = entry.get("size")
    return size if entry.get("type") == "file" and isinstance(size, int) else None


def _describe(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    version = sha256_bytes(repr(sorted((key, repr(value)) for key, value in entry.items())).encode())
    is_weights = name.endswith((".safetensors", ".bin"))
    return RemoteFile(name, str(entry["name"]), _size(entry) or 0, version, is_weights)


def _is_small(name: str) -> bool:
    is_describing = any(re.fullmatch(pattern, name, re.ASCII) for pattern, _ in DESCRIBING_FILES)
    return is_describing or name in (adapters.CONFIG_FILE, *TOKENIZER_FILES) or name.startswith(f"{FOLDER}/")


def _read_index(checkpoint: RemoteCheckpoint, index: RemoteFile) -> list[str]:
    """Names of the weight files of an index. What else is wrong with it is for `Checkpoint.open` to say."""
    if index.size_bytes > MAX_TEXT_BYTES:
        return []
    with naming_failures(checkpoint.url), checkpoint.open(index) as file:
        data = file.read(MAX_TEXT_BYTES)
    try:
        weight_map = json.loads(data).get("weight_map")
    except (ValueError, AttributeError, RecursionError):
        return []
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return [name for name in dict.fromkeys(filter(lambda one: isinstance(one, str), names)) if is_plain_name(name)]


def _check_link(url: str, file: RemoteFile, prefixes: tuple[str, ...]) -> None:
    """Refuses local files that symbolic links take from elsewhere, as model roots do."""
    root = os.path.realpath(find_prefix(url, prefixes).removeprefix("file://") or "/")
    real = os.path.realpath(file.path)
    if os.path.commonpath([root, real]) != root:
        raise CheckpointInvalid(url, file.name, "a link out of the accepted URLs", "a file below the accepted URL")
