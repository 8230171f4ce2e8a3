"""The calls that orchestrators and tools make every second, which would say little about a service."""

from __future__ import annotations

from typing import Final

_PREFIXES: Final = ("/grpc.health.", "/grpc.reflection.")


def is_probe(method: str) -> bool:
    """Whether a call only asks whether the server lives, or what it offers. Logs and traces leave such calls out.

    Args:
        method: As gRPC writes it, `/package.Service/Method`.
    """
    return method.startswith(_PREFIXES)
