"""What is done to a layout in children that kill themselves; see `tests.kill_points`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bundle.store.layout import Layout
from bundle.store.oci import BUNDLE_TYPE
from bundle.store.referrers import add_referrer
from bundle.store.removal import Needs, collect_garbage, remove_bundle
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier
from bundle.store.writer import BundleWriter
from tests.bundles.samples import FILES, publish_sample, put_chunks, sample_manifest
from tests.kill_points import LAYOUT_CALLS


def make_layouts(directory: Path) -> tuple[str, str]:
    """Makes the layouts that actions begin with; returns the digests of the bundles of versions 1 and 2.

    DIRECTORY/before has bundle 1, with a referrer. DIRECTORY/source has bundle 2, with a referrer.
    DIRECTORY/both has both.
    """
    first = publish_with_referrer(Layout.create(directory / "before"), "1")
    second = publish_with_referrer(Layout.create(directory / "source"), "2")
    both = Layout.create(directory / "both")
    for version in "12":
        publish_with_referrer(both, version)
    return first, second


def publish_with_referrer(layout: Layout, version: str) -> str:
    digest = publish_sample(layout, version=version)
    add_referrer(layout, digest, "a/note", "text/plain", f"about {version}".encode(), title="note")
    collect_garbage(layout, lambda: Needs(bundles=frozenset(entry.digest for entry in layout.read_index().manifests)))
    return digest


def publish(layout: Layout, directory: Path) -> None:
    """Adds files in every way there is: bytes, a copied file, a moved file, a blob written in chunks."""
    scratch = layout.root.with_name(f"{layout.root.name}-scratch")
    with layout.pinning() as pinning:
        writer = BundleWriter(pinning)
        ways = (
            lambda path: path.read_bytes(),
            lambda path: path,
            lambda path: put_chunks(pinning, path.read_bytes(), 4096),
            lambda path: pinning.ingest_file(path, move=True),
            lambda path: path.read_bytes(),
        )
        for number, ((title, media_type, _), way) in enumerate(zip(FILES, ways, strict=True)):
            writer.add_blob(way(scratch / str(number)), media_type, title)
        writer.publish(sample_manifest(version="2"))


def copy(layout: Layout, directory: Path) -> None:
    source = Layout(directory / "source")
    digest = next(entry.digest for entry in source.read_index().manifests if entry.artifact_type == BUNDLE_TYPE)
    copy_bundle(source, layout, digest, verifier=BlobVerifier(None), ref_name="prod")


def remove(layout: Layout, directory: Path) -> None:
    remove_bundle(layout, (directory / "second").read_text())


def collect(layout: Layout, directory: Path) -> None:
    needs = Needs(bundles=frozenset({(directory / "first").read_text()}))
    collect_garbage(layout, lambda: needs)


#: What is done, and in a copy of which layout.
ACTIONS: dict[str, tuple[Callable[[Layout, Path], None], str]] = {
    "publish": (publish, "before"),
    "copy": (copy, "before"),
    "remove": (remove, "both"),
    "collect": (collect, "both"),
}


CALLS = LAYOUT_CALLS


def prepare(action: str, directory: str) -> Callable[[Path], Callable[[], None]]:
    """The action on a copy of a layout in the directory, with the files of a bundle beside it."""

    def prepare_child(root: Path) -> Callable[[], None]:
        scratch = root.with_name(f"{root.name}-scratch")
        scratch.mkdir()
        for number, (_, _, data) in enumerate(FILES):
            (scratch / str(number)).write_bytes(data)
        layout = Layout(root)
        return lambda: ACTIONS[action][0](layout, Path(directory))

    return prepare_child
