"""Finds out who makes a call, and ends it unless they may make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Final, TypeVar

import grpc
import structlog

from edge.access.certificates import CertificateIdentifier
from edge.access.config import AccessConfig
from edge.access.errors import (
    AccessError,
    AliasForbidden,
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
from edge.access_log import describe_call
from edge.request_limit import RequestLimit
from edge.rpc_handlers import Context, wrap_handler

#: The key of metadata that carries `Bearer TOKEN`.
TOKEN_KEY: Final = "authorization"
_SCHEME: Final = "bearer"
#: What gRPC says of a connection to a port with its credentials for local clients.
_CONNECTION_KEY: Final = "transport_security_type"
_LOCAL: Final = [b"local"]
#: When a principal that has too many streams may try again.
STREAM_RETRY_S: Final = 1.0

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_log = structlog.get_logger("audit")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates each call before its request is decoded, and authorizes it once it is.

    Stands innermost, because it reads decoded requests, and so inside what renders errors and counts calls. The audit
    log gets one line for each refused call, and one for each allowed call that needs the scope load, promote or admin.
    """

    def __init__(
        self,
        config: AccessConfig,
        rules: Rules,
        *,
        is_required: bool,
        has_client_ca: bool,
        local_principal: Principal | None = None,
        request_limit: Callable[[], RequestLimit] | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        """Reads no file yet; `start` does.

        Args:
            config: How clients are told apart.
            rules: What the methods of the services need.
            is_required: Whether calls without a principal are refused.
            has_client_ca: Whether clients show certificates.
            local_principal: Who calls at the port with gRPC's credentials for local clients, if there is one.
            request_limit: See `wrap_handler`.
            stall_timeout_s: See `wrap_handler`.
        """
        #: Calls that were refused, by reason.
        self.refused: Counter[str] = Counter()
        self._rules = {**SERVER_RULES, **rules}
        self._is_required = is_required
        self._local_principal = local_principal
        self._request_limit = request_limit
        self._stall_timeout_s = stall_timeout_s
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

    async def start(self) -> None:
        """Reads keys and identities.

        Raises:
            KeySetInvalid, IdentitiesInvalid: A file cannot be read, or is invalid.
        """
        if self._keys is not None:
            await self._keys.start()
        if self._certificates is not None:
            await self._certificates.start()

    async def close(self) -> None:
        """Ends what `start` began."""
        if self._keys is not None:
            await self._keys.close()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        """Wraps the handler of a method that needs a principal."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        rule = self._rules.get(method, UNLISTED)
        if handler is None or not rule.scopes:
            return handler
        return wrap_handler(
            handler,
            partial(self._admit, method, rule, handler.response_streaming),
            decode_inside=True,
            request_limit=self._request_limit,
            stall_timeout_s=self._stall_timeout_s,
            check=partial(_check_request, method, rule),
        )

    @asynccontextmanager
    async def _admit(self, method: str, rule: Rule, is_stream: bool, context: Context) -> AsyncIterator[None]:
        # Known before anything can fail, so that the line of a refusal never lacks it.
        PRINCIPAL.set(ANONYMOUS)
        try:
            principal = await self._identify(context)
            PRINCIPAL.set(principal)
            describe_call(principal=principal.name)
            if not principal.scopes & rule.all_scopes:
                raise ScopeMissing(principal.name, rule.all_scopes)
            with self._streams.hold(principal) if is_stream else nullcontext():
                yield
        except AccessError as error:
            self.refused[error.reason] += 1
            named = {key: value for key, value in error.metadata.items() if key in {"scope", "deployment", "alias"}}
            _log.warning(
                "refused",
                principal=PRINCIPAL.get().name,
                method=method,
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
    """Returns the token of a call; None if it has none.

    Raises:
        TokenInvalid: The metadata is not `Bearer TOKEN`, or there are several.
    """
    values = [value for key, value in metadata if key == TOKEN_KEY]
    if not values:
        return None
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != _SCHEME or not token.strip():
        raise TokenInvalid(f"`{TOKEN_KEY}` is not one `Bearer JWT`")
    return token.strip()


def _check_request(method: str, rule: Rule, request: object, context: Context) -> None:
    """Checks a request against the principal's scopes, and the names in it against the principal's patterns.

    Raises:
        ScopeMissing: The method's scopes differ by request, and the principal has none for this one.
        DeploymentForbidden, AliasForbidden: No pattern admits one of them.
    """
    principal = PRINCIPAL.get()
    is_own = rule.is_own(request)
    scopes = rule.own.scopes if rule.own is not None and is_own else rule.scopes
    if not principal.scopes & scopes:
        raise ScopeMissing(principal.name, scopes)
    names = {}
    if rule.deployment is not None and (deployment := rule.deployment(request)) is not None:
        if not principal.may_use(deployment):
            raise DeploymentForbidden(principal.name, deployment)
        names["deployment"] = deployment
    if rule.alias is not None and (alias := rule.alias(request)) is not None:
        if not principal.may_move(alias):
            raise AliasForbidden(principal.name, alias)
        names["alias"] = alias
    if rule.is_audited and not is_own:
        _log.info("allowed", principal=principal.name, method=method, peer=context.peer(), **names)
