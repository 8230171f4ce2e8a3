"""Which URLs may name a checkpoint: the schemes that exist, and the prefixes that the operator accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from compiler_svc.remote.errors import ModelUrlRefused, ModelUrlUnsupported

_MARK: Final = "://"
#: Of a URL. Object stores allow keys of 1024 bytes.
_MAX_CHARACTERS: Final = 2048


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme of URLs: the package that fsspec imports for it, empty if fsspec has it itself, and the extra of it that
    `pip install` takes to get the package.
    """

    package: str = ""
    extra: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether its package is there."""
        return not self.package or find_spec(self.package) is not None


SCHEMES: Final[dict[str, Scheme]] = {
    "file": Scheme(),
    "memory": Scheme(),
    "hf": Scheme("huggingface_hub", "kiln-compiler[hf]"),
    "s3": Scheme("s3fs", "kiln-compiler[s3]"),
}


@dataclass(frozen=True, slots=True)
class UrlSettings:
    """What a compiler does with URLs.

    Attributes:
        prefixes: What URLs must lie below; none: the compiler takes no URL.
        directory: Where fetched checkpoints are kept; None if there are no prefixes.
        max_bytes: What all fetched checkpoints may take there; None for any number.
        outlines: Outlines that a plan may read, by URL.
    """

    prefixes: tuple[str, ...] = ()
    directory: Path | None = None
    max_bytes: int | None = None
    outlines: Mapping[str, Path] = field(default_factory=dict)


NO_URLS: Final = UrlSettings()


def is_url(model: str) -> bool:
    """Whether a request names its model by a URL instead of a path."""
    return _MARK in model


def check_url(url: str, prefixes: Sequence[str]) -> str:
    """Checks that a client may name a URL, and that this host can read it; returns the URL in the one form that
    prefixes, as `check_prefix` returns them, are compared with.
    """
    plain = _normalize(url)
    if plain is None or not any(plain == prefix or plain.startswith(_folder(prefix)) for prefix in prefixes):
        raise ModelUrlRefused(url, prefixes)
    _check_scheme(url)
    return plain


def check_prefix(prefix: str) -> str:
    """Checks a prefix that an operator accepts, such as `s3://bucket/models`; `hf://` accepts a whole scheme."""
    plain = _normalize(prefix)
    if plain is None:
        raise ValueError(prefix)
    try:
        _check_scheme(prefix)
    except ModelUrlUnsupported as error:
        raise ValueError(str(error)) from error
    return plain


def find_prefix(url: str, prefixes: Sequence[str]) -> str:
    """The longest prefix that accepts a URL which `check_url` has returned."""
    return max((one for one in prefixes if url == one or url.startswith(_folder(one))), key=len)


def _folder(prefix: str) -> str:
    return prefix if prefix.endswith("/") else f"{prefix}/"


def _normalize(url: str) -> str | None:
    """The URL without slashes at its end; None if programs might read another place from it."""
    is_plain = url.isprintable() and len(url) <= _MAX_CHARACTERS and not set(url) & set("?#\\ ")
    # fsspec reads several URLs from one with `::`, and file systems differ in what they decode.
    if not is_plain or "::" in url or unquote(url) != url:
        return None
    try:
        scheme, location = urlsplit(url).scheme, url.partition(_MARK)[2]
    except ValueError:
        return None
    location = location.rstrip("/")
    parts = location.removeprefix("/").split("/") if location else []
    leads_elsewhere = not {"", ".", ".."}.isdisjoint(parts) or (scheme == "file" and not location.startswith("/"))
    if not url.startswith(f"{scheme}{_MARK}") or leads_elsewhere:
        return None
    return f"{scheme}{_MARK}{location}"


def _check_scheme(url: str) -> None:
    scheme = SCHEMES.get(url.partition(_MARK)[0])
    if scheme is None:
        raise ModelUrlUnsupported(url, f"a URL with one of {', '.join(f'{name}{_MARK}' for name in SCHEMES)}")
    if not scheme.is_installed:
        raise ModelUrlUnsupported(
            url, f"a scheme whose package is installed: `pip install '{scheme.extra}'` on the compiler's host"
        )
