"""Tags that repeat in a layout's index what a database says, so that registry tools find bundles by name.

The database is the truth: tags are written after it, and one that it does not know is removed. Such a tag has the
annotation `dev.kiln.ref`, which tags of people and other tools lack. It keeps no bundle from being collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from bundle.reference import Reference
from bundle.store.layout import Layout
from bundle.store.oci import BUNDLE_TYPE, REF_NAME, SOURCE, TITLE, VERSION, BlobDescriptor

#: The reference that a tag stands for, such as `tiny:v1` or `tiny@prod`.
KILN_REF: Final = "dev.kiln.ref"


@dataclass(frozen=True, slots=True)
class WrittenTag:
    """A tag to be written, for a version or an alias; `version` is N of the version `NAME:vN` that it names.

    `source` is what the version was made from, such as a checkpoint's name below its model root; None if unknown.
    """

    reference: Reference
    digest: str
    version: int
    source: str | None

    def annotate(self) -> dict[str, str]:
        """Returns the annotations of the index entry."""
        values = {
            REF_NAME: self.reference.tag,
            TITLE: self.reference.name,
            VERSION: f"v{self.version}",
            SOURCE: self.source,
            KILN_REF: str(self.reference),
        }
        return {key: value for key, value in values.items() if value is not None}


def write_tags(layout: Layout, find_tags: Callable[[], Iterable[WrittenTag]]) -> None:
    """Makes the written tags of the index equal to those of a database. Leaves an index alone that has them already.

    Takes these names from entries of other tools. Bundles that the index does not list get no tag, and none loses its
    place in the index. Calls `find_tags`, which reads the database, with the layout locked, so that of two writers the
    last has the newest.
    """
    with layout.lock():
        index = layout.read_index()
        listed = {entry.digest: entry for entry in index.manifests}
        tags = {tag: one for tag, one in _name_tags(find_tags()).items() if one.digest in listed}
        kept = [entry for entry in index.manifests if not is_written_tag(entry) and entry.ref_name not in tags]
        only_tagged = listed.keys() - {entry.digest for entry in kept}
        manifests = (
            *kept,
            *(msgspec.structs.replace(listed[digest], annotations=None) for digest in sorted(only_tagged)),
            *(
                msgspec.structs.replace(listed[one.digest], artifact_type=BUNDLE_TYPE, annotations=one.annotate())
                for _, one in sorted(tags.items())
            ),
        )
        if manifests != index.manifests:
            layout.replace_index(msgspec.structs.replace(index, manifests=manifests))


def is_written_tag(entry: BlobDescriptor) -> bool:
    """Whether an index entry is a tag that repeats what a database says."""
    return KILN_REF in (entry.annotations or {})


def _name_tags(found: Iterable[WrittenTag]) -> dict[str, WrittenTag]:
    """Maps tags by name. Where names of earlier releases share a tag, the version has it, and of aliases none."""
    by_tag: dict[str, list[WrittenTag]] = {}
    for one in found:
        by_tag.setdefault(one.reference.tag, []).append(one)
    tags: dict[str, WrittenTag] = {}
    for tag, sharing in by_tag.items():
        versions = [one for one in sharing if one.reference.version is not None]
        if len(only := versions or sharing) == 1:
            tags[tag] = only[0]
    return tags
