"""Toy bundles in a store."""

from __future__ import annotations

import msgspec

from bundle.layout import Layout
from bundle.oci import WEIGHTS_TYPE
from bundle.writer import BundleWriter
from targets.cpu import EXPORTED_PROGRAM
from tests.ranks.toy import ToyBundle


def publish_toy(store: Layout, toy: ToyBundle, seed: int) -> str:
    """Publishes a toy bundle with the weights that `make_model` makes of a seed; returns the digest."""
    writer = BundleWriter(store)
    for executable in toy.manifest.executables:
        writer.add_blob(toy.blobs[executable.blob], EXPORTED_PROGRAM.media_type, f"executables/{executable.tag}")
    weights = writer.add_blob(toy.weights[seed], WEIGHTS_TYPE, "weights/tp0_sharded_checkpoint.safetensors")
    (weight_set,) = toy.manifest.weight_sets
    shard = msgspec.structs.replace(weight_set.shards[0], blob=weights.digest, size_bytes=weights.size_bytes)
    weight_sets = (msgspec.structs.replace(weight_set, shards=(shard,)),)
    return writer.publish(msgspec.structs.replace(toy.manifest, weight_sets=weight_sets))
