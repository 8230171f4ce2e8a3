"""Licences and base models that model cards name, as annotations of a bundle say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bundle.store.annotations import Origin
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.model_card import find_licenses, read_origin
from tests.checkpoints.random_weights import write_checkpoint
from tests.repository import ROOT


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


def read(directory: Path, card: str) -> Origin:
    (directory / "README.md").write_text(card)
    origin, warnings = read_origin(Checkpoint.open(directory))
    assert not warnings
    return origin


@pytest.mark.parametrize(
    ("metadata", "licenses"),
    [
        ({}, None),
        ({"license": None}, None),
        ({"license": ""}, None),
        ({"license": 2.0}, None),
        ({"license": "apache-2.0"}, "Apache-2.0"),
        ({"license": "cc-by-nc-4.0"}, "CC-BY-NC-4.0"),
        ({"license": "llama3.1"}, "LicenseRef-llama3.1"),
        ({"license": "bigscience-openrail-m"}, "LicenseRef-bigscience-openrail-m"),
        ({"license": "other"}, "LicenseRef-other"),
        ({"license": "other", "license_name": "Falcon (180B) licence"}, "LicenseRef-Falcon-180B-licence"),
        ({"license": "???"}, "LicenseRef-unnamed"),
        ({"license": ["mit", "apache-2.0", "gemma"]}, "MIT AND Apache-2.0 AND LicenseRef-gemma"),
        ({"license": ["mit or apache-2.0", "isc"]}, "(MIT OR Apache-2.0) AND ISC"),
    ],
)
def test_licences_are_an_spdx_expression(metadata: dict[str, Any], licenses: str | None) -> None:
    assert find_licenses(metadata) == licenses


def test_the_base_is_the_one_model_that_the_card_names(directory: Path) -> None:
    assert read(directory, "---\nlicense: mit\nbase_model: owner/base\n---\n# Tiny") == Origin("MIT", "owner/base")
    assert read(directory, "---\nbase_model: [owner/base]\n---\n") == Origin(None, "owner/base")
    assert read(directory, "---\nbase_model: [owner/a, owner/b]\n---\n") == Origin()
    assert read(directory, "---\nbase_model: {a: b}\n---\n") == Origin()


def test_without_card_or_metadata_nothing_is_said(directory: Path) -> None:
    assert read_origin(Checkpoint.open(directory)) == (Origin(), ())
    assert read(directory, "# Tiny\n\n---\n\nlicense: mit") == Origin()
    assert read(directory, "---\n\n---\n") == Origin()


@pytest.mark.parametrize(
    "card",
    [
        b"---\nlicense: [\n---\n",
        b"---\n- mit\n---\n",
        b"---\nlicense: \xff\n---\n",
        b"---\na: " + b"[" * 3000 + b"\n---\n",
    ],
)
def test_a_broken_card_is_a_warning(directory: Path, card: bytes) -> None:
    (directory / "README.md").write_bytes(card)
    origin, (warning,) = read_origin(Checkpoint.open(directory))
    assert origin == Origin()
    assert warning.startswith("model: the bundle names no licence, because the metadata of README.md are broken: ")
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("name", "base"), [("kiln-tiny", None), ("kiln-tiny-draft", None), ("kiln-tiny-pirate", "kiln-tiny")]
)
def test_the_shipped_models_name_licence_and_base(name: str, base: str | None) -> None:
    assert read_origin(Checkpoint.open(ROOT / "examples/models" / name)) == (Origin("CC0-1.0", base), ())
