"""What each method of the compiler needs of its caller."""

from __future__ import annotations

from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from bundle.reference import parse_reference
from edge.access.principal import Scope
from edge.access.rules import ANY_SCOPE, Rules, name_methods, needs


def _read_moved_alias(request: Any) -> str:
    """Reads the alias that a SetAlias moves: `NAME@ALIAS` of a reference `NAME`, `NAME:vN` or `NAME@OTHER`."""
    # A digest has no name, so that of the alias is empty; the method refuses it.
    return f"{parse_reference(request.ref).name or ''}@{request.alias}"


def _read_alias(request: Any) -> str | None:
    return f"{request.name}@{request.alias}" if request.alias else None


def _read_named_bundle(request: Any) -> str:
    """Reads the name in the reference of a request; empty if it has none, since a digest has no name."""
    return (parse_reference(request.ref).name or "") if request.ref else ""


_NAME: Final = attrgetter("name")
_PLAN: Final = needs(Scope.COMPILE)
_PUBLISH: Final = needs(Scope.COMPILE, bundle=_NAME)
#: These act on operations of the caller, and with the scope admin on all.
_OPERATION: Final = needs(Scope.COMPILE, Scope.ADMIN)
_ADMIN: Final = needs(Scope.ADMIN)

RULES: Final[Rules] = MappingProxyType(
    {
        **name_methods(
            "kiln.compiler.v1.CompilerService",
            {
                "Compile": _PUBLISH,
                "PlanCompile": _PLAN,
                "ShardWeights": _PUBLISH,
                "ShardAdapter": _PUBLISH,
                # It makes a directory of the model roots, which are everybody's, and replaces none.
                "QuantizeWeights": _PLAN,
                "WatchCompile": _OPERATION,
            },
        ),
        **name_methods(
            "google.longrunning.Operations",
            {
                "GetOperation": _OPERATION,
                "ListOperations": _OPERATION,
                "WaitOperation": _OPERATION,
                "CancelOperation": _OPERATION,
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
                "ReadBlob": needs(Scope.LOAD, Scope.READ, bundle=_read_named_bundle),
                "LeaseBundle": needs(Scope.LOAD),
                "ReleaseLease": needs(Scope.LOAD),
                "SetAlias": needs(Scope.PROMOTE, alias=_read_moved_alias),
                "DeleteAlias": needs(Scope.PROMOTE, alias=_read_alias),
                "ImportBundle": needs(Scope.ADMIN, alias=_read_alias, bundle=_NAME),
                "DeleteBundle": needs(Scope.ADMIN, bundle=_read_named_bundle),
                "SetBundleOwner": needs(Scope.ADMIN, bundle=_NAME),
                "CollectGarbage": _ADMIN,
            },
        ),
    }
)
