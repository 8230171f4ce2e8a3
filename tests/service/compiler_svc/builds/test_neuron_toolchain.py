"""A compiler of a host without Neuron's packages."""

from kiln.compiler.v1 import compiler_pb2 as pb

from tests.servers.refusals import expect, refusal
from tests.servers.running_compiler import Client


async def test_without_neurons_packages(client: Client) -> None:
    target = pb.Target(kind=pb.Target.KIND_TRN2)
    how = expect(await refusal(client.compile(target=target)), "FAILED_PRECONDITION", "NEURON_TOOLCHAIN_MISSING")
    assert "torch-neuronx" in how.metadata["missing"]
    assert "--neuron-python" in how.message
