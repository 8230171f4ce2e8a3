"""Tokens of a home: `python -m edge.access.issuer` signs them with the home's key, as a process of its own.

The services verify them with `HOME/auth/jwks.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from kiln_client.errors import FailedPrecondition, KilnError
from kiln_client.stack.service_process import Service

ISSUER: Final = Service("token", "edge", "kiln-edge", kind="issuer")

#: What tokens may allow, as the services call it.
SCOPES: Final = ("infer", "load", "compile", "read", "promote", "admin")

#: How long the home's own token lasts, and after what time it is renewed, in seconds. A copy of it ends in a week.
HOME_TOKEN_LIFETIME_S: Final = 7 * 86400.0
HOME_TOKEN_RENEWAL_S: Final = 86400.0

_POLL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token says.

    Attributes:
        subject: The principal's name, as the services' audit log has it.
        scopes: What the principal may do; see SCOPES.
        lifetime_s: Seconds until the token expires.
        deployments: Patterns of the deployments that it may use; empty for all.
        aliases: Patterns of the aliases that it may move, `NAME@ALIAS`; empty for all.
        bundles: Patterns of the bundle names that it may publish, delete and read, also names of others; empty to
            publish under new names and its own, and to delete and read all.
    """

    subject: str
    scopes: tuple[str, ...]
    lifetime_s: float
    deployments: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()


#: The token with which this user's own clients, and the runtime, call the services of a home.
HOME_GRANT: Final = Grant("home", SCOPES, HOME_TOKEN_LIFETIME_S)


def auth_path(home: Path) -> Path:
    """Returns the directory of a home's key and token."""
    return home / "auth"


def key_path(home: Path) -> Path:
    """Returns the file of the key that signs a home's tokens."""
    return auth_path(home) / "key.pem"


def jwks_path(home: Path) -> Path:
    """Returns the file of the public keys that verify a home's tokens."""
    return auth_path(home) / "jwks.json"


def token_path(home: Path) -> Path:
    """Returns the file of the token of a home's own clients."""
    return auth_path(home) / "token"


async def sign_token(home: Path, grant: Grant, out: Path | None = None) -> str:
    """Returns a token that a home's key has signed. Makes the key if the home has none.

    `out` is a file to write the token to, for its owner only; the result is empty then.
    """
    ISSUER.require_installed()
    words = ["--subject", grant.subject, "--lifetime", str(round(grant.lifetime_s))]
    for option, values in (
        ("scope", grant.scopes),
        ("deployment", grant.deployments),
        ("alias", grant.aliases),
        ("bundle", grant.bundles),
    ):
        words += [f"--{option}={value}" for value in values]
    words += [] if out is None else ["--out", str(out)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "edge.access.issuer", str(auth_path(home)), *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ISSUER.environment,
    )
    printed, complaint = await process.communicate()
    if process.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines()
        detail = lines[-1] if lines else f"exit code {process.returncode}"
        raise FailedPrecondition(
            f"the key of {home} signs no token: {detail}",
            reason="TOKEN_NOT_MADE",
            metadata={"home": home, "detail": detail},
        )
    return printed.decode().strip()


async def renew_home_token(home: Path) -> None:
    """Gives a home's own clients a new token."""
    await sign_token(home, HOME_GRANT, token_path(home))


async def keep_home_token(home: Path) -> NoReturn:
    """Renews the token of a home's own clients every day. If that fails, tries again a minute later."""
    renewed_at = time.time()
    while True:
        # The clock of the wall, which goes on while the host sleeps.
        await asyncio.sleep(_POLL_S)
        if abs(time.time() - renewed_at) >= HOME_TOKEN_RENEWAL_S:
            with contextlib.suppress(KilnError):
                await renew_home_token(home)
                renewed_at = time.time()
