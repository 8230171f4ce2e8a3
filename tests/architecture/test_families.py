"""Only a family's own file names it: nothing else of the system depends on which model it serves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.sources import SERVING
from tests.repository import ROOT

FAMILIES = ROOT / "compiler_svc/models/families"

#: How files would name families that they do not write as the family's own file is called, or whose name is part of
#: other words.
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
DOCUMENTS = ("compiler_svc/config/tables", "compiler_svc/config/transformers_neuronx.py")


def list_families() -> list[str]:
    return sorted(file.stem for file in FAMILIES.glob("[!_]*.py"))


def list_files() -> list[Path]:
    files = (file for package in SERVING for kind in ("*.py", "*.cpp", "*.h") for file in (ROOT / package).rglob(kind))
    documents = [ROOT / document for document in DOCUMENTS]
    return [file for file in files if not any(file.is_relative_to(folder) for folder in (FAMILIES, *documents))]


def test_families_are_found() -> None:
    assert {"llama", "mistral", "phi3", "qwen2", "qwen3"} <= set(list_families())
    assert len(list_files()) > 200


@pytest.mark.parametrize("family", list_families())
def test_nothing_else_names_a_family(family: str) -> None:
    name = re.compile(NAMES.get(family, f"(?i:{family.rstrip('0123456789')})"))
    naming = [file for file in list_files() if name.search(PROCESSOR.sub("", ROPE_KIND.sub("", file.read_text())))]
    assert [str(file.relative_to(ROOT)) for file in naming] == []


@pytest.mark.parametrize("family", list_families())
def test_families_know_no_other_family(family: str) -> None:
    text = (FAMILIES / f"{family}.py").read_text()
    assert not any(re.search(rf"\bfamilies(\.| import.*\b){other}\b", text) for other in list_families())
