"""Bundle references: the names by which people and services refer to a bundle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from bundle.digest import PREFIX, is_digest
from bundle.errors import RefInvalid

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_VERSION: Final = re.compile(r"v([1-9][0-9]{0,8})")
_VERSION_LIKE: Final = re.compile(r"v[0-9]+")
_VERSION_ENDING: Final = re.compile(r".*-v[0-9]+")
_ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9._:/-]{1,128}")

ACCEPTED_REF: Final = "NAME, NAME:vN, NAME@ALIAS or sha256:HEX"
ACCEPTED_NAME: Final = (
    "1 to 128 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit; not 'sha256', and not ending in -vN, "
    "because NAME-vN is the tag of NAME:vN"
)
ACCEPTED_ALIAS: Final = (
    "1 to 128 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit; not of the form vN, and not ending in "
    "-vN, because NAME-vN is the tag of NAME:vN"
)
ACCEPTED_ADAPTER_NAME: Final = "1 to 128 letters, digits, '.', '_', '-', '/' and ':'"


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference: a digest; or a name with a version, an alias, or neither for the newest version.

    The name is None for a digest; `version` is N of `NAME:vN`, from 1, and `alias` is ALIAS of `NAME@ALIAS`.
    """

    name: str | None = None
    version: int | None = None
    alias: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        if self.digest is not None:
            return self.digest
        if self.version is not None:
            return f"{self.name}:v{self.version}"
        return f"{self.name}@{self.alias}" if self.alias is not None else str(self.name)

    @property
    def tag(self) -> str:
        """The tag of a version or alias, `NAME-vN` or `NAME-ALIAS`, because OCI allows neither ':' nor '@' in tags."""
        assert self.name is not None
        assert self.version is not None or self.alias is not None
        return f"{self.name}-v{self.version}" if self.version is not None else f"{self.name}-{self.alias}"


def parse_reference(text: str) -> Reference:
    """Reads `NAME`, `NAME:vN`, `NAME@ALIAS` or `sha256:HEX`."""
    if text.startswith(PREFIX):
        if not is_digest(text):
            raise RefInvalid(text, "sha256: followed by 64 lower-case hexadecimal digits")
        return Reference(digest=text)
    if "@" in text:
        name, _, alias = text.partition("@")
        if is_name(name) and is_alias(alias):
            return Reference(name=name, alias=alias)
    elif ":" in text:
        name, _, version = text.partition(":")
        match = _VERSION.fullmatch(version)
        if is_name(name) and match is not None:
            return Reference(name=name, version=int(match[1]))
    elif is_name(text):
        return Reference(name=text)
    raise RefInvalid(text, ACCEPTED_REF)


def list_aliases_of_tag(tag: str) -> tuple[Reference, ...]:
    """Lists the references to aliases, `NAME@ALIAS`, that would have a tag: there are several if it has several '-'."""
    splits = [(tag[:position], tag[position + 1 :]) for position, letter in enumerate(tag) if letter == "-"]
    return tuple(Reference(name=name, alias=alias) for name, alias in splits if is_name(name) and is_alias(alias))


def is_new_name(text: str) -> bool:
    """Whether a bundle may get this name. References take some more, since earlier releases gave them."""
    return is_name(text) and _VERSION_ENDING.fullmatch(text) is None


def is_new_alias(text: str) -> bool:
    """Whether a version may get this alias. References take some more, since earlier releases gave them."""
    return is_alias(text) and _VERSION_ENDING.fullmatch(text) is None


def is_name(text: str) -> bool:
    """Whether `text` is a bundle name. 'sha256' is not, so that no version looks like a digest."""
    return _NAME.fullmatch(text) is not None and text != PREFIX.removesuffix(":")


def is_alias(text: str) -> bool:
    """Whether `text` is an alias. Text that looks like a version is not."""
    return _NAME.fullmatch(text) is not None and _VERSION_LIKE.fullmatch(text) is None


def is_adapter_name(text: str) -> bool:
    """Whether requests can call an adapter so."""
    return _ADAPTER_NAME.fullmatch(text) is not None
