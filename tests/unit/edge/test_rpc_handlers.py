"""Which calls logs and traces leave out."""

from __future__ import annotations

import pytest

from edge.rpc_handlers import is_probe


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/Info"])
def test_health_and_reflection_are_probes(method: str) -> None:
    assert is_probe(method)


@pytest.mark.parametrize("method", ["/kiln.runtime.v1.GenerationService/Generate", "/vllm.grpc.engine.Vllm/Health"])
def test_calls_of_the_services_are_not(method: str) -> None:
    assert not is_probe(method)
