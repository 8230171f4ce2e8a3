"""Reads the model card of a checkpoint: the metadata at the head of its README.md, as the Hugging Face Hub has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml
from huggingface_hub.repocard import metadata_load
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from bundle.store.annotations import Origin
from compiler_svc.weights.checkpoint import Checkpoint

MODEL_CARD: Final = "README.md"


def read_origin(checkpoint: Checkpoint) -> tuple[Origin, tuple[str, ...]]:
    """Reads what a checkpoint's model card says of its origin, and warnings about what cannot be read.

    A card is prose with some metadata, so one that cannot be read fails no build.
    """
    path = next((file.path for file in checkpoint.describing_files if file.path.name == MODEL_CARD), None)
    if path is None:
        return Origin(), ()
    try:
        metadata = metadata_load(path) or {}
    # A RecursionError comes from values that are nested too deeply.
    except (ValueError, OSError, RecursionError, yaml.YAMLError) as error:
        problem = f"the metadata of {MODEL_CARD} are broken: {' '.join(str(error).split())}"
        return Origin(), (f"model: the bundle names no licence, because {problem}",)
    return Origin(licenses=find_licenses(metadata), base_name=_find_base_name(metadata)), ()


def find_licenses(metadata: Mapping[str, Any]) -> str | None:
    """Finds the licences in a model card's metadata, as an SPDX expression; None without a licence.

    Names that SPDX does not have begin with `LicenseRef-`. Metadata are such as `{"license": "apache-2.0"}`, or
    `{"license": "other", "license_name": "falcon"}`.
    """
    given = metadata.get("license")
    names = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str) and name.strip()]
    if names == ["other"] and isinstance(metadata.get("license_name"), str):
        names = [metadata["license_name"]]
    return " AND ".join(map(_write_spdx, names)) or None


def _write_spdx(name: str) -> str:
    try:
        expression = str(canonicalize_license_expression(name))
    except InvalidLicenseExpression:
        return f"LicenseRef-{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-') or 'unnamed'}"
    return f"({expression})" if " OR " in expression else expression


def _find_base_name(metadata: Mapping[str, Any]) -> str | None:
    given = metadata.get("base_model")
    names = given if isinstance(given, list) else [given]
    return names[0] if len(names) == 1 and isinstance(names[0], str) and names[0] else None
