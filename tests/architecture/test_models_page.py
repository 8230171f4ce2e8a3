"""`docs/models.md` names every architecture that this compiler builds by itself, and no other."""

import re

from compiler_svc.models.registry import list_families, list_nested_families
from tests.repository import ROOT

PAGE = ROOT / "docs/models.md"


def test_every_architecture_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert set(rows) == {*list_families(), *list_nested_families()}
    assert len(rows) == len(set(rows))
