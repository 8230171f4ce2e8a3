"""The manifest of every test: what the ABI says, and what a test cares about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

import msgspec

from bundle.abi.inputs import BLOCK_KV, COMPUTED_CONTEXT, LEFT_PADDED, PROCESSORS, PROMPT_LOGPROBS, inputs_of
from bundle.abi.outputs import EMBEDDINGS, MAX_PROMPT_CANDIDATES, outputs_of
from bundle.abi.state import AXES, BLOCK_AXES, KINDS, StateLayout, StateTensor
from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import Symbols
from bundle.manifest import (
    ABI_VERSION,
    ADAPTER_WEIGHTS,
    BundledAdapter,
    Executable,
    Limits,
    Manifest,
    Sampling,
    Target,
    TensorSpec,
    Tokens,
    WeightSet,
    WeightShard,
    WeightTensor,
)

DIGEST: Final = "sha256:" + "0" * 64
VOCAB_SIZE: Final = 32

#: Requests choose how to sample; those that do not choose are greedy.
DYNAMIC: Final = Sampling(
    mode="on_device",
    semantics="hf",
    dynamic=True,
    deterministic=False,
    global_topk=50,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    chance="noise_keys",
)
#: Numbers of a hidden state.
HIDDEN_SIZE: Final = 2
_OF_PROMPTS: Final = {LEFT_PADDED, COMPUTED_CONTEXT, PROMPT_LOGPROBS, EMBEDDINGS}
#: The flags of executables that sample so and return logits.
DYNAMIC_FLAGS: Final = ("logits", "noise_keys", "sampling_params", "tokens")


def make_executable(
    submodel: SubmodelName,
    bucket: int,
    batch_size: int,
    *,
    flags: Iterable[str] = DYNAMIC_FLAGS,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 1,
    num_row_blocks: int = 1,
    **changes: Any,
) -> Executable:
    """One executable; of the flags, those that concern its submodel."""
    row = SUBMODELS[submodel]
    tokens = row.tokens if isinstance(row.tokens, int) else bucket
    symbols: Symbols = {
        "R": batch_size,
        "T": tokens,
        "K": 1,
        "N": num_row_blocks,
        "V": vocab_size,
        "rank_V": vocab_size,
        "W": -(-vocab_size // 32),
        "B": vocab_size,
        "L": min(MAX_PROMPT_CANDIDATES, vocab_size),
        "H": HIDDEN_SIZE,
    }
    described = {
        "tag": f"{submodel}_{bucket}" + ("_processors" if PROCESSORS in flags else ""),
        "submodel": submodel,
        "bucket": (bucket,),
        "batch_size": batch_size,
        "inputs": tuple(TensorSpec.of(one, symbols) for one in inputs_of(submodel, set(flags))),
        "outputs": tuple(TensorSpec.of(one, symbols) for one in outputs_of(submodel, set(flags))),
        "state": state_names(num_layers),
        "flags": tuple(sorted(set(flags) - (set() if row.computes_prompts else _OF_PROMPTS))),
    }
    return Executable(**(_UNBUILT | described | changes))


def describe_executable(submodel: Any, **changes: Any) -> Executable:
    """The executable of a traced submodel's specification."""
    described = {field.name: getattr(submodel, field.name) for field in fields(submodel)}
    return Executable(**(_UNBUILT | described | changes))


_UNBUILT: Final[dict[str, Any]] = {
    "format": "exported_program",
    "state_convention": "functional",
    "blob": DIGEST,
    "constants": (),
    "graph_digest": DIGEST,
}


def state_names(num_layers: int) -> tuple[str, ...]:
    """Lists the names of the KV cache tensors in calling order: every kind of layer 0, then of layer 1, …"""
    return tuple(f"{kind}.{layer}" for layer in range(num_layers) for kind in KINDS)


def make_state(
    num_slots: int, *shape: int, num_layers: int = 1, tp_degree: int = 1, num_blocks: int = 0
) -> StateLayout:
    """A KV cache in float32.

    Args:
        shape: KV heads of a rank, positions of a slot or block, dimensions of a head.
        num_blocks: 0: it is made of slots.
    """
    rows, axes = (num_blocks, BLOCK_AXES) if num_blocks else (num_slots, AXES)
    tensors = tuple(
        StateTensor(name=name, dtype="float32", shape=(rows + 1, *shape), axes=axes) for name in state_names(num_layers)
    )
    heads = tuple(tuple(range(shape[0])) for _ in range(tp_degree))
    return StateLayout(
        tensors=tensors,
        num_slots=num_slots,
        kv_heads_by_rank=heads,
        num_blocks=num_blocks,
        block_tokens=shape[1] if num_blocks else 0,
    )


