"""What `QuantizeWeights` refuses before a process begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kiln.compiler.v1 import compiler_pb2 as pb

from compiler_svc.planning.quantize_admission import MAX_MODULES
from tests.checkpoints.quantized import WRITERS
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.refusals import refusal, refused
from tests.servers.running_compiler import Client


def quantize(client: Client, **fields: Any) -> Any:
    defaults = {"model": "tiny", "output": "small"}
    return client.compiler.QuantizeWeights(pb.QuantizeWeightsRequest(**(defaults | fields)))


async def test_requests_that_are_refused(client: Client, home: Path) -> None:
    refuse = "INVALID_ARGUMENT", "CONFIG_INVALID"
    how = await refused(quantize(client, dtype="int3"), *refuse)
    assert how.fields["dtype"] == "got 'int3'; accepted: int8, f8e4m3, int4"
    how = await refused(quantize(client, dtype="f8e5m2"), *refuse)
    assert how.fields["dtype"].endswith("; or the layout nxd")
    how = await refused(quantize(client, layout="gguf"), *refuse)
    assert how.fields["layout"] == "got 'gguf'; accepted: compressed-tensors or nxd"
    how = await refused(quantize(client, modules_to_not_convert=["a"] * (MAX_MODULES + 1)), *refuse)
    assert how.fields.keys() == {"modules_to_not_convert"}
    for output in ("", ".hidden", "small/..", "a\0b"):
        assert (await refused(quantize(client, output=output), *refuse)).fields.keys() == {"output"}
    await refused(quantize(client, output="tiny"), "ALREADY_EXISTS", "OUTPUT_EXISTS")
    how = await refused(quantize(client, output="none/small"), "FAILED_PRECONDITION", "OUTPUT_REFUSED")
    assert "no such parent directory" in how.fields["output"]
    for output in ("/small", "../small", str(home / "models")):
        how = await refusal(quantize(client, output=output))
        assert (how.reason, [*how.fields]) == ("PATH_OUTSIDE_MODEL_ROOTS", ["output"])
    assert (await refusal(quantize(client, model="nowhere"))).reason == "CHECKPOINT_NOT_FOUND"
    WRITERS["int8-channel"].rewrite(write_checkpoint(home / "models" / "packed"))
    how = await refused(quantize(client, model="packed"), "INVALID_ARGUMENT", "CHECKPOINT_QUANTIZED")
    assert how.fields["model"].startswith("got packed, which is quantized already")
    # Its sizes are no multiples of 128.
    await refused(quantize(client, dtype="int4"), "INVALID_ARGUMENT", "NOTHING_TO_QUANTIZE")
    assert {path.name for path in (home / "models").iterdir()} == {"tiny", "packed"}
