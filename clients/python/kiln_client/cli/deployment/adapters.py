"""The commands of `kiln adapters`."""

from __future__ import annotations

from typing import Final

import click
from rich.console import Group
from rich.text import Text

from kiln_client.cli.records import record_from_message
from kiln_client.cli.rows import SHORT_DIGEST, Row, describe, pairs, tabulate
from kiln_client.cli.session import Session, remote_command

_DEPLOYMENT = click.option("--deployment", "deployment_id", required=True, metavar="ID", help="Deployment to use.")
_ADAPTERS: Final = (
    Row("adapter", "{name}"),
    Row("from", lambda one: one.bundle_ref or "the deployment's bundle"),
    Row("digest", lambda one: str(one.digest[:SHORT_DIGEST])),
    Row("owner", "{owner}"),
    # 0 is a slot, too.
    Row("slot", lambda one: str(one.slot) if one.HasField("slot") else ""),
    Row("requests", "{active_requests}"),
)
_LOADED: Final = (
    Row("adapter", "{name}"),
    Row("from", "{bundle_ref}"),
    Row("bundle", "{bundle_digest}"),
    Row("digest", "{digest}"),
)


@click.group("adapters")
def adapters_group() -> None:
    """Load and list LoRA adapters, which requests name.

    `kiln generate --adapter NAME` uses one. Those that you load are yours alone.
    """


@adapters_group.command("list")
@_DEPLOYMENT
@remote_command
async def list_command(session: Session, *, deployment_id: str) -> None:
    """List the adapters that your requests can name, and the slots that they are in.

    An adapter without a slot is written into one for its next request.
    """
    async with session.runtime() as runtime:
        listed = await runtime.list_adapters(deployment_id)
    slots = f"{listed.num_slots} slots" if listed.num_slots else f"{deployment_id} has no room for adapters"
    view = Group(tabulate(listed.adapters, _ADAPTERS, empty="no adapters"), Text(slots, style="dim"))
    session.output.result({"deployment_id": deployment_id, **record_from_message(listed)}, view)


@adapters_group.command("load")
@click.argument("ref")
@_DEPLOYMENT
@click.option("--name", help="What requests call it. Default: its name in the bundle.")
@click.option("--replace", is_flag=True, help="Let a name of yours that means another adapter mean this one.")
@remote_command
async def load_command(session: Session, *, ref: str, deployment_id: str, name: str | None, replace: bool) -> None:
    """Let your requests name the adapter of a bundle.

    If the command fails, the name means what it meant before.
    """
    async with session.runtime() as runtime:
        adapter = await runtime.load_adapter(deployment_id, ref, name=name or "", replace=replace)
    record = {"deployment_id": deployment_id, **record_from_message(adapter)}
    session.output.result(record, pairs([("deployment", deployment_id), *describe(adapter, _LOADED)]))


@adapters_group.command("unload")
@click.argument("name")
@_DEPLOYMENT
@remote_command
async def unload_command(session: Session, *, name: str, deployment_id: str) -> None:
    """Take the name from an adapter of yours; requests that use it go on."""
    async with session.runtime() as runtime:
        response = await runtime.unload_adapter(deployment_id, name)
    record = {"deployment_id": deployment_id, "name": name, **record_from_message(response)}
    view = Text(f"unloaded {name}, {response.active_requests} requests go on with it")
    session.output.result(record, view)
