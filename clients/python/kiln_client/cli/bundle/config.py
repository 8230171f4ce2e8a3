"""The commands of `kiln config`."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import click
import yaml
from kiln.bundle.v1.bundle_pb2 import Bundle
from kiln.compiler.v1.compiler_pb2 import Target

from kiln_client.bundles import AsyncBundles, version_ref
from kiln_client.cli.parameters import enum_choice
from kiln_client.cli.records import Record
from kiln_client.cli.session import Session, local_command, remote_command
from kiln_client.errors import NotFound

# Title of the bundle's file that NxD Inference reads.
_TITLE = "neuron_config.json"


@click.group("config")
def config_group() -> None:
    """Explain configurations; show and export those of bundles.

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


@config_group.command("reference")
@click.argument("attribute", required=False)
@click.option("--target", type=enum_choice(Target.Kind), help="Show what this target makes of it. Default: all.")
@local_command
async def reference_command(session: Session, *, attribute: str | None, target: str | None) -> None:
    """Show what an attribute of a configuration takes, and what targets make of it.

    ATTRIBUTE is a name, such as seq_len, NeuronConfig.seq_len or NeuronConfig; without one, all are shown.

    \b
    honoured  the value counts
    hint      the value is ignored, and the result of the compile or the plan says so
    later     accepted at its default; others are refused with reason FEATURE_NOT_SERVED until later work
    planned   a plan depends on the value, or on what is inside if it is an object
    refused   other values than the default are mistakes

    A configuration is JSON or YAML with the names of NxD Inference. It is validated as a whole: one error lists every
    mistake. Unknown names are mistakes, and warnings in a file that NxD Inference saved; null is unset. Names that
    only NxD Inference's code has are accepted at their defaults, with a note, and are not recorded. What
    `transformers_neuronx` sets, `neuron_config` may not set, too. What no document says of trn3 is taken from trn2
    and unverified.
    """
    rows = _find_rows(attribute)
    if target is not None:
        rows = [_choose_target(row, target) for row in rows]
    session.output.text("\n".join(_render_row(row) for row in rows))
    session.output.result({"attributes": rows})


def _find_rows(attribute: str | None) -> list[Record]:
    """The rows of the reference that a name means: an attribute, also by another name, or a whole class."""
    rows: list[Record] = json.loads(resources.files("kiln_client.cli").joinpath("config_reference.json").read_text())
    if attribute is None:
        return rows
    # Errors and hints print paths, such as neuron_config.seq_len.
    found = [row for row in rows if attribute in _list_names(row)] or [
        row for row in rows if attribute.rpartition(".")[2] in _list_names(row)
    ]
    if not found:
        known = sorted({name for row in rows for name in _list_names(row)})
        similar = difflib.get_close_matches(attribute, known, n=3)
        accepted = f"did you mean {' or '.join(similar)}?" if similar else "a name that `kiln config reference` lists"
        raise click.BadParameter(f"got {attribute!r}; accepted: {accepted}", param_hint="ATTRIBUTE")
    return found


def _list_names(row: Record) -> list[str]:
    table, _, name = row["name"].rpartition(".")
    return [row["name"], table, name, *(one.removeprefix("not ") for one in row.get("also", ()))]


def _choose_target(row: Record, target: str) -> Record:
    if "targets" not in row:
        return row
    kinds = {target, "cpu" if target == "cpu" else "neuron"}
    said = next(text for targets, text in row["targets"].items() if kinds & set(targets.split(", ")))
    return {**row, "targets": {target: said}}


def _render_row(row: Record) -> str:
    return "".join(f"{label}{text}\n" for label, text in _list_lines(row))


def _list_lines(row: Record) -> Iterator[tuple[str, str]]:
    yield "", row["name"]
    for title, value in row.items():
        if title == "targets":
            yield from ((f"  {targets}: ", text) for targets, text in value.items())
        elif title == "rules":
            yield from (("  rule: ", text) for text in value)
        elif title != "name":
            yield f"  {title}: ", ", ".join(value) if isinstance(value, list) else value


async def _read_file(bundles: AsyncBundles, bundle: Bundle, title: str) -> bytes:
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
