"""Errors about tokens that the client itself raises.

InvalidArgument
└── TokenInPlaintext    a token that others than this host could read
FailedPrecondition
└── TokenUnusable       a token, or the file of one, that the client cannot use
"""

from __future__ import annotations

from kiln_client.errors import FailedPrecondition, FieldViolation, InvalidArgument


class TokenInPlaintext(InvalidArgument):
    """A token would leave this host in plaintext, where others can read it and use it as their own."""

    def __init__(self, source: str, address: str) -> None:
        accepted = "TLS, a loopback address, or permission: --allow-plaintext-token, allow_plaintext_token in the SDK"
        violation = FieldViolation("token", f"{source} for {address}; accepted: {accepted}", "TOKEN_IN_PLAINTEXT")
        super().__init__(
            f"the token of {source} would be sent to {address} in plaintext",
            reason="TOKEN_IN_PLAINTEXT",
            fields=(violation,),
            metadata={"source": source, "address": address},
        )


class TokenUnusable(FailedPrecondition):
    """A token, or the file of one, that the client cannot use. The message does not repeat the token."""

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(
            f"the token of {source} cannot be used: {detail}",
            reason="TOKEN_UNUSABLE",
            metadata={"source": source, "detail": detail},
        )
