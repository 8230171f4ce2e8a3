"""What the processes that this client starts inherit of its environment: one row for each kind of process.

`bundle/host/environment.py` says the same of the processes that services start. This distribution may be installed
alone, so the names that both tables give to every process stand here, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["compiler", "service", "issuer", "gateway"]

#: The row `any` of `bundle/host/environment.py`, which has the reasons.
ANY: Final = (
    *("PATH", "HOME", "TMPDIR"),
    *("USER", "LOGNAME"),
    *("LANG", "LANGUAGE", "LC_*", "TZ"),
    *("PYTHON*", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    "OMP_*",
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"),
)
#: Of the person who calls.
_TOKENS: Final = ("KILN_TOKEN", "KILN_TOKEN_FILE")
#: Of the Hub and of S3.
_REMOTE: Final = ("HF_*", "AWS_*")

#: By kind: patterns of the names that it inherits, and of those among them that it does not.
_INHERITED: Final[Mapping[Kind, tuple[tuple[str, ...], tuple[str, ...]]]] = MappingProxyType(
    {
        # Services take options from their environment. The compiler hands on what its fetches of checkpoints need.
        "compiler": (("*",), _TOKENS),
        "service": (("*",), (*_TOKENS, *_REMOTE)),
        "issuer": (ANY, ()),
        "gateway": ((*ANY, "SMG_*", "RUST_*"), ()),
    }
)


def inherit(kind: Kind) -> dict[str, str]:
    """Returns the variables of this process that a kind of process inherits."""
    names, but = _INHERITED[kind]
    return {name: value for name, value in os.environ.items() if _matches(name, names) and not _matches(name, but)}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
