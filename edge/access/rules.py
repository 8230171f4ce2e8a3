"""What each method needs of its caller. Services state the rows of their own methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from edge.access.principal import Scope

#: Reads a name from a request; None if the request names none.
ReadName = Callable[[Any], str | None]

#: Allowed calls that need one of these, and no other scope, are written to the audit log.
AUDITED: Final = frozenset({Scope.LOAD, Scope.PROMOTE, Scope.ADMIN})


@dataclass(frozen=True, slots=True)
class OwnRequests:
    """Requests that act only on what belongs to their caller: one of `scopes` is enough, in place of the method's."""

    description: str
    includes: Callable[[Any], bool]
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class Rule:
    """What one method needs of its caller: one of `scopes`, or no principal if that is empty.

    The principal's patterns must admit the deployment that the call uses, the alias that it moves, `NAME@ALIAS`, and
    the bundle name that it publishes, deletes or reads. The requests of `own` need other scopes.
    """

    scopes: frozenset[Scope]
    deployment: ReadName | None = None
    alias: ReadName | None = None
    bundle: ReadName | None = None
    own: OwnRequests | None = None

    @property
    def is_audited(self) -> bool:
        """Whether the audit log has a line for each call that is allowed, unless its request is one of `own`."""
        return bool(self.scopes) and self.scopes <= AUDITED

    @property
    def all_scopes(self) -> frozenset[Scope]:
        """Of these, some request of the method needs one."""
        return self.scopes if self.own is None else self.scopes | self.own.scopes

    def is_own(self, request: object) -> bool:
        """Whether a request is one of `own`."""
        return self.own is not None and self.own.includes(request)


Rules = Mapping[str, Rule]

#: The field by which requests name their deployment.
DEPLOYMENT_ID: Final[ReadName] = attrgetter("deployment_id")

#: A method that anyone may call.
OPEN: Final = Rule(frozenset())
#: A method that shows what every principal may know.
ANY_SCOPE: Final = Rule(frozenset(Scope))
#: A method without a row: closed to all but administrators.
UNLISTED: Final = Rule(frozenset({Scope.ADMIN}))

#: The methods that every server has: orchestrators ask for health, and tools for the API, without a token.
SERVER_RULES: Final[Rules] = MappingProxyType(
    {
        "/grpc.health.v1.Health/Check": OPEN,
        "/grpc.health.v1.Health/List": OPEN,
        "/grpc.health.v1.Health/Watch": OPEN,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPEN,
    }
)


def needs(
    *scopes: Scope, deployment: ReadName | None = None, alias: ReadName | None = None, bundle: ReadName | None = None
) -> Rule:
    """Returns the rule of a method that needs one of `scopes`."""
    return Rule(frozenset(scopes), deployment, alias, bundle)


def name_methods(service: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns the rules of a service by the full names of its methods, `/package.Service/Method`."""
    return {f"/{service}/{method}": rule for method, rule in rules.items()}
