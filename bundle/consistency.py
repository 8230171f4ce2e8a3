"""Checks that the parts of a manifest fit each other, which its schema cannot express."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from bundle.abi.inputs import BLOCK_KV, inputs_of
from bundle.abi.outputs import outputs_of
from bundle.abi.state import AXES
from bundle.abi.tensor import AbiTensor
from bundle.errors import ManifestInvalid
from bundle.manifest import BundledAdapter, Executable, Manifest, WeightSet, WeightShard
from bundle.neff_consistency import find_neff_problems
from bundle.reference import ACCEPTED_ADAPTER_NAME, is_adapter_name


def check_consistency(manifest: Manifest, *, digest: str = "") -> None:
    """Checks that every name in the manifest refers to something and that every rank has its part."""
    for problem in _find_problems(manifest):
        raise ManifestInvalid(problem, digest)


def _find_problems(manifest: Manifest) -> Iterator[str]:
    yield from _find_duplicates("executables", [executable.tag for executable in manifest.executables])
    yield from _find_duplicates("weight_sets", [weight_set.name for weight_set in manifest.weight_sets])
    yield from _find_duplicates("state.tensors", [tensor.name for tensor in manifest.state.tensors])
    yield from _find_duplicates("adapters", [adapter.name for adapter in manifest.adapters])
    if not manifest.executables and all(shard.blob is None for shard in manifest.written_shards()):
        yield "the bundle has neither executables nor weights nor adapters"
    yield from _find_state_problems(manifest)
    for weight_set in manifest.weight_sets:
        yield from _find_weight_set_problems(weight_set, manifest.tp_degree)
    for adapter in manifest.adapters:
        yield from _find_adapter_problems(adapter, manifest)
    for executable in manifest.executables:
        yield from _find_executable_problems(executable, manifest)
    yield from _find_ring_problems(manifest)


def _find_state_problems(manifest: Manifest) -> Iterator[str]:
    heads = manifest.state.kv_heads_by_rank
    if len(heads) != manifest.tp_degree:
        yield f"state.kv_heads_by_rank has {len(heads)} entries at tp {manifest.tp_degree}"
    for rank, of_rank in enumerate(heads):
        if any(head < -1 for head in of_rank):
            yield f"state.kv_heads_by_rank[{rank}] is {list(of_rank)}; accepted: heads from 0, and -1 for padding"
        # One executable serves all ranks.
        if len(of_rank) != len(heads[0]):
            yield f"state.kv_heads_by_rank has {len(heads[0])} heads on rank 0 and {len(of_rank)} on rank {rank}"
    state = manifest.state
    kind = "block" if state.num_blocks else "slot"
    for tensor in state.tensors:
        if len(tensor.axes) != len(tensor.shape):
            yield f"state.tensors[{tensor.name}] has {len(tensor.axes)} axes and {len(tensor.shape)} dimensions"
        # Executables index with what steps say, and steps go by the numbers of the layout.
        sizes = dict(zip(tensor.axes, tensor.shape, strict=False))
        if sizes.get(kind) != state.num_entries:
            scratch = "" if state.has_spare_positions else f", the scratch {kind} included"
            yield f"state.tensors[{tensor.name}] has {sizes}; accepted: {state.num_entries} {kind}s{scratch}"
        if state.block_tokens and sizes.get("position") != state.block_tokens:
            accepted = f"{state.block_tokens} positions, as state.block_tokens says"
            yield f"state.tensors[{tensor.name}] has {sizes}; accepted: {accepted}"
        if state.has_spare_positions and (state.num_blocks or sizes.get("position", 0) <= manifest.limits.max_length):
            accepted = f"slots of at least {manifest.limits.max_length + 1} positions, the last one spare"
            yield f"state.tensors[{tensor.name}] has {sizes}; accepted: {accepted}"
    if (state.num_blocks > 0) != (state.block_tokens > 0):
        numbers = f"num_blocks is {state.num_blocks} and block_tokens {state.block_tokens}"
        yield f"state.{numbers}; accepted: both from 1, or neither"


def _find_ring_problems(manifest: Manifest) -> Iterator[str]:
    largest_step = max((executable.num_row_tokens for executable in manifest.executables), default=1)
    for tensor in manifest.state.tensors:
        needed = tensor.window + largest_step - 1
        if tensor.window and (tensor.window < 0 or tensor.axes != AXES or tensor.num_positions < needed):
            shape = f"axes {', '.join(tensor.axes)} of {list(tensor.shape)} and a window of {tensor.window}"
            accepted = f"slots of at least {needed} positions, which the window and steps of {largest_step} tokens need"
            yield f"state.tensors[{tensor.name}] has {shape}; accepted: {accepted}"


def _find_weight_set_problems(weight_set: WeightSet, tp_degree: int) -> Iterator[str]:
    path = f"weight_sets[{weight_set.name}]"
    yield from _find_shard_problems(path, weight_set.shards, tp_degree)
    if len({shard.blob is None for shard in weight_set.shards}) > 1:
        yield f"{path} has shards with blob and shards without"
    if weight_set.is_mutable and any(shard.blob is not None for shard in weight_set.shards):
        yield f"{path} is mutable and has a blob"
    # An entry is written to all tensors of all ranks.
    entries = {tensor.shape[:1] for shard in weight_set.shards for tensor in shard.tensors}
    if weight_set.is_mutable and (len(entries) != 1 or entries == {()}):
        sizes = ", ".join(sorted(str(list(size)) for size in entries)) or "no tensors"
        yield f"{path} is mutable with first axes of {sizes}; accepted: the same number for all tensors"


def _find_shard_problems(path: str, shards: tuple[WeightShard, ...], tp_degree: int) -> Iterator[str]:
    ranks = sorted(shard.rank for shard in shards)
    if ranks != list(range(tp_degree)):
        yield f"{path} has shards of ranks {ranks} at tp {tp_degree}"
    for shard in shards:
        if (shard.blob is None) != (shard.size_bytes == 0):
            blob = "no blob" if shard.blob is None else "a blob"
            yield f"{path}.shards[{shard.rank}] has {blob} and {shard.size_bytes} bytes"
        yield from _find_duplicates(f"{path}.shards[{shard.rank}].tensors", [tensor.name for tensor in shard.tensors])


def _find_adapter_problems(adapter: BundledAdapter, manifest: Manifest) -> Iterator[str]:
    path = f"adapters[{adapter.name}]"
    if not is_adapter_name(adapter.name):
        yield f"{path} has a name that no request can give; accepted: {ACCEPTED_ADAPTER_NAME}"
    yield from _find_shard_problems(path, adapter.shards, manifest.tp_degree)
    if any(shard.blob is None for shard in adapter.shards):
        yield f"{path} has shards without blob"
    # What a bundle of an adapter alone has must fit the slots of another bundle; its graph ABI digest says which.
    slots = {shard.rank: set(shard.entry().tensors) for shard in manifest.shards(mutable=True)}
    for shard in adapter.shards if manifest.executables or manifest.weight_sets else ():
        if unlike := set(shard.tensors) ^ slots.get(shard.rank, set()):
            names = ", ".join(sorted({tensor.name for tensor in unlike}))
            yield f"{path}.shards[{shard.rank}] differs in {names}; accepted: the tensors of a slot of the mutable set"


def _find_executable_problems(executable: Executable, manifest: Manifest) -> Iterator[str]:
    path = f"executables[{executable.tag}]"
    state = {tensor.name for tensor in manifest.state.tensors}
    for name in executable.state:
        if name not in state:
            yield f"{path}.state names {name!r}, which state.tensors does not have"
    if (BLOCK_KV in executable.flags) != (manifest.state.num_blocks > 0):
        has = "has" if BLOCK_KV in executable.flags else "lacks"
        yield f"{path} {has} the flag {BLOCK_KV}, and state.num_blocks is {manifest.state.num_blocks}"
    inputs, outputs = [spec.name for spec in executable.inputs], [spec.name for spec in executable.outputs]
    yield from _find_duplicates(f"{path}.inputs", inputs)
    yield from _find_duplicates(f"{path}.outputs", outputs)
    yield from _find_others(f"{path}.inputs", inputs, inputs_of(executable.submodel, executable.flags))
    yield from _find_others(f"{path}.outputs", outputs, outputs_of(executable.submodel, executable.flags))
    widths = [spec.shape for spec in executable.inputs if spec.name == "input_ids"]
    if any(len(shape) != 2 for shape in widths):
        yield f"{path}.inputs[input_ids] has {len(widths[0])} dimensions; accepted: 2"
    yield from _find_duplicates(f"{path}.constants", [constant.name for constant in executable.constants])
    tensors = {
        weight_set.name: [{tensor.name for tensor in shard.tensors} for shard in weight_set.shards]
        for weight_set in manifest.weight_sets
    }
    if (executable.state_convention == "aliased") != (executable.neff is not None):
        has = "lacks" if executable.neff is None else "has"
        yield f"{path} {has} neff, and its state_convention is {executable.state_convention}"
    if executable.neff is not None:
        yield from find_neff_problems(f"{path}.neff", executable.neff, executable, manifest)
    for constant in executable.constants:
        if not all(constant.tensor in names for names in tensors.get(constant.weight_set, [set()])):
            yield (
                f"{path}.constants[{constant.name}] takes {constant.tensor!r} of weight set {constant.weight_set!r}, "
                "which some rank does not have"
            )


def _find_others(path: str, names: list[str], accepted: Iterable[AbiTensor]) -> Iterator[str]:
    expected = {tensor.name for tensor in accepted}
    if set(names) != expected:
        yield f"{path} are {', '.join(sorted(names))}; accepted for its flags: {', '.join(sorted(expected))}"


def _find_duplicates(path: str, names: list[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{path} has {count} entries named {name!r}"
