"""What a person can do about errors whose messages the services write without knowing the client."""

from __future__ import annotations

from typing import Final

_MAKE: Final = "`kiln token` makes one from the key of a home"
_UNLOAD: Final = "`kiln status` shows what is loaded, `kiln unload ID` frees what one holds"
_GIVE: Final = "--token-file, KILN_TOKEN or KILN_TOKEN_FILE"

#: By reason, which is the code if a server or a proxy gives none.
_ADVICE: Final = {
    "TOKEN_MISSING": f"give a token by {_GIVE}; {_MAKE}",
    "TOKEN_EXPIRED": f"give a new token by {_GIVE}; {_MAKE}",
    "TOKEN_INVALID": f"give a token that the server's keys vouch for, by {_GIVE}; {_MAKE}",
    "CERTIFICATE_REVOKED": "ask the operator of the server for a new client certificate, and give it by --tls-cert",
    "SCOPE_MISSING": f"use a token with that scope; {_MAKE}, with --scope",
    "DEPLOYMENT_FORBIDDEN": f"use a token for that deployment; {_MAKE}, with --deployment",
    "ALIAS_FORBIDDEN": f"use a token for that alias; {_MAKE}, with --alias",
    "CORES_UNAVAILABLE": _UNLOAD,
    "MEMORY_UNAVAILABLE": _UNLOAD,
    "UNAUTHENTICATED": f"give a token by {_GIVE}, or a client certificate by --tls-cert and --tls-key",
    "PERMISSION_DENIED": "ask the operator of the server for permission",
}


def advise(reason: str) -> str | None:
    """Returns one line that says what to do about an error; None if its message says enough."""
    return _ADVICE.get(reason)
