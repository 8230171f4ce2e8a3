from pathlib import Path

import pytest

from bundle.store.layout import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.create(tmp_path / "layout")
