from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler_svc.database import Database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'kiln.db'}")
    yield database
    database.close()
