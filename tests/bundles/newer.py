"""Bundles as a later release may write them: with fields that this one does not know."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from bundle.store.layout import Layout
from bundle.store.oci import MANIFEST_TITLE
from bundle.store.reader import open_bundle
from bundle.store.writer import register_bundle

#: Neither as canonical JSON would write them, nor within what it can write.
NEW_FIELDS: dict[str, Any] = {"zebra": {"stripes": 2**70, "b": 1.50}, "aardvark": None}


def publish_newer(layout: Layout, digest: str, **fields: Any) -> str:
    """Publishes a copy of a bundle whose manifest has more fields, spaces, and other bytes; returns its digest."""
    bundle = open_bundle(layout, digest)
    document = json.loads(bundle.manifest_json) | NEW_FIELDS | fields
    document["target"]["colour"] = "red"
    stored = layout.put_blob(json.dumps(document, indent=1).encode())
    replaced = {"digest": stored.digest, "size_bytes": stored.size_bytes}
    layers = [
        msgspec.structs.replace(layer, **replaced) if layer.title == MANIFEST_TITLE else layer
        for layer in bundle.image.layers
    ]
    config = msgspec.structs.replace(bundle.image.config, **replaced)
    image = json.loads(msgspec.structs.replace(bundle.image, config=config, layers=tuple(layers)).to_json())
    newer = layout.put_blob(json.dumps(image | {"zebra": [1]}, indent=1).encode()).digest
    register_bundle(layout, newer)
    return newer
