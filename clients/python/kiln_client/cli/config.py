"""The commands of `kiln config`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click
import yaml
from kiln.bundle.v1.bundle_pb2 import Bundle

from kiln_client.bundles import AsyncBundles, version_ref
from kiln_client.cli.records import Record
from kiln_client.cli.session import Session, remote_command
from kiln_client.errors import NotFound

# Title of the bundle's file that NxD Inference reads.
_TITLE = "neuron_config.json"


@click.group("config")
def config_group() -> None:
    """Show and export the configurations of bundles.

    A REF is NAME (its newest version), NAME:vN, NAME@ALIAS or sha256:HEX.
    """


@config_group.command("show")
@click.argument("ref")
@remote_command
async def show_command(session: Session, *, ref: str) -> None:
    """Show a bundle's configuration as YAML, with every default filled in."""
    async with session.bundles() as bundles:
        bundle = await bundles.get_bundle(ref)
    config = json.loads(bundle.manifest_json)["config"]
    session.output.text(yaml.safe_dump(config, allow_unicode=True))
    session.output.result({**_origin(bundle), "config": config})


@config_group.command("export")
@click.argument("ref")
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write. Default: standard output.",
)
@remote_command
async def export_command(session: Session, *, ref: str, path: Path | None) -> None:
    """Write a bundle's configuration as NxD Inference's neuron_config.json.

    `kiln compile` accepts this file as its CONFIG, too.
    """
    async with session.bundles() as bundles:
        bundle = await bundles.get_bundle(ref)
        content = await _read_file(bundles, bundle, _TITLE)
    if path is None:
        session.output.text(content.decode())
    else:
        await asyncio.to_thread(path.write_bytes, content)
        session.output.remark(f"wrote {path}")
    file = None if path is None else str(path)
    session.output.result({**_origin(bundle), "file": file, "config": json.loads(content)})


async def _read_file(bundles: AsyncBundles, bundle: Bundle, title: str) -> bytes:
    """Reads one file of a bundle.

    Raises:
        NotFound: The bundle has no such file.
    """
    digest = next((blob.digest for blob in bundle.blobs if blob.title == title), None)
    if digest is None:
        raise NotFound(
            f"the bundle {bundle.digest} has no {title}",
            reason="BLOB_NOT_FOUND",
            metadata={"bundle": bundle.digest, "title": title},
        )
    async with bundles.read_blob(digest, ref=version_ref(bundle)) as pieces:
        return b"".join([piece.data async for piece in pieces])


def _origin(bundle: Bundle) -> Record:
    return {"ref": version_ref(bundle), "bundle": bundle.digest}
