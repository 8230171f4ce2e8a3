"""`python -m bundle`: lists, verifies and copies the bundles of OCI image layouts on this host."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bundle.errors import KilnError
from bundle.store.catalog import find_bundle, list_bundles
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import list_referrers
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier

_BAR_WIDTH = 30


def main(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit code: 0, 1 for a named error, 2 for a wrong command line."""
    options = _build_parser().parse_args(arguments)
    try:
        document = options.run(options)
    except KilnError as error:
        _write(sys.stderr, f"error: {error.reason}: {error}\n")
        return 1
    if options.json:
        _write(sys.stdout, json.dumps(document, indent=2) + "\n")
    else:
        for line in options.describe(document):
            _write(sys.stdout, line + "\n")
    return 0


def _list(options: argparse.Namespace) -> list[dict[str, Any]]:
    layout = Layout(options.layout)
    return [_describe(layout, listed.digest) | {"tags": list(listed.tags)} for listed in list_bundles(layout)]


def _verify(options: argparse.Namespace) -> list[dict[str, Any]]:
    layout = Layout(options.layout)
    refs = options.refs or [listed.digest for listed in list_bundles(layout)]
    verified = []
    for ref in refs:
        bundle = open_bundle(layout, find_bundle(layout, ref))
        bar = _ProgressBar("verify", is_shown=not options.json)
        done_bytes = 0

        def advance(count: int) -> None:
            nonlocal done_bytes
            done_bytes += count
            bar.show(done_bytes, bundle.size_bytes)  # noqa: B023 - called within this turn of the loop

        bundle.verify(BlobVerifier(None), advance)
        bar.end()
        verified.append({"digest": bundle.digest, "size_bytes": bundle.size_bytes, "verified": True})
    return verified


def _copy(options: argparse.Namespace) -> dict[str, Any]:
    source = Layout(options.source)
    digest = find_bundle(source, options.ref)
    bar = _ProgressBar("copy", is_shown=not options.json)
    copied = copy_bundle(
        source,
        Layout.create(options.target),
        digest,
        verifier=BlobVerifier(None),
        ref_name=options.tag,
        with_referrers=options.referrers,
        progress=bar.show,
    )
    bar.end()
    return {
        "digest": copied.digest,
        "tag": options.tag,
        "copied_blob_count": copied.copied_blob_count,
        "copied_size_bytes": copied.copied_size_bytes,
        "present_blob_count": copied.present_blob_count,
    }


def _describe(layout: Layout, digest: str) -> dict[str, Any]:
    bundle = open_bundle(layout, digest)
    return {
        "digest": digest,
        "size_bytes": bundle.size_bytes,
        "architecture": bundle.manifest.architecture,
        "target": f"{bundle.manifest.target.kind}/{bundle.manifest.target.isa}",
        "has_executables": bundle.manifest.has_executables,
        "has_weights": bundle.manifest.has_weights,
        "adapters": [adapter.name for adapter in bundle.manifest.adapters],
        "referrers": [{"digest": one.digest, "type": one.artifact_type} for one in list_referrers(layout, digest)],
    }


def _list_lines(document: list[dict[str, Any]]) -> list[str]:
    return [
        f"{one['digest']}  {one['size_bytes']:>14,}  {one['architecture']}  {one['target']}  {', '.join(one['tags'])}"
        for one in document
    ]


def _verify_lines(document: list[dict[str, Any]]) -> list[str]:
    return [f"{one['digest']}  {one['size_bytes']:,} bytes are what they were" for one in document]


def _copy_lines(document: dict[str, Any]) -> list[str]:
    copied = f"{document['copied_blob_count']} blobs copied ({document['copied_size_bytes']:,} bytes)"
    return [f"{document['digest']}  {copied}, {document['present_blob_count']} were there"]


class _ProgressBar:
    """A progress bar on standard error if that is a terminal; shows nothing otherwise."""

    def __init__(self, what: str, *, is_shown: bool) -> None:
        self._what = what
        self._is_shown = is_shown and sys.stderr.isatty()

    def show(self, done_bytes: int, total_bytes: int) -> None:
        if self._is_shown:
            share = done_bytes / total_bytes if total_bytes else 1.0
            filled = "#" * round(share * _BAR_WIDTH)
            _write(sys.stderr, f"\r{self._what} [{filled:<{_BAR_WIDTH}}] {done_bytes:,} of {total_bytes:,} bytes")

    def end(self) -> None:
        if self._is_shown:
            _write(sys.stderr, "\n")


def _write(stream: Any, text: str) -> None:
    stream.write(text)
    stream.flush()


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bundle", description="Bundles in OCI image layouts.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="list the bundles of a layout")
    listing.add_argument("layout", type=Path, metavar="LAYOUT")
    listing.set_defaults(run=_list, describe=_list_lines)

    verify = commands.add_parser("verify", help="hash every blob of bundles and compare")
    verify.add_argument("layout", type=Path, metavar="LAYOUT")
    verify.add_argument("refs", nargs="*", metavar="REF", help="digest or tag; default: every bundle")
    verify.set_defaults(run=_verify, describe=_verify_lines)

    copy = commands.add_parser("copy", help="copy a bundle; only blobs that are missing move")
    copy.add_argument("source", type=Path, metavar="SOURCE")
    copy.add_argument("target", type=Path, metavar="DEST", help="layout; made if there is none")
    copy.add_argument("ref", nargs="?", default="", metavar="REF", help="digest or tag; default: the only bundle")
    copy.add_argument("--tag", help="tag of the bundle in DEST, set last")
    copy.add_argument(
        "--no-referrers", dest="referrers", action="store_false", help="leave timings, results and signatures behind"
    )
    copy.set_defaults(run=_copy, describe=_copy_lines)

    for command in (listing, verify, copy):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