def make_manifest(
    *,
    executables: Sequence[Executable] | None = None,
    num_slots: int = 4,
    ctx_batch_size: int = 1,
    prompt_buckets: Sequence[int] = (8, 16),
    token_buckets: Sequence[int] = (16, 64),
    flags: Iterable[str] = DYNAMIC_FLAGS,
    vocab_size: int = VOCAB_SIZE,
    eos: int = 2,
    max_new_tokens: int | None = None,
    tp_degree: int = 1,
    num_blocks: int = 0,
    block_tokens: int = 0,
    **changes: Any,
) -> Manifest:
    """A bundle of one KV head whose weights are empty.

    Args:
        executables: None: one for each bucket, with `flags`.
        num_blocks: Blocks of `block_tokens` positions; 0: the KV cache is made of slots.
        changes: Fields of the manifest that are otherwise.
    """
    if executables is None:
        shapes: dict[SubmodelName, tuple[Sequence[int], int]] = {
            "context_encoding": (prompt_buckets, ctx_batch_size),
            "token_generation": (token_buckets, num_slots),
        }
        own = {*flags, BLOCK_KV} if num_blocks else flags
        row_blocks = -(-max(token_buckets) // block_tokens) if num_blocks else 1
        executables = [
            make_executable(submodel, bucket, rows, flags=own, vocab_size=vocab_size, num_row_blocks=row_blocks)
            for submodel, (buckets, rows) in shapes.items()
            for bucket in buckets
        ]
    rows = {executable.submodel: executable.batch_size for executable in executables}
    largest = {one.submodel: one.bucket[-1] for one in sorted(executables, key=lambda one: one.bucket)}
    max_length = largest.get("token_generation", token_buckets[-1])
    shards = tuple(WeightShard(rank=rank, blob=DIGEST, size_bytes=1, tensors=()) for rank in range(tp_degree))
    described: dict[str, Any] = {
        "abi_version": ABI_VERSION,
        "architecture": "Test",
        "config": {"neuron_config": {}},
        "checkpoint_digest": DIGEST,
        "target": Target(kind="cpu", isa="x86-64-v3"),
        "optimization_level": 0,
        "toolchain": {},
        "tp_degree": tp_degree,
        "executables": tuple(executables),
        "weight_sets": (WeightSet(name="model", shards=shards),),
        "state": make_state(num_slots, 1, block_tokens or max_length, 1, tp_degree=tp_degree, num_blocks=num_blocks),
        "sampling": DYNAMIC,
        "limits": Limits(
            max_context_length=largest.get("context_encoding", prompt_buckets[-1]),
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            ctx_batch_size=rows.get("context_encoding", ctx_batch_size),
            tkg_batch_size=rows.get("token_generation", num_slots),
        ),
        "tokens": Tokens(vocab_size=vocab_size, bos=1, eos=(eos,), pad=0),
        "tokenizer": None,
        "graph_abi_digest": DIGEST,
    }
    return Manifest(**(described | changes))


def with_mutable_set(
    manifest: Manifest, *shapes: tuple[int, ...], blob: str | None = None, size_bytes: int = 0
) -> Manifest:
    """The bundle with a mutable set of float32 tensors of these shapes on each rank."""
    tensors = tuple(WeightTensor(name=str(one), dtype="float32", shape=shape) for one, shape in enumerate(shapes))
    shards = tuple(
        WeightShard(rank=rank, blob=blob, size_bytes=size_bytes, tensors=tensors) for rank in range(manifest.tp_degree)
    )
    made = WeightSet(name=ADAPTER_WEIGHTS, shards=shards, is_mutable=True)
    return msgspec.structs.replace(manifest, weight_sets=(*manifest.weight_sets, made))


def with_adapter(manifest: Manifest, name: str = "one", **changes: Any) -> Manifest:
    """The bundle with an adapter of float32 tensors [2] and [8, 2] on each rank; changes are to the first shard."""
    tensors = tuple(
        WeightTensor(name=str(one), dtype="float32", shape=shape) for one, shape in enumerate([(2,), (8, 2)])
    )
    shards = [
        WeightShard(rank=rank, blob=f"sha256:{rank + 1:064x}", size_bytes=72, tensors=tensors)
        for rank in range(manifest.tp_degree)
    ]
    shards[0] = msgspec.structs.replace(shards[0], **changes)
    adapter = BundledAdapter(name=name, digest=DIGEST, shards=tuple(shards))
    return msgspec.structs.replace(manifest, adapters=(*manifest.adapters, adapter))


def only_adapter(manifest: Manifest, name: str = "one") -> Manifest:
    """The bundle of an adapter for the executables of another one."""
    return msgspec.structs.replace(with_adapter(manifest, name), executables=(), weight_sets=(), tokenizer=None)
