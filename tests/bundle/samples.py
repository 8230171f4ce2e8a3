"""A small but complete bundle: two ranks, two executables, a tokenizer."""

from __future__ import annotations

from typing import Literal

from bundle.blob_writer import StoredBlob
from bundle.digest import sha256_bytes
from bundle.layout import Layout
from bundle.manifest import (
    ABI_VERSION,
    ConstantBinding,
    Executable,
    Limits,
    Manifest,
    Sampling,
    StateLayout,
    StateTensor,
    Submodel,
    Target,
    TensorSpec,
    Tokenizer,
    TokenizerFile,
    Tokens,
    WeightSet,
    WeightShard,
    WeightTensor,
)
from bundle.oci import IMAGE_MANIFEST_TYPE, TOKENIZER_TYPE, WEIGHTS_TYPE, BlobDescriptor
from bundle.writer import BundleWriter
from targets.cpu import AOTI

#: Every file of the sample bundle: title, media type, bytes.
FILES = (
    ("executables/context_encoding_8.so", AOTI.media_type, b"\x7fELF context encoding" * 40),
    ("executables/token_generation_16.so", AOTI.media_type, b"\x7fELF token generation" * 40),
    ("weights/tp0_sharded_checkpoint.safetensors", WEIGHTS_TYPE, bytes(range(256)) * 64),
    ("weights/tp1_sharded_checkpoint.safetensors", WEIGHTS_TYPE, bytes(reversed(range(256))) * 64),
    ("tokenizer.json", TOKENIZER_TYPE, b'{"model":{"type":"BPE"}}'),
)
DIGESTS = {title: sha256_bytes(data) for title, _, data in FILES}

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
    return Manifest(
        abi_version=ABI_VERSION,
        architecture="LlamaForCausalLM",
        config={"neuron_config": {"seq_len": 16, "tp_degree": 2}},
        checkpoint_digest=sha256_bytes(b"checkpoint"),
        target=Target(kind="cpu", isa="x86-64-v3"),
        optimization_level=1,
        toolchain={"torch": version},
        tp_degree=2,
        executables=()
        if contents == "weights"
        else (_executable("context_encoding", 8), _executable("token_generation", 16)),
        weight_sets=(WeightSet(name="model", shards=shards),),
        state=StateLayout(
            tensors=tuple(
                StateTensor(
                    name=name,
                    dtype="float32",
                    shape=(3, 1, 16, 4),
                    axes=("slot", "kv_head", "position", "head_dim"),
                )
                for name in ("k_cache.0", "v_cache.0")
            ),
            num_slots=2,
            kv_heads_by_rank=((0,), (1,)),
        ),
        sampling=Sampling(
            mode="on_device",
            semantics="hf",
            dynamic=True,
            deterministic=False,
            global_topk=0,
            temperature=1.0,
            top_k=50,
            top_p=0.9,
        ),
        limits=Limits(max_context_length=8, max_length=16, max_new_tokens=None, ctx_batch_size=1, tkg_batch_size=2),
        tokens=Tokens(vocab_size=32, bos=1, eos=(2,), pad=0),
        tokenizer=Tokenizer(
            digest=DIGESTS["tokenizer.json"],
            files=(TokenizerFile(title="tokenizer.json", blob=DIGESTS["tokenizer.json"]),),
            chat_template=None,
        ),
        graph_abi_digest=sha256_bytes(b"graph abi"),
    )


def _executable(submodel: Submodel, bucket: int) -> Executable:
    tag = f"{submodel}_{bucket}"
    return Executable(
        tag=tag,
        submodel=submodel,
        bucket=(bucket,),
        batch_size=1,
        format="aoti",
        state_convention="in_place",
        blob=DIGESTS[f"executables/{tag}.so"],
        inputs=(TensorSpec(name="input_ids", dtype="int32", shape=(1, bucket)),),
        outputs=(TensorSpec(name="tokens", dtype="int32", shape=(1,)),),
        state=("k_cache.0", "v_cache.0"),
        constants=(ConstantBinding(name="p_lm_head_weight", weight_set="model", tensor="lm_head.weight"),),
        graph_digest=sha256_bytes(tag.encode()),
        flags=("tokens",),
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
