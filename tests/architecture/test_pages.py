"""Pages point at what exists: links between pages, and the glossary's paths."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.repository import ROOT

PAGES = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
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
