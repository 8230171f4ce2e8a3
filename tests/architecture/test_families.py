"""Only a family's folder and the registry name it: nothing else of the system depends on which model it serves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repository import ROOT

PACKAGES = ("bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc")
FAMILIES = ROOT / "compiler_svc/models/families"
REGISTRY = ROOT / "compiler_svc/models/registry.py"

#: How files would name families that they do not write as their folder is called, or whose name other words contain.
NAMES = {
    "gpt2": r"(?i:gpt_?2)",
    "gpt_neox": r"(?i:gpt[-_ ]?neox)",
    "gptj": r"(?i:gpt[-_]?j)",
    "opt": r"\bOPT(?:\b|For|_)|families\.opt\b",
}

#: Hugging Face's name of a kind of rotary embedding, which several families have.
ROPE_KIND = re.compile(r"llama_?3(?=rope|\b|\")", re.IGNORECASE)
#: A processor whose name begins as that of a family.
PROCESSOR = re.compile(r"granite ?rapids", re.IGNORECASE)
#: Documents that name models: their titles and sections, and options of theirs that name a family.
DOCUMENTS = ("compiler_svc/config/tables", "compiler_svc/config/rules", "compiler_svc/config/transformers_neuronx.py")


def list_families() -> list[str]:
    return sorted(path.parent.name for path in FAMILIES.glob("*/config.py"))


def list_files() -> list[Path]:
    files = (file for package in PACKAGES for kind in ("*.py", "*.cpp", "*.h") for file in (ROOT / package).rglob(kind))
    documents = [ROOT / document for document in DOCUMENTS]
    return [
        file
        for file in files
        if file != REGISTRY and not any(file.is_relative_to(folder) for folder in (FAMILIES, *documents))
    ]


def test_families_are_found() -> None:
    assert {"llama", "mistral", "phi3", "qwen2", "qwen3"} <= set(list_families())
    assert len(list_files()) > 200


@pytest.mark.parametrize("family", list_families())
def test_nothing_else_names_a_family(family: str) -> None:
    name = re.compile(NAMES.get(family, f"(?i:{family.rstrip('0123456789')})"))
    naming = [file for file in list_files() if name.search(PROCESSOR.sub("", ROPE_KIND.sub("", file.read_text())))]
    assert [str(file.relative_to(ROOT)) for file in naming] == []


@pytest.mark.parametrize("file", sorted(FAMILIES.glob("*/*.py")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_families_know_no_other_family(file: Path) -> None:
    others = [f"families.{family}" for family in list_families() if family != file.parent.name]
    assert not any(other in file.read_text() for other in others)
