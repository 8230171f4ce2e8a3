"""`kiln bundles`."""

from __future__ import annotations

import click
from kiln.bundle.v1.bundle_pb2 import Bundle
from rich.text import Text

from kiln_client.cli.records import Record, record_from_message
from kiln_client.cli.session import Session, remote_command
from kiln_client.cli.views import bundle_view, bundles_view, pairs, version_ref


@click.group("bundles")
def bundles_group() -> None:
    """List, show, alias and delete bundles.

    A REF is NAME (its newest version), NAME:vN, NAME@ALIAS or sha256:HEX.
    """


@bundles_group.command("list")
@click.argument("name", default="")
@remote_command
async def list_command(session: Session, *, name: str) -> None:
    """List every version of NAME, or of all names, newest first."""
    async with session.bundles() as bundles:
        found = await bundles.list_bundles(name)
    record = {"bundles": [_bundle_record(bundle, without=("manifest", "blobs")) for bundle in found]}
    session.output.result(record, bundles_view(found) if found else Text("no bundles", style="dim"))


@bundles_group.command("show")
@click.argument("ref")
@remote_command
async def show_command(session: Session, *, ref: str) -> None:
    """Show one bundle: digests, aliases, blobs and, with --json, its manifest."""
    async with session.bundles() as bundles:
        bundle = await bundles.get_bundle(ref)
    session.output.result(_bundle_record(bundle), bundle_view(bundle))


@bundles_group.command("alias")
@click.argument("ref")
@click.argument("alias")
@click.option("--etag", help="Move the alias only if it still has this etag.")
@remote_command
async def alias_command(session: Session, *, ref: str, alias: str, etag: str | None) -> None:
    """Point ALIAS at the version that REF names, creating or moving it."""
    async with session.bundles() as bundles:
        moved = await bundles.set_alias(ref, alias, etag=etag)
    view = Text(f"{moved.name}@{moved.alias} → {moved.name}:v{moved.version}")
    session.output.result(record_from_message(moved), view)


@bundles_group.command("delete")
@click.argument("ref")
@click.option("--etag", help="Delete the alias only if it still has this etag.")
@remote_command
async def delete_command(session: Session, *, ref: str, etag: str | None) -> None:
    """Delete a version (NAME:vN) with the blobs that no other needs, or an alias (NAME@ALIAS)."""
    name, is_alias, alias = ref.partition("@")
    if etag is not None and not is_alias:
        raise click.UsageError("--etag goes with an alias, NAME@ALIAS")
    async with session.bundles() as bundles:
        if is_alias:
            await bundles.delete_alias(name, alias, etag=etag)
            session.output.result({"deleted": ref}, Text(f"deleted the alias {ref}"))
            return
        freed = await bundles.delete_bundle(ref)
    record = {"deleted": ref, **record_from_message(freed)}
    view = pairs(
        (("deleted", ref), ("blobs", freed.deleted_blob_count), ("bytes", freed.deleted_size_bytes)),
    )
    session.output.result(record, view)


def _bundle_record(bundle: Bundle, without: tuple[str, ...] = ()) -> Record:
    record = {"ref": version_ref(bundle), **record_from_message(bundle)}
    return {name: value for name, value in record.items() if name not in without}
