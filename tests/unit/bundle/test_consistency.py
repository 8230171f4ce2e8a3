from collections.abc import Callable

import msgspec
import pytest

from bundle.abi.state import BLOCK_AXES
from bundle.consistency import check_consistency
from bundle.errors import ManifestInvalid
from bundle.manifest import ConstantBinding, Manifest, TensorSpec, WeightTensor
from tests.bundles.manifests import DIGEST, only_adapter, with_adapter, with_mutable_set
from tests.bundles.samples import sample_manifest

replace = msgspec.structs.replace


def change_executable(manifest: Manifest, **changes: object) -> Manifest:
    first, *others = manifest.executables
    return replace(manifest, executables=(replace(first, **changes), *others))


def change_shard(manifest: Manifest, **changes: object) -> Manifest:
    (model,) = manifest.weight_sets
    first, *others = model.shards
    return replace(manifest, weight_sets=(replace(model, shards=(replace(first, **changes), *others)),))


def change_state(manifest: Manifest, **changes: object) -> Manifest:
    return replace(manifest, state=replace(manifest.state, **changes))


def change_tensor(manifest: Manifest, **changes: object) -> Manifest:
    first, *others = manifest.state.tensors
    return change_state(manifest, tensors=(replace(first, **changes), *others))


def with_blocks(manifest: Manifest, num_blocks: int, block_tokens: int, *, real_tokens: int | None = None) -> Manifest:
    tensors = []
    for tensor in manifest.state.tensors:
        _, heads, _, head_dim = tensor.shape
        shape = (num_blocks + 1, heads, real_tokens or block_tokens, head_dim)
        tensors.append(replace(tensor, axes=BLOCK_AXES, shape=shape))
    return change_state(manifest, tensors=tuple(tensors), num_blocks=num_blocks, block_tokens=block_tokens)


def with_spare_positions(manifest: Manifest, positions: int) -> Manifest:
    tensors = tuple(
        replace(tensor, shape=(manifest.state.num_slots, tensor.shape[1], positions, tensor.shape[3]))
        for tensor in manifest.state.tensors
    )
    return change_state(manifest, tensors=tensors, has_spare_positions=True)


def drop_weights(manifest: Manifest) -> Manifest:
    """A bundle that `save_sharded_checkpoint: false` makes."""
    sets = tuple(
        replace(one, shards=tuple(replace(shard, blob=None, size_bytes=0) for shard in one.shards))
        for one in manifest.weight_sets
    )
    return replace(manifest, weight_sets=sets)


def with_heads(manifest: Manifest, *heads: tuple[int, ...]) -> Manifest:
    return change_state(manifest, kv_heads_by_rank=heads)


SPEC = TensorSpec(name="x", dtype="int32", shape=())
BINDING = ConstantBinding(name="p", weight_set="model", tensor="lm_head.weight")
#: What the adapter of `with_adapter` takes.
SLOTS = ((3, 2), (3, 8, 2))
OTHER_TENSOR = (WeightTensor(name="other", dtype="float32", shape=()),)


