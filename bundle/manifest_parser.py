"""Reads manifests: unknown ABI versions, required features, flags and submodels are errors.

Readers ignore unknown fields, and pass on the bytes of a manifest: encoding it anew would lose these fields, and change
the digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from bundle.abi.outputs import list_flags
from bundle.abi.submodels import SUBMODELS
from bundle.errors import AbiUnsupported, ManifestInvalid
from bundle.manifest import ABI_VERSION, Manifest

#: What a manifest may require of its readers, in `required_features`, by name with the meaning. A field that an older
#: reader must not ignore comes with a feature; any other new field is optional, and older readers ignore it.
FEATURES: Final[Mapping[str, str]] = MappingProxyType({})

_StructT = TypeVar("_StructT", bound=msgspec.Struct)


def parse_manifest(data: bytes, *, digest: str = "") -> Manifest:
    """Reads a manifest. Ignores unknown fields; known ones must follow the schema."""
    # In this order, because another ABI version or an unknown feature may give every other field another form.
    version = _decode(data, _AbiVersion, digest).abi_version
    if version != ABI_VERSION:
        raise AbiUnsupported("abi_version", str(version), str(ABI_VERSION))
    unknown = sorted(set(_decode(data, _RequiredFeatures, digest).required_features) - FEATURES.keys())
    if unknown:
        raise AbiUnsupported("required_features", ", ".join(unknown), ", ".join(sorted(FEATURES)) or "none")
    manifest = _decode(data, Manifest, digest)
    try:
        manifest.to_json()
    except ValueError as error:
        # Large integers, for example: the weights of another checkpoint come with a manifest made of this one.
        raise ManifestInvalid(str(error), digest) from error
    _check_is_served(manifest)
    return manifest


def _decode(data: bytes, record: type[_StructT], digest: str) -> _StructT:
    try:
        return msgspec.json.decode(data, type=record)
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(str(error), digest) from error


def _check_is_served(manifest: Manifest) -> None:
    flags = list_flags()
    served = [name for name, submodel in SUBMODELS.items() if submodel.is_served]
    for executable in manifest.executables:
        path = f"executables[{executable.tag}]"
        unknown = sorted(set(executable.flags) - flags)
        if unknown:
            raise AbiUnsupported(f"{path}.flags", ", ".join(unknown), ", ".join(sorted(flags)))
        if executable.submodel not in served:
            raise AbiUnsupported(f"{path}.submodel", executable.submodel, ", ".join(served))


class _AbiVersion(msgspec.Struct):
    """The only field that manifests of every ABI version have."""

    abi_version: int


class _RequiredFeatures(msgspec.Struct):
    """The field that all manifests of this ABI version have in the same form."""

    required_features: tuple[str, ...] = ()
