"""Paths in JSON: the hooks with which msgspec writes and reads them as text."""

from __future__ import annotations

from pathlib import Path


def write_path(value: object) -> str:
    """Returns the text of a path, as msgspec's `enc_hook`; refuses anything else that JSON does not have."""
    if not isinstance(value, Path):
        raise NotImplementedError(f"{type(value).__name__} has no form in JSON")
    return str(value)


def read_path(kind: type, text: str) -> Path:
    """Reads a path from its text, as msgspec's `dec_hook`."""
    assert kind is Path, kind
    return Path(text)