@pytest.mark.parametrize(
    ("change", "has_executables", "has_weights"),
    [
        (lambda m: m, True, True),
        (drop_weights, True, False),
        (lambda m: replace(m, executables=()), False, True),
        (lambda m: with_heads(m, (0, 1), (2, -1)), True, True),
        (lambda m: change_tensor(m, window=9), True, True),
        (lambda m: with_spare_positions(m, m.limits.max_length + 1), True, True),
        (lambda m: with_mutable_set(m, (3, 8, 2), (3,)), True, True),
        (lambda m: with_adapter(with_adapter(with_mutable_set(m, *SLOTS)), "owner/Two:1"), True, True),
        (only_adapter, False, False),
    ],
    ids=[
        "full",
        "executables",
        "weights",
        "padded heads",
        "ring",
        "spare positions",
        "mutable set",
        "adapters",
        "adapter alone",
    ],
)
def test_contents_may_be_executables_or_weights_or_both(
    change: Callable[[Manifest], Manifest], has_executables: bool, has_weights: bool
) -> None:
    manifest = change(sample_manifest())
    check_consistency(manifest)
    assert (manifest.has_executables, manifest.has_weights) == (has_executables, has_weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: change_executable(m, tag="token_generation_16"), "executables has 2 entries named"),
        (lambda m: replace(m, weight_sets=m.weight_sets * 2), "weight_sets has 2 entries named 'model'"),
        (lambda m: change_state(m, tensors=m.state.tensors * 2), r"state\.tensors has 2 entries named 'k_cache\.0'"),
        (lambda m: change_shard(m, tensors=OTHER_TENSOR * 2), r"\[model\]\.shards\[0\]\.tensors has 2 entries"),
        (lambda m: change_tensor(m, axes=("slot",)), r"state\.tensors\[k_cache\.0\] has 1 axes and 4 dimensions"),
        (lambda m: replace(drop_weights(m), executables=()), "neither executables nor weights nor adapters"),
        (lambda m: replace(m, executables=(), weight_sets=()), "neither executables nor weights"),
        (lambda m: change_shard(m, blob=None, size_bytes=0), r"weight_sets\[model\] has shards with blob and shards"),
        (lambda m: change_shard(drop_weights(m), size_bytes=7), r"\[model\]\.shards\[0\] has no blob and 7 bytes"),
        (lambda m: with_mutable_set(m, (3,), blob=DIGEST, size_bytes=9), r"\[adapters\] is mutable and has a blob"),
        (
            lambda m: with_mutable_set(m, (3, 2), (4, 2)),
            r"\[adapters\] is mutable with first axes of \[3\], \[4\]; accepted",
        ),
        (lambda m: with_mutable_set(m, ()), r"\[adapters\] is mutable with first axes of \[\]; accepted: the same"),
        (
            with_mutable_set,
            r"\[adapters\] is mutable with first axes of no tensors; accepted: the same number",
        ),
        (lambda m: with_adapter(only_adapter(m)), r"adapters has 2 entries named 'one'"),
        (lambda m: with_adapter(only_adapter(m), "a b"), r"adapters\[a b\] has a name .*; accepted: 1 to 128 letters"),
        (lambda m: with_adapter(only_adapter(m), "two", rank=1), r"\[two\] has shards of ranks \[1, 1\] at tp 2"),
        (lambda m: with_adapter(only_adapter(m), "two", blob=None, size_bytes=0), r"\[two\] has shards without blob"),
        (lambda m: with_adapter(only_adapter(m), "two", size_bytes=0), r"\[two\]\.shards\[0\] has a blob and 0 bytes"),
        (lambda m: with_adapter(only_adapter(m), "two", tensors=OTHER_TENSOR * 2), r"tensors has 2 entries named"),
        (with_adapter, r"adapters\[one\]\.shards\[0\] differs in 0, 1; accepted: the tensors of a slot"),
        (
            lambda m: with_adapter(with_mutable_set(m, (3, 2), (3, 8, 4))),
            r"adapters\[one\]\.shards\[0\] differs in 1; accepted: the tensors of a slot of the mutable set",
        ),
        (lambda m: change_shard(m, size_bytes=0), r"\[model\]\.shards\[0\] has a blob and 0 bytes"),
        (lambda m: with_heads(m, (0,), (-2,)), r"state\.kv_heads_by_rank\[1\] is \[-2\]; accepted: heads from 0"),
        (lambda m: with_heads(m, (0,), (1, -1)), "has 1 heads on rank 0 and 2 on rank 1"),
        (lambda m: with_blocks(m, 4, 16), r"executables\[context_encoding_8\] lacks the flag block_kv, and state.num_"),
        (
            lambda m: with_blocks(m, 4, 0),
            r"state\.num_blocks is 4 and block_tokens 0; accepted: both from 1, or neither",
        ),
        (
            lambda m: with_blocks(m, 4, 16, real_tokens=8),
            r"state\.tensors\[k_cache\.0\] has \{'block': 5, .*'position': 8, .*; accepted: 16 positions",
        ),
        (
            lambda m: with_spare_positions(m, m.limits.max_length),
            r"has \{'slot': .*; accepted: slots of at least \d+ positions, the last one spare",
        ),
        (lambda m: change_state(m, num_slots=9), r"state\.tensors\[k_cache\.0\] has \{'slot': .*; accepted: 10 slots"),
        (
            lambda m: change_tensor(m, window=10),
            r"k_cache\.0\] has .*\[3, 1, 16, 4\] and a window of 10; accepted: slots of at least 17 positions, which",
        ),
        (
            lambda m: change_tensor(with_blocks(replace(m, executables=()), 4, 16), window=9),
            r"has axes block, .*; accepted: slots of at least 9 positions",
        ),
        (lambda m: change_tensor(m, window=-1), r"and a window of -1; accepted: slots"),
        (lambda m: with_heads(m, (0,)), r"state\.kv_heads_by_rank has 1 entries at tp 2"),
        (lambda m: change_shard(m, rank=1), r"weight_sets\[model\] has shards of ranks \[1, 1\] at tp 2"),
        (lambda m: change_shard(m, tensors=OTHER_TENSOR), r"takes 'lm_head\.weight' of weight set 'model'"),
        (lambda m: change_executable(m, state=("k_cache.7",)), r"executables\[context_encoding_8\]\.state names"),
        (lambda m: change_executable(m, inputs=(SPEC, SPEC)), r"\.inputs has 2 entries named 'x'"),
        (lambda m: change_executable(m, outputs=(SPEC, SPEC)), r"\.outputs has 2 entries named 'x'"),
        (
            lambda m: change_executable(m, inputs=m.executables[0].inputs[1:]),
            r"\.inputs are num_tokens, position_ids, seq_ids; accepted for its flags: input_ids, num_tokens, ",
        ),
        (
            lambda m: change_executable(m, flags=("logits", "tokens")),
            r"\.outputs are tokens; accepted for its flags: logits, tokens",
        ),
        (
            lambda m: change_executable(m, inputs=tuple(replace(one, shape=(8,)) for one in m.executables[0].inputs)),
            r"\.inputs\[input_ids\] has 1 dimensions; accepted: 2",
        ),
        (lambda m: change_executable(m, constants=(BINDING, BINDING)), r"\.constants has 2 entries named 'p'"),
        (
            lambda m: change_executable(m, constants=(replace(BINDING, weight_set="draft"),)),
            r"\.constants\[p\] takes 'lm_head\.weight' of weight set 'draft'",
        ),
    ],
)
def test_part_that_does_not_fit_is_named(change: Callable[[Manifest], Manifest], message: str) -> None:
    with pytest.raises(ManifestInvalid, match=message) as caught:
        check_consistency(change(sample_manifest()), digest="sha256:x")
    assert caught.value.metadata["digest"] == "sha256:x"
