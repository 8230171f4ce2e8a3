from tests.ranks.toy_bundles import forkservers, toy, toy_directory
from tests.servers.event_loop import pytest_asyncio_loop_factories

__all__ = ["forkservers", "pytest_asyncio_loop_factories", "toy", "toy_directory"]
