"""What the processes that a service starts inherit of its environment: one row for each kind of process.

The environment of a service is its operator's, and holds credentials. Bundles, checkpoints and prompts come from
strangers: a process that one of them has taken over should find no credentials there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

#: Kinds of processes. A forkserver, and what it forks, are of one kind: lowerings are forked from the one of builds.
Kind: TypeAlias = Literal["any", "text", "rank", "neuron interpreter", "plan", "build", "fetch"]

_ANY: Final = (
    *("PATH", "HOME", "TMPDIR"),
    # Who a process is, if the system's list of users does not know it: torch makes a directory's name of that.
    *("USER", "LOGNAME"),
    *("LANG", "LANGUAGE", "LC_*", "TZ"),
    # Python, and libraries and allocators that the operator keeps in places of their own.
    *("PYTHON*", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    "OMP_*",
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"),
)
#: With settings of libraries that compute, and of Neuron's driver and collectives.
_RANK: Final = (*_ANY, "GOMP_*", "KMP_*", "MKL_*", "TORCH*", "MALLOC_*", "NEURON_*", "FI_*")
_INTERPRETER: Final = (*_RANK, "XLA_*")
#: With the choice of the interpreter, which plans and lowerings start.
_PLAN: Final = (*_INTERPRETER, "KILN_COMPILER_NEURON_*")

#: Names of variables, and patterns of names, by kind.
INHERITED: Final[Mapping[Kind, tuple[str, ...]]] = MappingProxyType(
    {
        "any": _ANY,
        "text": _ANY,
        "rank": _RANK,
        "neuron interpreter": _INTERPRETER,
        "plan": _PLAN,
        "build": (*_PLAN, "CXX"),
        # Reads checkpoints from other hosts: it alone gets the credentials for them, and the ways to them.
        "fetch": (*_ANY, "HF_*", "AWS_*", "XDG_CACHE_HOME", "*_PROXY", "*_proxy"),
    }
)


def inherit(kind: Kind) -> dict[str, str]:
    """Returns the variables of this process that a kind of process inherits."""
    patterns = INHERITED[kind]
    return {
        name: value for name, value in os.environ.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
