"""Checks, without reading weights, that a checkpoint fits existing executables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from bundle.abi.digest import compute_graph_abi_digest
from bundle.abi.state import StateLayout
from bundle.digest import canonical_json, sha256_file
from bundle.manifest import Manifest, WeightTensor
from compiler_svc.config import InferenceConfig, resolve_config
from compiler_svc.errors import ConfigInvalid, FeatureNotServed, GraphAbiMismatch
from compiler_svc.planning.build_plan import BuildPlan
from compiler_svc.trace.submodels import describe_adapters, describe_state
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tokenizer_sources import TOKENIZER_FILE

#: The entry of a manifest's configuration that has the model attributes which replace the checkpoint's.
MODEL_ATTRIBUTES: Final = "model_attributes"

#: Its other entries beside the model's attributes.
_CONFIG_NAMES: Final[tuple[str, ...]] = ("neuron_config", "fused_spec_config", "attribute_map")


def read_config(manifest: Manifest) -> InferenceConfig:
    """Reads a bundle's configuration; attributes that are newer than the bundle get their defaults."""
    document: dict[str, Any] = {name: manifest.config[name] for name in _CONFIG_NAMES if name in manifest.config}
    document |= manifest.config.get(MODEL_ATTRIBUTES, {})
    try:
        return resolve_config(document, checkpoint_dtype=None, target=manifest.target.kind).config
    except (ConfigInvalid, FeatureNotServed) as error:
        raise GraphAbiMismatch("neuron_config", "of this version", f"of another one ({error})") from error


def check_weights_fit(manifest: Manifest, plan: BuildPlan) -> None:
    """Checks that the weights of a checkpoint, planned for a bundle's configuration, fit the bundle's executables. If
    model and tensors are equal in everything that counts, so are the graphs: this need not trace them again.
    """
    numeric_config = plan.model.description.numeric_config
    shards = [plan.weights.describe_shard(rank, None, 0) for rank in range(plan.model.tp_degree)]
    described = {
        **numeric_config,
        "tp_degree": plan.model.tp_degree,
        "state": _describe_cache(describe_state(plan.model)),
        "tensors": {shard.rank: _tensor_table(shard.tensors) for shard in shards},
    }
    expected = {
        **{name: manifest.config.get(name) for name in numeric_config},
        "tp_degree": manifest.tp_degree,
        "state": _describe_cache(manifest.state),
        "tensors": {shard.rank: _tensor_table(shard.tensors) for shard in manifest.shards()},
    }
    for attribute, ours, theirs in _find_differences("", _plain(described), _plain(expected)):
        raise GraphAbiMismatch(attribute, _show(ours), _show(theirs))
    digest = compute_graph_abi_digest(
        graph_digests={executable.tag: executable.graph_digest for executable in manifest.executables},
        shards=[*shards, *(shard for one in describe_adapters(plan.model) for shard in one.shards)],
        numeric_config=numeric_config,
        tp_degree=plan.model.tp_degree,
    )
    if digest != manifest.graph_abi_digest:
        raise GraphAbiMismatch("graph_abi_digest", digest, manifest.graph_abi_digest)


def warn_of_other_tokenizer(checkpoint: Checkpoint, manifest: Manifest) -> tuple[str, ...]:
    """Warns if runtimes will refuse the weights beside the executables because their tokenizers differ. The checkpoint
    has what a build has made of its tokenizer; one without any gets the bundle's.
    """
    own = next((file for file in checkpoint.tokenizer_files if file.name == TOKENIZER_FILE), None)
    if own is None or (manifest.tokenizer is not None and sha256_file(own) == manifest.tokenizer.digest):
        return ()
    return (f"model: {TOKENIZER_FILE} differs from that of the executables' bundle, and LoadWeights compares them",)


def _describe_cache(layout: StateLayout) -> dict[str, Any]:
    """The KV cache, but for its positions: the bundle's configuration and the release that compiled it decide these."""
    cache: dict[str, Any] = msgspec.to_builtins(layout)
    for tensor in cache["tensors"]:
        tensor.pop("window", None)
        tensor["shape"] = [
            size for size, axis in zip(tensor["shape"], tensor["axes"], strict=True) if axis != "position"
        ]
    return cache


def _tensor_table(tensors: tuple[WeightTensor, ...]) -> dict[str, Any]:
    return {one.name: {"dtype": one.dtype, "shape": one.shape, "layout": one.layout} for one in tensors}


def _plain(value: Mapping[str, Any]) -> Any:
    return json.loads(canonical_json(msgspec.to_builtins(value, str_keys=True)))


def _find_differences(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            yield from _find_differences(f"{path}.{name}" if path else name, ours.get(name), theirs.get(name))
    elif ours != theirs:
        yield path, ours, theirs


def _show(value: object) -> str:
    return "missing" if value is None else json.dumps(value)
