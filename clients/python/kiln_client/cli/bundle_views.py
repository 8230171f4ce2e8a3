"""Views of bundles, leases, collections and imports for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.timestamp_pb2 import Timestamp
from kiln.bundle.v1.bundle_pb2 import (
    Blob,
    Bundle,
    BundleContents,
    CollectGarbageResponse,
    GoldenCheck,
    ImportResult,
    Lease,
)
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from kiln_client.bundles import version_ref
from kiln_client.cli.views import SHORT_DIGEST, pairs, rows
from kiln_client.enums import enum_name


def bundles_view(bundles: Iterable[Bundle]) -> RenderableType:
    """Shows a table of versions."""
    return rows(
        ("version", "contents", "aliases", "digest", "size", "created"),
        (
            (
                version_ref(bundle),
                _contents(bundle),
                ", ".join(bundle.aliases),
                bundle.digest[:SHORT_DIGEST],
                decimal(bundle.size_bytes),
                _create_time(bundle),
            )
            for bundle in bundles
        ),
    )


def bundle_view(bundle: Bundle) -> RenderableType:
    """Shows one version, its blobs and the files of its referrers."""
    summary = pairs(
        (
            ("version", version_ref(bundle)),
            ("contents", _contents(bundle)),
            ("aliases", ", ".join(bundle.aliases) or "none"),
            ("digest", bundle.digest),
            ("graph ABI", bundle.graph_abi_digest),
            ("size", decimal(bundle.size_bytes)),
            ("created", _create_time(bundle)),
            ("golden", enum_name(GoldenCheck.DESCRIPTOR, bundle.golden_check)),
        )
    )
    blobs = _blobs_view("blob", bundle.blobs)
    if not bundle.referrers:
        return Group(summary, blobs)
    return Group(summary, blobs, _blobs_view("referrer", bundle.referrers))


def _blobs_view(kind: str, blobs: Iterable[Blob]) -> RenderableType:
    return rows(
        (kind, "size", "type", "title"),
        ((blob.digest[:SHORT_DIGEST], decimal(blob.size_bytes), blob.media_type, blob.title) for blob in blobs),
    )


def lease_text(lease: Lease) -> Text:
    """Describes one lease in one line."""
    return Text(f"{lease.holder} holds {lease.digest} until {_time(lease.expire_time)}")


def leases_view(leases: Sequence[Lease]) -> RenderableType:
    """Shows one line for each lease."""
    if not leases:
        return Text("no leases", style="dim")
    lines = ((lease.digest[:SHORT_DIGEST], lease.holder, _time(lease.expire_time)) for lease in leases)
    return rows(("bundle", "holder", "until"), lines)


def collection_view(collected: CollectGarbageResponse, *, dry_run: bool) -> RenderableType:
    """Shows the bundles and blobs that a collection has removed, or would remove."""
    removed, kept = ("would remove", "would keep") if dry_run else ("removed", "kept")
    return pairs(
        (
            (removed, f"{collected.deleted_bundle_count} bundles that nothing names"),
            (removed, f"{collected.deleted_blob_count} blobs, {decimal(collected.deleted_size_bytes)}"),
            (kept, f"{collected.kept_blob_count} blobs, {decimal(collected.kept_size_bytes)}"),
        )
    )


def import_view(result: ImportResult) -> RenderableType:
    """Shows the outcome of an import."""
    return pairs(
        (
            ("version", version_ref(result.bundle)),
            ("contents", _contents(result.bundle)),
            ("aliases", ", ".join(result.bundle.aliases) or "none"),
            ("digest", result.bundle.digest),
            ("copied", f"{result.copied_blob_count} blobs, {decimal(result.copied_size_bytes)}"),
            ("present", f"{result.present_blob_count} blobs"),
            *(("warning", warning) for warning in result.warnings),
        )
    )


def _create_time(bundle: Bundle) -> str:
    return _time(bundle.create_time) if bundle.HasField("create_time") else ""


def _contents(bundle: Bundle) -> str:
    return enum_name(BundleContents.DESCRIPTOR, bundle.contents)


def _time(time: Timestamp) -> str:
    return f"{time.ToDatetime():%Y-%m-%d %H:%M:%S}"
