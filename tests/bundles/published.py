"""Bundles for fake ranks in a real layout, and a BundleService over it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import msgspec
from kiln.bundle.v1 import bundle_pb2, bundle_pb2_grpc

from bundle.digest import sha256_bytes
from bundle.errors import BundleError
from bundle.manifest import BundledAdapter, Manifest, Tokenizer, TokenizerFile
from bundle.store.layout import Layout
from bundle.store.oci import TOKENIZER_TYPE, WEIGHTS_TYPE
from bundle.store.reader import open_bundle
from bundle.store.writer import BundleWriter
from targets.cpu import EXPORTED_PROGRAM
from tests.checkpoints.tokenizer_files import byte_level
from tests.ranks.fakes import BIAS, make_manifest

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tyrant' %}{{ raise_exception('no tyrants') }}{% endif %}"
    "{{ bos_token }}{{ message.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def tokenizer_json() -> bytes:
    """A tokenizer whose ids all fit the fake's vocabulary: the corpus spelt by its first hundred bytes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        byte_level().save(str(path))
        return path.read_bytes()


TOKENIZER_JSON = tokenizer_json()
OTHER_TOKENIZER_JSON = TOKENIZER_JSON + b"\n"


def publish(
    layout: Layout,
    *,
    bias: int = BIAS,
    tokenizer: bytes | None = TOKENIZER_JSON,
    chat_template: str | None = CHAT_TEMPLATE,
    chat_templates: dict[str, str] | None = None,
    executable: bytes = b"executable",
    has_executables: bool = True,
    has_weights: bool = True,
    adapters: Mapping[str, int] | None = None,
    **manifest_options: Any,
) -> str:
    """Publishes a bundle whose weights are a bias; returns its digest.

    Each of `adapters` adds its number to the bias; without executables and weights, they are all that the bundle has.
    """
    writer = BundleWriter(layout)
    if has_executables:
        writer.add_blob(executable, EXPORTED_PROGRAM.media_type, "executables/fake")
    weights = str(bias).encode()
    if has_weights:
        writer.add_blob(weights, WEIGHTS_TYPE, "weights/tp0_sharded_checkpoint.safetensors")
    described = None
    if tokenizer is not None:
        descriptor = writer.add_blob(tokenizer, TOKENIZER_TYPE, "tokenizer.json")
        described = Tokenizer(
            digest=descriptor.digest,
            files=(TokenizerFile(title="tokenizer.json", blob=descriptor.digest),),
            chat_template=chat_template,
            chat_templates=chat_templates or {},
        )
    manifest: Manifest = make_manifest(
        executable_blob=sha256_bytes(executable),
        weights_blob=sha256_bytes(weights),
        weights_size_bytes=len(weights),
        tokenizer=described,
        **manifest_options,
    )
    if not has_executables:
        manifest = msgspec.structs.replace(manifest, executables=())
    manifest = msgspec.structs.replace(
        manifest, adapters=tuple(_add_adapter(writer, manifest, *one) for one in (adapters or {}).items())
    )
    if not has_weights and not has_executables:
        manifest = msgspec.structs.replace(manifest, weight_sets=())
    elif not has_weights:
        weight_set, *mutable = manifest.weight_sets
        shards = [msgspec.structs.replace(shard, blob=None, size_bytes=0) for shard in weight_set.shards]
        weight_sets = (msgspec.structs.replace(weight_set, shards=tuple(shards)), *mutable)
        manifest = msgspec.structs.replace(manifest, weight_sets=weight_sets)
    return writer.publish(manifest)


def _add_adapter(writer: BundleWriter, manifest: Manifest, name: str, number: int) -> BundledAdapter:
    """Of the tensors of a slot; a fake rank reads the number from its file."""
    data = str(number).encode()
    blob = writer.add_blob(data, WEIGHTS_TYPE, f"adapters/{name}").digest
    shards = [
        msgspec.structs.replace(shard.entry(), blob=blob, size_bytes=len(data))
        for shard in manifest.shards(mutable=True)
    ]
    return BundledAdapter(name=name, digest=sha256_bytes(data), shards=tuple(shards))


class LayoutBundleService(bundle_pb2_grpc.BundleServiceServicer):
    """Serves one layout; references are digests, or names that a test gives."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.names: dict[str, str] = {}
        #: Name and number of the versions of bundles, by digest; others have none.
        self.versions: dict[str, tuple[str, int]] = {}
        self.blobs_read: list[str] = []
        self.flipped: set[str] = set()
        self.extra_bytes = 0
        self.fail_after_bytes: int | None = None
        self.lookups: list[str] = []
        self.is_away = False
        #: (holder, digest) of each lease, and how often it was taken.
        self.leases: Counter[tuple[str, str]] = Counter()

    async def GetBundle(self, request: Any, context: Any) -> bundle_pb2.GetBundleResponse:  # noqa: N802
        self.lookups.append(request.ref)
        await self._require_presence(context)
        digest = self.names.get(request.ref, request.ref)
        if not digest.startswith("sha256:") or not self.layout.has(digest):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no bundle {request.ref!r}: nothing has v1")
        try:
            bundle = open_bundle(self.layout, digest)
        except BundleError as error:
            await context.abort(grpc.StatusCode[error.code or "INTERNAL"], str(error))
        blobs = [
            bundle_pb2.Blob(
                digest=blob.digest, size_bytes=blob.size_bytes, media_type=blob.media_type, title=blob.title
            )
            for blob in bundle.blobs
        ]
        name, version = self.versions.get(digest, ("", 0))
        return bundle_pb2.GetBundleResponse(
            bundle=bundle_pb2.Bundle(
                name=name, version=version, digest=digest, manifest_json=bundle.manifest_json, blobs=blobs
            )
        )

    async def ReadBlob(self, request: Any, context: Any) -> AsyncIterator[bundle_pb2.ReadBlobResponse]:  # noqa: N802
        self.blobs_read.append(request.digest)
        data = bytearray(self.layout.blob_path(request.digest).read_bytes())
        if request.digest in self.flipped:
            data[0] ^= 1
        data += bytes(self.extra_bytes)
        for start in range(0, len(data), 1000):
            if self.fail_after_bytes is not None and start >= self.fail_after_bytes:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
            yield bundle_pb2.ReadBlobResponse(data=bytes(data[start : start + 1000]))

    async def LeaseBundle(self, request: Any, context: Any) -> bundle_pb2.LeaseBundleResponse:  # noqa: N802
        await self._require_presence(context)
        if not self.layout.has(request.ref):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no bundle {request.ref}")
        assert request.duration.ToSeconds() == 24 * 3600
        self.leases[request.holder, request.ref] += 1
        return bundle_pb2.LeaseBundleResponse()

    async def ReleaseLease(self, request: Any, context: Any) -> bundle_pb2.ReleaseLeaseResponse:  # noqa: N802
        await self._require_presence(context)
        had = self.leases.pop((request.holder, request.digest), 0)
        return bundle_pb2.ReleaseLeaseResponse(released_count=int(had > 0))

    async def _require_presence(self, context: Any) -> None:
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
