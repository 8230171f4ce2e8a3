"""docs/errors.md says what the code does, and the protos name only errors that exist."""

import re

from tests.architecture.error_table import PAGE, error_classes, render_page
from tests.repository import ROOT


def test_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render_page(), "run `make docs`"


def test_reasons_of_the_protos_exist() -> None:
    known = {error.reason for error in error_classes()}
    text = "".join(path.read_text() for path in (ROOT / "protos/kiln").rglob("*.proto"))
    named = set(re.findall(r"\b[A-Z_]+/([A-Z][A-Z_]+)\b", text))
    assert len(named) > 20
    assert named <= known


def test_reasons_are_well_formed() -> None:
    for error in error_classes():
        assert re.fullmatch(r"[A-Z][A-Z0-9_]{1,62}", error.reason), error
