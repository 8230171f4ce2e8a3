"""What each method of the compiler needs of its caller."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from bundle.reference import parse_reference
from edge.access.principal import Scope
from edge.access.rules import ANY_SCOPE, Rules, name_methods, needs


def _read_moved_alias(request: Any) -> str:
    """Reads the alias that a SetAlias moves: `NAME@ALIAS` of a reference `NAME`, `NAME:vN` or `NAME@OTHER`.

    Raises:
        RefInvalid: The reference is malformed.
    """
    # A digest has no name, so that of the alias is empty; the method refuses it.
    return f"{parse_reference(request.ref).name or ''}@{request.alias}"


def _read_alias(request: Any) -> str | None:
    """Reads the alias that a request names, if it names one."""
    return f"{request.name}@{request.alias}" if request.alias else None


_COMPILE: Final = needs(Scope.COMPILE)
_ADMIN: Final = needs(Scope.ADMIN)

RULES: Final[Rules] = MappingProxyType(
    {
        **name_methods(
            "kiln.compiler.v1.CompilerService",
            {"Compile": _COMPILE, "PlanCompile": _COMPILE, "ShardWeights": _COMPILE, "WatchCompile": _COMPILE},
        ),
        **name_methods(
            "google.longrunning.Operations",
            {
                "GetOperation": _COMPILE,
                "ListOperations": _COMPILE,
                "WaitOperation": _COMPILE,
                "CancelOperation": _COMPILE,
                "DeleteOperation": _ADMIN,
            },
        ),
        **name_methods(
            "kiln.bundle.v1.BundleService",
            {
                "GetBundle": ANY_SCOPE,
                "ListBundles": ANY_SCOPE,
                "ListAliases": ANY_SCOPE,
                "ListLeases": ANY_SCOPE,
                # Weights are worth more than their names. Runtimes have the scope load.
                "ReadBlob": needs(Scope.LOAD, Scope.COMPILE),
                "LeaseBundle": needs(Scope.LOAD),
                "ReleaseLease": needs(Scope.LOAD),
                "SetAlias": needs(Scope.PROMOTE, alias=_read_moved_alias),
                "DeleteAlias": needs(Scope.PROMOTE, alias=_read_alias),
                "ImportBundle": needs(Scope.ADMIN, alias=_read_alias),
                "DeleteBundle": _ADMIN,
                "CollectGarbage": _ADMIN,
            },
        ),
    }
)
