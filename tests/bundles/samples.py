"""A small but complete bundle: two ranks, two executables, a tokenizer."""

from __future__ import annotations

from typing import Literal

import msgspec

from bundle.abi.submodels import SubmodelName
from bundle.digest import sha256_bytes
from bundle.manifest import (
    ConstantBinding,
    Executable,
    Manifest,
    Tokenizer,
    TokenizerFile,
    WeightSet,
    WeightShard,
    WeightTensor,
)
from bundle.store.blob_writer import StoredBlob
from bundle.store.layout import Layout
from bundle.store.oci import IMAGE_MANIFEST_TYPE, TOKENIZER_TYPE, WEIGHTS_TYPE, BlobDescriptor
from bundle.store.writer import BundleWriter
from targets.cpu import AOTI
from tests.bundles.manifests import make_executable, make_manifest, make_state, only_adapter

#: Every file of the sample bundle: title, media type, bytes.
FILES = (
    ("executables/context_encoding_8.so", AOTI.media_type, b"\x7fELF context encoding" * 40),
    ("executables/token_generation_16.so", AOTI.media_type, b"\x7fELF token generation" * 40),
    ("weights/tp0_sharded_checkpoint.safetensors", WEIGHTS_TYPE, bytes(range(256)) * 64),
    ("weights/tp1_sharded_checkpoint.safetensors", WEIGHTS_TYPE, bytes(reversed(range(256))) * 64),
    ("tokenizer.json", TOKENIZER_TYPE, b'{"model":{"type":"BPE"}}'),
)
DIGESTS = {title: sha256_bytes(data) for title, _, data in FILES}

#: A version of the sample bundle whose graph ABI differs from that of the others.
OTHER_GRAPHS = "other graphs"

Contents = Literal["full", "executables", "weights"]


def sample_manifest(*, version: str = "1", contents: Contents = "full") -> Manifest:
    """The sample bundle's manifest; `version` makes others of the same blobs."""
    weights = (WeightTensor(name="lm_head.weight", dtype="float32", shape=(32, 8)),)
    shards = tuple(
        WeightShard(
            rank=rank,
            blob=None if contents == "executables" else DIGESTS[f"weights/tp{rank}_sharded_checkpoint.safetensors"],
            size_bytes=0 if contents == "executables" else 256 * 64,
            tensors=weights,
        )
        for rank in range(2)
    )
    executables = (_executable("context_encoding", 8, 1), _executable("token_generation", 16, 2))
    manifest = make_manifest(
        executables=executables,
        architecture="LlamaForCausalLM",
        config={"neuron_config": {"seq_len": 16, "tp_degree": 2}},
        checkpoint_digest=sha256_bytes(b"checkpoint"),
        optimization_level=1,
        toolchain={"torch": version},
        tp_degree=2,
        weight_sets=(WeightSet(name="model", shards=shards),),
        state=make_state(2, 1, 16, 4, tp_degree=2),
        tokenizer=Tokenizer(
            digest=DIGESTS["tokenizer.json"],
            files=(TokenizerFile(title="tokenizer.json", blob=DIGESTS["tokenizer.json"]),),
            chat_template=None,
        ),
        graph_abi_digest=sha256_bytes(b"other abi" if version == OTHER_GRAPHS else b"graph abi"),
    )
    return msgspec.structs.replace(manifest, executables=()) if contents == "weights" else manifest


def _executable(submodel: SubmodelName, bucket: int, batch_size: int) -> Executable:
    tag = f"{submodel}_{bucket}"
    return make_executable(
        submodel,
        bucket,
        batch_size,
        flags=("tokens",),
        format="aoti",
        state_convention="in_place",
        blob=DIGESTS[f"executables/{tag}.so"],
        constants=(ConstantBinding(name="p_lm_head_weight", weight_set="model", tensor="lm_head.weight"),),
        graph_digest=sha256_bytes(tag.encode()),
    )


def add_sample_files(writer: BundleWriter, contents: Contents = "full") -> None:
    """Adds every file of the sample bundle."""
    absent = {"full": "-", "executables": "weights/", "weights": "executables/"}[contents]
    for title, media_type, data in FILES:
        if not title.startswith(absent):
            writer.add_blob(data, media_type, title)


def publish_sample(
    layout: Layout, *, version: str = "1", ref_name: str | None = None, contents: Contents = "full"
) -> str:
    """Publishes the sample bundle; returns its digest."""
    writer = BundleWriter(layout)
    add_sample_files(writer, contents)
    return writer.publish(sample_manifest(version=version, contents=contents), ref_name=ref_name)


def publish_adapter(layout: Layout, name: str = "one", **changes: object) -> str:
    """Publishes an adapter for the sample bundle; returns the digest of the bundle that has nothing else. `changes` are
    to what the manifest says of each rank's file.
    """
    writer, manifest = BundleWriter(layout), only_adapter(sample_manifest(), name)
    (adapter,) = manifest.adapters
    shards = []
    for shard in adapter.shards:
        data, title = f"{name} of rank {shard.rank}".encode(), f"adapters/{name}.tp{shard.rank}.safetensors"
        blob = writer.add_blob(data, WEIGHTS_TYPE, title)
        described = {"blob": blob.digest, "size_bytes": blob.size_bytes}
        shards.append(msgspec.structs.replace(shard, **described | changes))
    adapter = msgspec.structs.replace(adapter, shards=tuple(shards))
    return writer.publish(msgspec.structs.replace(manifest, adapters=(adapter,)))


def put_chunks(layout: Layout, data: bytes, chunk_size_bytes: int) -> StoredBlob:
    """Writes a blob piece by piece."""
    with layout.new_blob() as blob:
        for start in range(0, len(data), chunk_size_bytes):
            blob.write(data[start : start + chunk_size_bytes])
        return blob.commit()


def list_manifest(layout: Layout, stored: StoredBlob, media_type: str = IMAGE_MANIFEST_TYPE) -> BlobDescriptor:
    """Lists a manifest of any kind in the index, as other tools do."""
    entry = BlobDescriptor(media_type=media_type, digest=stored.digest, size_bytes=stored.size_bytes)
    with layout.lock():
        layout.replace_index(layout.read_index().with_manifest(entry))
    return entry


def unlist_manifest(layout: Layout, digest: str) -> None:
    """Takes a manifest from the index and leaves its blobs, as other tools do."""
    with layout.lock():
        layout.replace_index(layout.read_index().without_manifest(digest))
