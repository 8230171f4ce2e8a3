"""What each method of the runtime needs of its caller."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from edge.access.principal import Scope
from edge.access.rules import ANY_SCOPE, DEPLOYMENT_ID, OPEN, OwnRequests, ReadName, Rule, Rules, name_methods, needs

_INFER: Final = needs(Scope.INFER, deployment=DEPLOYMENT_ID)
_LOAD: Final = needs(Scope.LOAD, deployment=DEPLOYMENT_ID)

#: Ends requests of the caller, and with the scope admin of all.
_ABORT: Final = needs(Scope.INFER, Scope.ADMIN, deployment=DEPLOYMENT_ID)
#: A caller who may generate may forget what was kept of it.
_OWN_SESSION: Final = OwnRequests(
    "with scope `session`", lambda request: request.WhichOneof("scope") == "session", _INFER.scopes
)

RULES: Final[Rules] = MappingProxyType(
    {
        **name_methods(
            "kiln.runtime.v1.GenerationService",
            {"Generate": _INFER, "Embed": _INFER, "Abort": _ABORT, "Tokenize": _INFER, "Detokenize": _INFER},
        ),
        **name_methods(
            "kiln.runtime.v1.RuntimeService",
            {
                "LoadBundle": _LOAD,
                "UnloadBundle": _LOAD,
                "LoadWeights": _LOAD,
                "LoadAdapter": _LOAD,
                "UnloadAdapter": _LOAD,
                # It shows the caller's own, and with the scope admin those of all.
                "ListAdapters": needs(Scope.INFER, Scope.LOAD, Scope.ADMIN, deployment=DEPLOYMENT_ID),
                "ResetKVCache": replace(_LOAD, own=_OWN_SESSION),
                "ListSessions": _INFER,
                "GetDeployment": Rule(ANY_SCOPE.scopes, deployment=DEPLOYMENT_ID),
                # These show the deployments that the principal may use, and no others.
                "ListDeployments": ANY_SCOPE,
                "GetServerInfo": ANY_SCOPE,
            },
        ),
    }
)


def make_engine_rules(read_deployment: ReadName) -> Rules:
    """Returns the rules of vLLM's engine API; `read_deployment` returns its deployment, because requests name none."""
    infer = needs(Scope.INFER, deployment=read_deployment)
    return name_methods(
        "vllm.grpc.engine.VllmEngine",
        {
            "Generate": infer,
            "Embed": infer,
            "Abort": infer,
            "GetModelInfo": infer,
            "GetServerInfo": infer,
            "GetLoads": infer,
            "GetTokenizer": infer,
            "SubscribeKvEvents": infer,
            # Routers ask for it as orchestrators ask for health.
            "HealthCheck": OPEN,
            # Refused, as no deployment has what they act on.
            "FlushCache": needs(Scope.LOAD, deployment=read_deployment),
            "StartProfile": needs(Scope.ADMIN),
            "StopProfile": needs(Scope.ADMIN),
        },
    )
