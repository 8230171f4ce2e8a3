"""protobuf ↔ records, for bundles."""

from __future__ import annotations

from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.oci import BlobDescriptor
from compiler_svc.bundle_store import NamedBundle
from compiler_svc.database.versions import Alias, Version
from compiler_svc.wire import timestamp_to_pb


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
    )


def bundle_to_pb(named: NamedBundle) -> pb.Bundle:
    """Writes a bundle with manifest and blobs."""
    bundle = named.bundle
    message = pb.Bundle() if named.version is None else version_to_pb(named.version)
    message.digest = bundle.digest
    message.size_bytes = bundle.size_bytes
    message.graph_abi_digest = bundle.manifest.graph_abi_digest
    message.manifest_json = bundle.manifest.to_json()
    message.blobs.extend(map(_blob_to_pb, bundle.blobs))
    return message


def alias_to_pb(alias: Alias) -> pb.Alias:
    """Writes an alias."""
    return pb.Alias(name=alias.name, alias=alias.alias, version=alias.version, etag=alias.etag)


def _blob_to_pb(blob: BlobDescriptor) -> pb.Blob:
    return pb.Blob(digest=blob.digest, size_bytes=blob.size_bytes, media_type=blob.media_type, title=blob.title)
