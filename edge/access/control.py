"""Finds out who makes a call, and ends it unless they may make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Final

import structlog

from edge.access.certificates import CertificateIdentifier
from edge.access.config import AccessConfig
from edge.access.errors import (
    AccessError,
    AliasForbidden,
    BundleForbidden,
    DeploymentForbidden,
    ScopeMissing,
    TokenInvalid,
    TokenMissing,
)
from edge.access.key_source import KeySource, open_key_source
from edge.access.principal import ANONYMOUS, PRINCIPAL, Principal
from edge.access.quota import PrincipalQuota
from edge.access.rules import SERVER_RULES, UNLISTED, Rule, Rules
from edge.access.token_verifier import TokenVerifier
from edge.interceptor import Check, Context, Method, Surround, describe_call
from edge.supervision import Supervisor

#: The key of metadata that carries `Bearer TOKEN`.
TOKEN_KEY: Final = "authorization"
_SCHEME: Final = "bearer"
#: What of a refusal's metadata the audit log has, besides who and why.
_LOGGED: Final = frozenset({"scope", "deployment", "alias", "bundle"})
#: What gRPC says of a connection to a port with its credentials for local clients.
_CONNECTION_KEY: Final = "transport_security_type"
_LOCAL: Final = [b"local"]
#: When a principal that has too many streams may try again.
STREAM_RETRY_S: Final = 1.0

_log = structlog.get_logger("audit")


class AccessControl:
    """Authenticates each call before its request is decoded, and authorizes it once it is.

    Stands inside what renders errors and counts calls. The audit log gets one line for each refused call, and one for
    each allowed call that needs the scope load, promote or admin.
    """

    def __init__(
        self,
        config: AccessConfig,
        rules: Rules,
        *,
        is_required: bool,
        has_client_ca: bool,
        local_principal: Principal | None = None,
    ) -> None:
        """Reads no file yet; `start` does. If `is_required`, calls without a principal are refused.

        `local_principal` calls at the port with gRPC's credentials for local clients, if there is one.
        """
        #: Calls that were refused, by reason.
        self.refused: Counter[str] = Counter()
        self._rules = {**SERVER_RULES, **rules}
        self._is_required = is_required
        self._local_principal = local_principal
        self._streams = PrincipalQuota("streams", config.max_streams, retry_after_s=STREAM_RETRY_S)
        self._keys: KeySource | None = None
        self._tokens: TokenVerifier | None = None
        if config.jwks is not None:
            self._keys = open_key_source(config.jwks)
            self._tokens = TokenVerifier(
                self._keys, audience=config.audience, issuer=config.issuer, clock_skew_s=config.clock_skew_s
            )
        self._certificates: CertificateIdentifier | None = None
        if has_client_ca:
            # With tokens, certificates alone secure the connection, unless a file says whose they are.
            self._certificates = CertificateIdentifier(config.identities, accepts_all=config.jwks is None)
        accepted = [f"`{TOKEN_KEY}: Bearer JWT`"] if self._tokens is not None else []
        accepted += ["a client certificate that the server's identities list"] if config.identities is not None else []
        self._accepted = " or ".join(accepted) or "a client certificate"

    async def start(self, supervisor: Supervisor) -> None:
        """Reads keys and identities; the supervisor keeps them fresh."""
        if self._keys is not None:
            await self._keys.start(supervisor)
        if self._certificates is not None:
            await self._certificates.start()

    def surround(self, method: Method) -> Surround | None:
        """Checks the calls of a method that needs a principal."""
        rule = self._rules.get(method.name, UNLISTED)
        return partial(self._admit, method, rule) if rule.scopes else None

    @asynccontextmanager
    async def _admit(self, method: Method, rule: Rule, context: Context) -> AsyncIterator[Check]:
        # Known before anything can fail, so that the line of a refusal never lacks it.
        PRINCIPAL.set(ANONYMOUS)
        try:
            principal = await self._identify(context)
            PRINCIPAL.set(principal)
            describe_call(principal=principal.name)
            if not principal.scopes & rule.all_scopes:
                raise ScopeMissing(principal.name, rule.all_scopes)
            with self._streams.hold(principal) if method.is_stream else nullcontext():
                yield partial(_check_request, method.name, rule, context)
        except AccessError as error:
            self.refused[error.reason] += 1
            named = {key: value for key, value in error.metadata.items() if key in _LOGGED}
            _log.warning(
                "refused",
                principal=PRINCIPAL.get().name,
                method=method.name,
                peer=context.peer(),
                reason=error.reason,
                message=str(error),
                **named,
            )
            raise

    async def _identify(self, context: Context) -> Principal:
        connection = context.auth_context()
        if self._local_principal is not None and connection.get(_CONNECTION_KEY) == _LOCAL:
            return self._local_principal
        certified = None
        if self._certificates is not None:
            certified = await self._certificates.identify(connection)
        if self._tokens is not None:
            token = _find_token(context.invocation_metadata() or ())
            if token is not None:
                return await self._tokens.verify(token)
        if certified is not None:
            return certified
        if self._is_required:
            raise TokenMissing(self._accepted)
        return ANONYMOUS


def _find_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    values = [value for key, value in metadata if key == TOKEN_KEY]
    if not values:
        return None
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != _SCHEME or not token.strip():
        raise TokenInvalid(f"`{TOKEN_KEY}` is not one `Bearer JWT`")
    return token.strip()


def _check_request(method: str, rule: Rule, context: Context, request: object) -> None:
    """Checks a request against the principal's scopes, and the names in it against the principal's patterns."""
    principal = PRINCIPAL.get()
    is_own = rule.is_own(request)
    scopes = rule.own.scopes if rule.own is not None and is_own else rule.scopes
    if not principal.scopes & scopes:
        raise ScopeMissing(principal.name, scopes)
    names = {}
    for kind, read, may_use, refusal in (
        ("deployment", rule.deployment, principal.may_use, DeploymentForbidden),
        ("alias", rule.alias, principal.may_move, AliasForbidden),
        ("bundle", rule.bundle, principal.may_name, BundleForbidden),
    ):
        if read is not None and (name := read(request)) is not None:
            if not may_use(name):
                raise refusal(principal.name, name)
            names[kind] = name
    if rule.is_audited and not is_own:
        _log.info("allowed", principal=principal.name, method=method, peer=context.peer(), **names)
