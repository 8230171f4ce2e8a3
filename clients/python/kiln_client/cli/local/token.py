"""The command `kiln token`."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from kiln_client.cli.local.options import HOME
from kiln_client.cli.parameters import DURATION
from kiln_client.cli.session import Session, local_command
from kiln_client.errors import InvalidArgument, NotFound
from kiln_client.stack.issuer import SCOPES, Grant, key_path, sign_token

_FILE = click.Path(dir_okay=False, resolve_path=True, path_type=Path)


@click.command("token")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    required=True,
    multiple=True,
    help="What its bearer may do; may be repeated.",
)
@click.option(
    "--deployment",
    "deployments",
    multiple=True,
    metavar="PATTERN",
    help="Deployments that its bearer may use, such as 'chat-*'; may be repeated. Default: all.",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="PATTERN",
    help="Aliases that its bearer may move, such as '*@staging'; may be repeated. Default: all.",
)
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    metavar="PATTERN",
    help="Bundle names that its bearer may publish, delete and read, such as 'chat-*'; may be repeated. Default: to "
    "publish, names of its own and new ones; to delete and read, all.",
)
@click.option(
    "--lifetime",
    type=DURATION,
    default="30d",
    show_default=True,
    help="Time until it expires, such as 15m, 12h or 30d.",
)
@click.option("--subject", metavar="NAME", help="Its bearer, as the services' audit log says. Default: your login.")
@click.option("-o", "--out", type=_FILE, help="Write it to this file, for its owner only. Default: standard output.")
@HOME
@local_command
async def token_command(
    session: Session,
    *,
    scopes: tuple[str, ...],
    deployments: tuple[str, ...],
    aliases: tuple[str, ...],
    bundles: tuple[str, ...],
    lifetime: float,
    subject: str | None,
    out: Path | None,
    home: Path,
) -> None:
    """Make a token for the services of a home.

    The services take it until it expires, or until HOME/auth/key.pem, which has signed it, is removed and the services
    start again. Give it to other users and programs as KILN_TOKEN, or as a file, KILN_TOKEN_FILE.
    """
    if not key_path(home).is_file():
        raise NotFound(
            f"{home} has no key that signs tokens: the services of a home make one when they start, as by"
            f" `kiln up --home {home}`",
            reason="KEY_NOT_FOUND",
            metadata={"home": home},
        )
    grant = Grant(subject or _login(), scopes, lifetime, deployments, aliases, bundles)
    expires = datetime.now(UTC) + timedelta(seconds=lifetime)
    token = await sign_token(home, grant, out)
    session.output.result(
        {
            "token": None if out else token,
            "file": None if out is None else str(out),
            "subject": grant.subject,
            "scopes": list(scopes),
            "deployments": list(deployments) or None,
            "aliases": list(aliases) or None,
            "bundles": list(bundles) or None,
            "expire_time": expires.isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
    )
    session.output.text(f"{out or token}\n")
    session.output.remark(f"{grant.subject} may {', '.join(scopes)} until {expires:%Y-%m-%d %H:%M} UTC")


def _login() -> str:
    try:
        return getpass.getuser()
    except (LookupError, OSError):  # neither the environment nor the system's list of users has it
        raise InvalidArgument.about(
            "subject",
            "got none; accepted: a name, as --subject NAME",
            "this user has no login that a token could name: give --subject",
            reason="SUBJECT_MISSING",
        ) from None
