"""Toy bundles in a store."""

from __future__ import annotations

import msgspec

from bundle.store.layout import Layout
from bundle.store.oci import WEIGHTS_TYPE
from bundle.store.writer import BundleWriter
from targets.registry import find_format
from tests.ranks.toy import ToyBundle


def publish_toy(store: Layout, toy: ToyBundle, seed: int) -> str:
    """Publishes a toy bundle with the weights that `make_model` makes of a seed; returns the digest."""
    writer = BundleWriter(store)
    for executable in toy.manifest.executables:
        media_type = find_format(executable.format).media_type
        writer.add_blob(toy.blobs[executable.blob], media_type, f"executables/{executable.tag}")
    weight_set, *others = toy.manifest.weight_sets
    # Tests give rank 0 weights of their own.
    paths = toy.shards.get(seed, {}) | {0: toy.weights[seed]}
    shards = []
    for shard in weight_set.shards:
        title = f"weights/tp{shard.rank}_sharded_checkpoint.safetensors"
        weights = writer.add_blob(paths[shard.rank], WEIGHTS_TYPE, title)
        shards.append(msgspec.structs.replace(shard, blob=weights.digest, size_bytes=weights.size_bytes))
    weight_sets = (msgspec.structs.replace(weight_set, shards=tuple(shards)), *others)
    return writer.publish(msgspec.structs.replace(toy.manifest, weight_sets=weight_sets))
