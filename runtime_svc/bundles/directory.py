"""Bundles in a directory that the runtime only reads: an OCI image layout, an unpacked bundle, or several of these."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from bundle.errors import BundleNotFound, LayoutInvalid
from bundle.host.reading import reading
from bundle.reference import Reference
from bundle.store.catalog import list_bundles
from bundle.store.layout import Layout
from bundle.store.oci import MANIFEST_TITLE
from bundle.store.reader import Bundle, open_bundle
from bundle.store.verification import BlobVerifier
from runtime_svc.bundles.unpacked import digest_unpacked, open_unpacked

_MARKER: Final = "oci-layout"


class BundleDirectory:
    """Finds bundles by the tags of layouts and the names of unpacked bundles, which may change at any time."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise LayoutInvalid(str(root), "no directory")
        self._root = root

    def list_layouts(self) -> Iterator[Layout]:
        """Yields the layouts that are there now, by name."""
        for folder in self._list_folders():
            if _has(folder, _MARKER):
                yield Layout(folder)

    def list_unpacked(self) -> Iterator[Path]:
        """Yields the folders of the unpacked bundles that are there now, by name; the name of a folder is its tag."""
        for folder in self._list_folders():
            if _has(folder, MANIFEST_TITLE) and not _has(folder, _MARKER):
                yield folder

    def find(self, reference: Reference) -> tuple[str, str] | None:
        """Returns the digest that a reference by name has in the first layout, or else in the unpacked bundles.

        `Reference.tag` is the tag of a version or an alias. `NAME` alone is the newest version, or else the tag of that
        name. With the digest comes the newest version `NAME:vN` that a tag gives the same bundle, empty without one.
        Returns None if nothing has the reference.
        """
        for layout in self.list_layouts():
            digests = {tag: bundle.digest for bundle in list_bundles(layout) for tag in bundle.tags}
            tag = _find_tag(digests, reference)
            if tag is not None:
                same = [one for one, digest in digests.items() if digest == digests[tag]]
                return digests[tag], _name_version(same, reference)
        folders = {folder.name: folder for folder in self.list_unpacked()}
        name = _find_tag(folders, reference)
        return None if name is None else (digest_unpacked(folders[name]), _name_version([name], reference))

    def open(self, digest: str, verifier: BlobVerifier) -> Bundle:
        """Opens the bundle of a digest."""
        for layout in self.list_layouts():
            with suppress(BundleNotFound):
                return open_bundle(layout, digest)
        for folder in self.list_unpacked():
            with suppress(BundleNotFound):
                if digest_unpacked(folder) == digest:
                    return open_unpacked(folder, verifier)
        raise BundleNotFound(digest)

    def _list_folders(self) -> Iterator[Path]:
        yield self._root
        with reading(lambda detail: LayoutInvalid(str(self._root), detail)):
            folders = sorted(self._root.iterdir())
        yield from folders


def _has(folder: Path, name: str) -> bool:
    try:
        return (folder / name).exists()
    except OSError:
        # Another user's, such as `lost+found` of a volume.
        return False


def _find_tag(tags: Collection[str], reference: Reference) -> str | None:
    if reference.version is not None or reference.alias is not None:
        wanted = reference.tag
    else:
        # Versions first, because the tag may be that of an alias: `tiny-prod` is the alias `prod` of `tiny` too.
        versions = _list_versions(tags, reference)
        wanted = versions[max(versions)] if versions else str(reference.name)
    return wanted if wanted in tags else None


def _name_version(tags: Collection[str], reference: Reference) -> str:
    versions = _list_versions(tags, reference)
    return f"{reference.name}:v{max(versions)}" if versions else ""


def _list_versions(tags: Collection[str], reference: Reference) -> dict[int, str]:
    pattern = re.compile(f"{re.escape(str(reference.name))}-v([0-9]+)")
    return {int(match[1]): tag for tag in tags if (match := pattern.fullmatch(tag))}
