"""The health of a server, of its services, and of what else has a name there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2

from edge.supervision import begin_task

_Status = health_pb2.HealthCheckResponse

#: The health service's name for the server as a whole.
OVERALL: Final = ""
#: SERVING from the first answer to the last. A process that does not say so is to be restarted.
LIVENESS: Final = "liveness"
#: NOT_SERVING while a task in the background fails again and again. No other name depends on it: what a server serves
#: may well go on without.
BACKGROUND: Final = "background"


class Health:
    """Answers `grpc.health.v1` for names that are SERVING or not."""

    def __init__(self, services: Iterable[str], *, always_serving: Iterable[str] = ()) -> None:
        #: What gRPC calls.
        self.servicer: Any = _Servicer()
        self._constant = frozenset({LIVENESS, *always_serving})
        self._serving = dict.fromkeys((OVERALL, LIVENESS, BACKGROUND, *services), True)
        self._is_draining = False
        self._updates: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> frozenset[str]:
        """Every name that has a state."""
        return frozenset(self._serving)

    async def publish(self) -> None:
        """Publishes every state; call it before the server listens."""
        for name in list(self._serving):
            await self._publish(name)

    def set_serving(self, name: str, serving: bool) -> None:
        """Sets the state of a name, also of a new one. Has no effect on most names once the server drains."""
        if self._serving.get(name) is not serving:
            self._serving[name] = serving
            self._begin_publish(name)

    def forget(self, name: str) -> None:
        """Makes a name unknown."""
        if self._serving.pop(name, None) is not None:
            self._begin_publish(name)

    async def drain(self) -> None:
        """Makes every name NOT_SERVING for good, but `liveness` and those that always serve."""
        self._is_draining = True
        await self.publish()

    def _begin_publish(self, name: str) -> None:
        begin_task(self._publish(name), self._updates)

    async def _publish(self, name: str) -> None:
        # The state of now, and not of when the update began: updates of one name may overtake each other.
        await self.servicer.set(name, self._status_of(name))

    def _status_of(self, name: str) -> int:
        serving = self._serving.get(name)
        if serving is None:
            return int(_Status.SERVICE_UNKNOWN)
        is_down = self._is_draining and name not in self._constant
        return int(_Status.SERVING if serving and not is_down else _Status.NOT_SERVING)


class _Servicer(health.aio.HealthServicer):  # type: ignore[misc] # it has no types
    """gRPC's servicer, which never forgets a name; here a forgotten one is as unknown to Check as to Watch."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """Returns the state of a name; NOT_FOUND if it has none."""
        response = await super().Check(request, context)
        if response.status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return response
