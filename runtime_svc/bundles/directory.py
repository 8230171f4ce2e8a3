"""Bundles in a directory that the runtime only reads: an OCI image layout, or a directory of such."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bundle.catalog import list_bundles
from bundle.errors import LayoutInvalid
from bundle.layout import Layout
from bundle.reference import Reference

_MARKER: Final = "oci-layout"


class BundleDirectory:
    """Finds bundles by the tags of layouts, which may change at any time."""

    def __init__(self, root: Path) -> None:
        """Takes a layout, or a directory whose sub-directories are layouts.

        Raises:
            LayoutInvalid: `root` is no directory.
        """
        if not root.is_dir():
            raise LayoutInvalid(str(root), "no directory")
        self._root = root

    def list_layouts(self) -> Iterator[Layout]:
        """Yields the layouts that are there now, by name.

        Raises:
            LayoutInvalid: A layout is of another version.
        """
        for folder in (self._root, *sorted(self._root.iterdir())):
            if (folder / _MARKER).exists():
                yield Layout(folder)

    def find(self, reference: Reference) -> str | None:
        """Returns the digest that a reference by name has in the first layout that knows it; None if none does.

        `Reference.tag` is the tag of a version or an alias. `NAME` alone is the newest version, or else the tag of that
        name.

        Raises:
            LayoutInvalid: A layout is broken.
        """
        for layout in self.list_layouts():
            digests = {tag: bundle.digest for bundle in list_bundles(layout) for tag in bundle.tags}
            tag = _find_tag(digests, reference)
            if tag is not None:
                return digests[tag]
        return None


def _find_tag(tags: dict[str, str], reference: Reference) -> str | None:
    name = str(reference.name)
    if reference.version is not None or reference.alias is not None:
        wanted = reference.tag
    else:
        # Versions first, because the tag may be that of an alias: `tiny-prod` is the alias `prod` of `tiny` too.
        versions = {int(match[1]): tag for tag in tags if (match := re.fullmatch(f"{re.escape(name)}-v([0-9]+)", tag))}
        wanted = versions[max(versions)] if versions else name
    return wanted if wanted in tags else None
