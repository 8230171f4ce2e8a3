"""Files that `make docs` makes from the code say what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture import config_reference, error_table, leftover_table, sampling_table, scope_table

MADE = {
    config_reference.FILE: config_reference.render_reference,
    error_table.TABLE: error_table.render_table,
    leftover_table.PAGE: lambda: leftover_table.render_page(leftover_table.PAGE.read_text()),
    sampling_table.PAGE: sampling_table.render_page,
    scope_table.PAGE: scope_table.render_page,
}


@pytest.mark.parametrize(("path", "render"), MADE.items(), ids=[path.name for path in MADE])
def test_file_is_what_the_code_says(path: Path, render: Callable[[], str]) -> None:
    assert path.read_text() == render(), "run `make docs`"
