"""protobuf ↔ records, for bundles."""

from __future__ import annotations

from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.store.oci import BlobDescriptor
from bundle.store.removal import Collected
from compiler_svc.api.compiler_wire import copy_fields, timestamp_to_pb
from compiler_svc.bundles.importer import ImportedBundle, ImportProgress
from compiler_svc.bundles.store import NamedBundle, contents_of
from compiler_svc.database.leases import Lease
from compiler_svc.database.versions import Alias, Contents, Version
from compiler_svc.records import GoldenMethod


def version_to_pb(version: Version) -> pb.Bundle:
    """Writes a version, without manifest and blobs."""
    return pb.Bundle(
        name=version.name,
        version=version.version,
        digest=version.digest,
        size_bytes=version.size_bytes,
        create_time=timestamp_to_pb(version.create_time_ns),
        aliases=version.aliases,
        graph_abi_digest=version.graph_abi_digest,
        contents=_contents_to_pb(version.contents),
    )


def bundle_to_pb(named: NamedBundle) -> pb.Bundle:
    """Writes a bundle with manifest and blobs."""
    bundle = named.bundle
    message = pb.Bundle() if named.version is None else version_to_pb(named.version)
    message.digest = bundle.digest
    message.size_bytes = bundle.size_bytes
    message.graph_abi_digest = bundle.manifest.graph_abi_digest
    message.manifest_json = bundle.manifest_json
    message.contents = _contents_to_pb(contents_of(bundle))
    message.blobs.extend(map(blob_to_pb, bundle.blobs))
    return message


def golden_check_to_pb(method: GoldenMethod | None) -> pb.GoldenCheck.ValueType:
    """Writes what a bundle was compared by."""
    return pb.GoldenCheck.Value(f"GOLDEN_CHECK_{(method or 'none').upper()}")


def alias_to_pb(alias: Alias) -> pb.Alias:
    """Writes an alias."""
    return copy_fields(pb.Alias, alias)


def lease_to_pb(lease: Lease) -> pb.Lease:
    """Writes a lease."""
    return copy_fields(pb.Lease, lease, expire_time=timestamp_to_pb(lease.expire_time_ns))


def collected_to_pb(collected: Collected) -> pb.CollectGarbageResponse:
    """Writes the sizes that a collection freed and kept."""
    return pb.CollectGarbageResponse(
        deleted_bundle_count=collected.bundle_count,
        deleted_blob_count=collected.freed.blob_count,
        deleted_size_bytes=collected.freed.size_bytes,
        kept_blob_count=collected.kept.blob_count,
        kept_size_bytes=collected.kept.size_bytes,
    )


def import_event_to_pb(event: ImportProgress | ImportedBundle) -> pb.ImportBundleResponse:
    """Writes one event of an import."""
    if isinstance(event, ImportProgress):
        return pb.ImportBundleResponse(progress=copy_fields(pb.ImportProgress, event))
    result = copy_fields(pb.ImportResult, event.transfer, bundle=bundle_to_pb(event.named), warnings=event.warnings)
    return pb.ImportBundleResponse(result=result)


def blob_to_pb(blob: BlobDescriptor) -> pb.Blob:
    """Writes one file of a bundle or of one of its referrers."""
    return copy_fields(pb.Blob, blob)


def _contents_to_pb(contents: Contents) -> pb.BundleContents.ValueType:
    return pb.BundleContents.Value(f"BUNDLE_CONTENTS_{contents.upper()}")
