from pathlib import Path
from typing import Any

import pytest

from bundle.digest import sha256_bytes
from bundle.store.annotations import ANNOTATIONS, Origin
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.writer import BundleWriter
from tests.bundles.samples import add_sample_files, sample_manifest
from tests.repository import ROOT


def annotate(layout: Layout, origin: Origin | None) -> dict[str, str]:
    writer = BundleWriter(layout)
    add_sample_files(writer)
    return open_bundle(layout, writer.publish(sample_manifest(), origin=origin)).image.annotations or {}


def test_an_image_manifest_says_what_inputs_determine(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "layout")
    described = {
        "dev.kiln.abi-digest": sha256_bytes(b"graph abi"),
        "dev.kiln.isa": "x86-64-v3",
        "dev.kiln.target": "cpu",
        "dev.kiln.tp-degree": "2",
        "dev.kiln.toolchain": '{"torch":"1"}',
    }
    assert annotate(layout, None) == described
    assert annotate(layout, Origin("Apache-2.0", "owner/base")) == described | {
        "org.opencontainers.image.base.name": "owner/base",
        "org.opencontainers.image.licenses": "Apache-2.0",
    }


def test_digests_depend_on_origin_and_manifest_alone(tmp_path: Path) -> None:
    def publish(number: int, origin: Origin) -> str:
        writer = BundleWriter(Layout.create(tmp_path / str(number)))
        add_sample_files(writer)
        return writer.publish(sample_manifest(), origin=origin, ref_name=f"story-v{number}")

    assert publish(1, Origin("MIT")) == publish(2, Origin("MIT")) != publish(3, Origin("Apache-2.0"))


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=lambda annotation: annotation.key)
def test_every_annotation_is_documented(annotation: Any) -> None:
    assert f"`{annotation.key}`" in (ROOT / "docs/operations/promote.md").read_text()
