"""Bearer tokens: where a client finds one, and the metadata that carries it with every call."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, TypeAlias

from kiln_client.errors import InvalidArgument, TokenUnusable
from kiln_client.stack.home import find_token_path

VARIABLE: Final = "KILN_TOKEN"
FILE_VARIABLE: Final = "KILN_TOKEN_FILE"

Metadata: TypeAlias = tuple[tuple[str, str], ...]

# RFC 6750, section 2.1: what a header carries.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
# gRPC's servers take 8 KiB of metadata unless they are told otherwise.
_MAX_FILE_BYTES = 8192


class FixedToken:
    """A token that a person or a variable gave."""

    def __init__(self, text: str, source: str) -> None:
        """Takes the text of a token, without the white space around it, and says in messages where it comes from."""
        self.source = source
        self._token = _parse_token(text, source)

    def read(self) -> str:
        """Returns the token."""
        return self._token


class TokenFile:
    """A token in a file, which is read again when the file has changed: tokens expire, and others renew them."""

    def __init__(self, path: Path, source: str) -> None:
        self.source = f"{source} ({path})"
        self._path = path
        self._version: tuple[int, ...] = ()
        self._token = ""

    def read(self) -> str:
        """Returns the token that the file holds now."""
        try:
            status = self._path.stat()
            # Of before the reading: if the file is replaced meanwhile, the next call reads it again.
            version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if version != self._version:
                with self._path.open("rb") as file:
                    data = file.read(_MAX_FILE_BYTES)
                self._token = _parse_token(data.decode(errors="replace"), self.source)
                self._version = version
        except OSError as error:
            raise TokenUnusable(self.source, error.strerror or str(error)) from error
        return self._token


class Authorization:
    """What one client tells its server about who calls."""

    def __init__(self, address: str, token: str | Path | None, *, is_private: bool, may_expose: bool) -> None:
        """Finds the token: the argument, KILN_TOKEN, KILN_TOKEN_FILE, in this order.

        If there is none of these, the first call looks for a home whose services listen at the address. The token of a
        home is not sent where others could read it.

        Args:
            token: The token, or the file that holds it; an empty text sends none, and None looks elsewhere.
            is_private: Whether only the server reads what is sent: over TLS, or on this host.
            may_expose: Whether the token may be sent all the same.
        """
        self._found = _find_given(token)
        if self._found is not None and not is_private and not may_expose:
            source = self._found.source
            accepted = (
                "TLS, a loopback address, or permission: --allow-plaintext-token, allow_plaintext_token in the SDK"
            )
            raise InvalidArgument.about(
                "token",
                f"{source} for {address}; accepted: {accepted}",
                f"the token of {source} would be sent to {address} in plaintext",
                reason="TOKEN_IN_PLAINTEXT",
                source=source,
                address=address,
            )
        self._address = address
        self._may_look = self._found is None and token is None and is_private

    def metadata(self) -> Metadata:
        """Returns the metadata of the next call; empty without a token."""
        if self._may_look:
            path = find_token_path(self._address)
            self._found = None if path is None else TokenFile(path, "the services' home")
            self._may_look = False
        return () if self._found is None else (("authorization", f"Bearer {self._found.read()}"),)


def _find_given(token: str | Path | None) -> FixedToken | TokenFile | None:
    if isinstance(token, Path):
        return TokenFile(token, "the given file")
    if token is not None:
        return FixedToken(token, "the argument") if token else None
    if text := os.environ.get(VARIABLE):
        return FixedToken(text, VARIABLE)
    if text := os.environ.get(FILE_VARIABLE):
        return TokenFile(Path(text), FILE_VARIABLE)
    return None


def _parse_token(text: str, source: str) -> str:
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise TokenUnusable(source, "it holds no token, which is one word of letters, digits and -._~+/=")
    return token
