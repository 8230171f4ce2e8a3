"""Who makes a call, and what they may do."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

#: Characters of a token's subject.
MAX_NAME_CHARACTERS: Final = 256


class Scope(StrEnum):
    """A kind of action. None contains another one."""

    INFER = "infer"
    LOAD = "load"
    COMPILE = "compile"
    READ = "read"
    PROMOTE = "promote"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a call: a person or a program.

    Attributes:
        name: The token's subject, or the name in the certificate behind its kind, such as `dns:gateway`.
        deployments: Patterns (`fnmatch`) of the deployments that the principal may use; None for all.
        aliases: Patterns of the aliases, `NAME@ALIAS`, that the principal may move; None for all.
        bundles: Patterns of the bundle names that the principal may publish, delete and read, also names of others;
            None to publish under new names and its own, and to delete and read all.
        is_known: Whether a token or a certificate named the principal.
        key: What belongs to principals is filed under it; empty for all that no token or certificate names.
    """

    name: str
    scopes: frozenset[Scope]
    deployments: tuple[str, ...] | None = None
    aliases: tuple[str, ...] | None = None
    bundles: tuple[str, ...] | None = None
    is_known: bool = True
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Stores what each Generate asks for."""
        object.__setattr__(self, "key", self.name if self.is_known else "")

    @property
    def reach(self) -> str | None:
        """Whose things the principal sees and ends: its own, by key, or with the scope admin everyone's, None."""
        return None if Scope.ADMIN in self.scopes else self.key

    def may_use(self, deployment_id: str) -> bool:
        """Whether a pattern admits the deployment."""
        return _matches(deployment_id, self.deployments)

    def may_move(self, alias: str) -> bool:
        """Whether a pattern admits the alias, `NAME@ALIAS`."""
        return _matches(alias, self.aliases)

    def may_name(self, bundle: str) -> bool:
        """Whether a pattern admits the bundle name."""
        return _matches(bundle, self.bundles)


#: Who calls a server that asks for no token.
ANONYMOUS: Final = Principal("anonymous", frozenset(Scope), is_known=False)

#: The principal of the running call.
PRINCIPAL: Final[ContextVar[Principal]] = ContextVar("principal", default=ANONYMOUS)


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)
