"""Real builds by the worker's compiler: one of their own would first load what builds need, which takes longer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from bundle.store.layout import Layout
from tests.servers.running_compiler import Client
from tests.servers.stack import Stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(stack.compiler) as channel:
        yield Client(channel)


@pytest.fixture
def layout(stack: Stack) -> Layout:
    """The store of the compiler."""
    return Layout(stack.home / "store")
