from tests.ranks.engines import is_async, shards, start_engine
from tests.servers.event_loop import pytest_asyncio_loop_factories

__all__ = ["is_async", "pytest_asyncio_loop_factories", "shards", "start_engine"]
