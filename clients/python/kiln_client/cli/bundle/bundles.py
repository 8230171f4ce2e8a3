"""The commands of `kiln bundles`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
from kiln.bundle.v1.bundle_pb2 import Bundle
from rich.console import Group
from rich.text import Text

from kiln_client.bundles import version_ref
from kiln_client.cli.parameters import DURATION, server_path
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import Record, record_from_message
from kiln_client.cli.rows import Row, describe, format_time, pairs, tabulate
from kiln_client.cli.session import Session, remote_command


def _create_time(bundle: Bundle) -> str:
    return format_time(bundle.create_time) if bundle.HasField("create_time") else ""


_SIZE: Final = Row("size", "{size_bytes:size}")
_CREATED: Final = Row("created", _create_time)
_ORIGIN: Final = (Row("version", version_ref), Row("contents", "{contents}"))
_NAMES: Final = (
    *_ORIGIN,
    Row("aliases", lambda bundle: ", ".join(bundle.aliases) or "none"),
    Row("digest", "{digest}"),
)
_BUNDLE: Final = (*_NAMES, Row("graph ABI", "{graph_abi_digest}"), _SIZE, _CREATED, Row("golden", "{golden_check}"))
_BUNDLES: Final = (*_ORIGIN, Row("aliases", "{aliases}"), Row("digest", "{digest:short}"), _SIZE, _CREATED)
_FILE: Final = (_SIZE, Row("type", "{media_type}"), Row("title", "{title}"))
_BLOBS: Final = (Row("blob", "{digest:short}"), *_FILE)
_REFERRERS: Final = (Row("referrer", "{digest:short}"), *_FILE)
_LEASES: Final = (Row("bundle", "{digest:short}"), Row("holder", "{holder}"), Row("until", "{expire_time:time}"))
_DELETED: Final = (Row("blobs", "{deleted_blob_count}"), Row("bytes", "{deleted_size_bytes}"))
_COLLECTED: Final = (
    Row("{dry_run:would remove/removed}", "{deleted_bundle_count} bundles that nothing names"),
    Row("{dry_run:would remove/removed}", "{deleted_blob_count} blobs, {deleted_size_bytes:size}"),
    Row("{dry_run:would keep/kept}", "{kept_blob_count} blobs, {kept_size_bytes:size}"),
)
_COPIED: Final = (
    Row("copied", "{copied_blob_count} blobs, {copied_size_bytes:size}"),
    Row("present", "{present_blob_count} blobs"),
)


@click.group("bundles")
def bundles_group() -> None:
    """List, show, alias, lease, import, delete and collect bundles.

    A REF is NAME (its newest version), NAME:vN, NAME@ALIAS or sha256:HEX.
    """


@bundles_group.command("list")
@click.argument("name", default="")
@remote_command
async def list_command(session: Session, *, name: str) -> None:
    """List every version of NAME, or of all names, newest first."""
    async with session.bundles() as bundles:
        found = await bundles.list_bundles(name)
    record = {"bundles": [_bundle_record(bundle, without=("manifest", "blobs", "referrers")) for bundle in found]}
    session.output.result(record, tabulate(found, _BUNDLES, empty="no bundles"))


@bundles_group.command("show")
@click.argument("ref")
@remote_command
async def show_command(session: Session, *, ref: str) -> None:
    """Show one bundle.

    Shows its digests, aliases, blobs, referrers and, with --json, its manifest.
    """
    async with session.bundles() as bundles:
        bundle = await bundles.get_bundle(ref)
    referrers = [tabulate(bundle.referrers, _REFERRERS)] if bundle.referrers else []
    view = Group(pairs(describe(bundle, _BUNDLE)), tabulate(bundle.blobs, _BLOBS), *referrers)
    session.output.result(_bundle_record(bundle), view)


@bundles_group.command("read")
@click.argument("ref")
@click.argument("file")
@click.option("--out", type=click.Path(dir_okay=False), help="File to write. Default: standard output.")
@remote_command
async def read_command(session: Session, *, ref: str, file: str, out: str | None) -> None:
    """Read one file of a bundle.

    FILE is the title or the digest of a file in the bundle or of a referrer. `kiln bundles show` lists both.
    """
    if out is None and session.output.as_json:
        raise click.UsageError("--json needs --out: a file is no JSON")
    async with session.bundles() as bundles:
        if out is None:
            await bundles.read_file(ref, file, sys.stdout.buffer)
            return
        path = Path(out)
        unfinished = path.with_name(f".{path.name}.partial")
        try:
            with unfinished.open("wb") as sink:
                blob = await bundles.read_file(ref, file, sink)
            unfinished.replace(path)
        except OSError as error:
            raise click.FileError(out, error.strerror or "cannot be written") from None
        finally:
            unfinished.unlink(missing_ok=True)
    session.output.result({"path": out, **record_from_message(blob)}, Text(f"{blob.title or blob.digest} → {out}"))


@bundles_group.command("alias")
@click.argument("ref")
@click.argument("alias")
@click.option("--etag", help="Move the alias only if it still has this etag.")
@click.option(
    "--require-compatible",
    is_flag=True,
    help="Move the alias only to a version with the same graph ABI, which deployments that follow it can take.",
)
@remote_command
async def alias_command(session: Session, *, ref: str, alias: str, etag: str | None, require_compatible: bool) -> None:
    """Point ALIAS at the version that REF names. Creates the alias if it does not exist."""
    async with session.bundles() as bundles:
        done = await bundles.set_alias(ref, alias, etag=etag, require_compatible=require_compatible)
    moved, warnings = done.alias, [*done.warnings]
    lines = [f"{moved.name}@{moved.alias} → {moved.name}:v{moved.version}", *(f"warning: {one}" for one in warnings)]
    session.output.result({**record_from_message(moved), "warnings": warnings}, Text("\n".join(lines)))


@bundles_group.command("give")
@click.argument("name")
@click.argument("principal")
@remote_command
async def give_command(session: Session, *, name: str, principal: str) -> None:
    """Make NAME belong to PRINCIPAL, who may then compile bundles of that name.

    PRINCIPAL is the subject of a token, or the kind and name of a certificate, such as dns:ci.example.org. With '' the
    name belongs to no principal. Needs a token with the scope admin.
    """
    async with session.bundles() as bundles:
        former = await bundles.set_owner(name, principal)
    record = {"name": name, "owner": principal, "former_owner": former}
    session.output.result(record, Text(f"{name}: {former or 'no owner'} → {principal or 'no owner'}"))


@bundles_group.command("delete")
@click.argument("ref")
@click.option("--etag", help="Delete the alias only if it still has this etag.")
@remote_command
async def delete_command(session: Session, *, ref: str, etag: str | None) -> None:
    """Delete a version or an alias.

    REF is NAME:vN or NAME@ALIAS. With a version, the compiler also deletes the blobs that no other version needs.
    """
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
    session.output.result(record, pairs([("deleted", ref), *describe(freed, _DELETED)]))


@bundles_group.command("lease")
@click.argument("ref")
@click.option(
    "--holder", required=True, help="Name of the user of the bundle. A holder has at most one lease on a bundle."
)
@click.option(
    "--duration", "duration_s", type=DURATION, help="Time until the lease expires, such as 90m or 7d. Default: 1d."
)
@remote_command
async def lease_command(session: Session, *, ref: str, holder: str, duration_s: float | None) -> None:
    """Lease a bundle, or renew the holder's lease.

    The compiler collects no blobs of a leased bundle.
    """
    async with session.bundles() as bundles:
        lease = await bundles.lease_bundle(ref, holder, duration_s=duration_s)
    text = Text(f"{lease.holder} holds {lease.digest} until {format_time(lease.expire_time)}")
    session.output.result(record_from_message(lease), text)


@bundles_group.command("release")
@click.option("--holder", required=True, help="Holder of the lease.")
@click.option("--digest", default="", metavar="sha256:HEX", help="Bundle of the lease. Default: every bundle.")
@remote_command
async def release_command(session: Session, *, holder: str, digest: str) -> None:
    """Release the leases of a holder.

    The command also succeeds if a lease has expired or never existed.
    """
    async with session.bundles() as bundles:
        count = await bundles.release_lease(holder, digest)
    session.output.result({"holder": holder, "released_count": count}, Text(f"released {count} leases of {holder}"))


@bundles_group.command("leases")
@click.argument("digest", default="", metavar="[sha256:HEX]")
@remote_command
async def leases_command(session: Session, *, digest: str) -> None:
    """List the leases on one bundle, or on all bundles."""
    async with session.bundles() as bundles:
        found = await bundles.list_leases(digest)
    record = {"leases": [record_from_message(lease) for lease in found]}
    session.output.result(record, tabulate(found, _LEASES, empty="no leases"))


@bundles_group.command("gc")
@click.option("--dry-run", is_flag=True, help="Only show what the command would remove.")
@click.option(
    "--max-cache-age",
    "max_cache_age_s",
    type=DURATION,
    help="Remove cached executables that no bundle needs and no build has used for this time, such as 30d. "
    "Default: keep them.",
)
@remote_command
async def gc_command(session: Session, *, dry_run: bool, max_cache_age_s: float | None) -> None:
    """Remove unneeded blobs.

    The compiler keeps the blobs that versions, leases, running builds and the cache of executables need.
    """
    async with session.bundles() as bundles:
        collected = await bundles.collect_garbage(dry_run=dry_run, max_cache_age_s=max_cache_age_s)
    record = {"dry_run": dry_run, **record_from_message(collected)}
    session.output.result(record, pairs(describe(collected, _COLLECTED, dry_run=dry_run)))


@bundles_group.command("import")
@click.argument("layout")
@click.option("--name", required=True, help="Bundle name of the new version.")
@click.option("--source-ref", default="", help="Digest or tag of the bundle in LAYOUT. Default: the only bundle.")
@click.option("--alias", default="", help="Alias to point at the new version, at the end of the import.")
@click.option(
    "--alias-etag", help="Move the alias only if it still has this etag; an empty etag means that it must not exist."
)
@remote_command
async def import_command(
    session: Session, *, layout: str, name: str, source_ref: str, alias: str, alias_etag: str | None
) -> None:
    """Copy a bundle from an OCI image layout.

    LAYOUT is a directory on the compiler's host. The compiler copies only the blobs that it lacks. Interrupting the
    command ends the import; the next import keeps what this one has copied.
    """
    if alias_etag is not None and not alias:
        raise click.UsageError("--alias-etag goes with --alias")
    with ProgressView(session.output) as progress:
        async with session.bundles() as bundles:
            result = await bundles.import_bundle(
                server_path(layout),
                name,
                source_ref=source_ref,
                alias=alias,
                alias_etag=alias_etag,
                on_progress=progress.imported,
            )
    record = record_from_message(result)
    record["bundle"] = _bundle_record(result.bundle, without=("manifest", "blobs", "referrers"))
    warnings = (("warning", warning) for warning in result.warnings)
    view = pairs([*describe(result.bundle, _NAMES), *describe(result, _COPIED), *warnings])
    session.output.result({"event": "result", **record}, view)


def _bundle_record(bundle: Bundle, without: tuple[str, ...] = ()) -> Record:
    record = {"ref": version_ref(bundle), **record_from_message(bundle)}
    return {name: value for name, value in record.items() if name not in without}
