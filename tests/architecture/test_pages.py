"""Pages point at what exists: links between pages, paths of the glossary and of CONTRIBUTING.md, architectures."""

import re
from pathlib import Path

import pytest

from compiler_svc.models.registry import list_families, list_nested_families
from tests.repository import ROOT, list_tracked

LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", list_tracked("*.md"))
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), link
        assert not anchor or anchor in anchors_of(linked), link


def test_paths_of_the_glossary_exist() -> None:
    rows = re.findall(r"^\| .+ \| `([^`]+)` \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    assert len(rows) > 40
    missing = [path for path in rows if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()]
    assert missing == []


def test_paths_of_contributing_exist() -> None:
    """Paths with a folder, but for those with a part that stands for another, such as NAME or *."""
    spans = re.findall(r"`([a-z._][\w./-]*/[\w./-]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    paths = {path for path in spans if not re.search("NAME|SERVICE|NNNN", path)}
    assert len(paths) > 60
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_architecture_has_a_row_in_the_page_of_models() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/models.md").read_text(), re.M)
    assert set(rows) == {*list_families(), *list_nested_families()}
    assert len(rows) == len(set(rows))
