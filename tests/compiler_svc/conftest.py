from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from compiler_svc.database.engine import Database
from tests.compiler_svc.random_checkpoint import write_checkpoint
from tests.compiler_svc.running_compiler import Client, DirectedRunner, serve_compiler


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'kiln.db'}")
    yield database
    database.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory for a compiler's state, with one checkpoint, `tiny`."""
    write_checkpoint(tmp_path / "models" / "tiny")
    return tmp_path


@pytest.fixture
async def served(home: Path) -> AsyncIterator[tuple[Client, DirectedRunner]]:
    """A compiler whose builds wait until the test opens the gate."""
    async with serve_compiler(home) as served:
        yield served


@pytest.fixture
def client(served: tuple[Client, DirectedRunner]) -> Client:
    return served[0]


@pytest.fixture
def runner(served: tuple[Client, DirectedRunner]) -> DirectedRunner:
    return served[1]
