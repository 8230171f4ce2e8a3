"""Room for adapters on trn2, by doubles of Neuron's packages, on cores that the stand-in for libnrt pretends to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.manifest import ADAPTER_WEIGHTS
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.checkpoints.random_weights import CONFIG as MODEL
from tests.checkpoints.random_weights import write_checkpoint
from tests.neuron.host import nrt_library
from tests.neuron.stand_in import make_environment
from tests.servers.running_compiler import Client
from tests.servers.stack import Stack

__all__ = ["nrt_library"]

CONFIG: Final[dict[str, Any]] = {
    "seq_len": 32,
    "enable_bucketing": True,
    "context_encoding_buckets": [8],
    "token_generation_buckets": [32],
    "lora_config": {"max_loras": 2, "max_lora_rank": 4, "target_modules": ["q_proj", "down_proj"]},
}
TAGS: Final = ("context_encoding_8", "token_generation_32")


@pytest.mark.slow
async def test_slots_are_compiled_for_and_written(
    *, client: Client, stack: Stack, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nrt_library: Path
) -> None:
    model, target = str(write_checkpoint(stack.new_model("tiny"))), pb.Target(kind=pb.Target.KIND_TRN2)
    with stack.ordering_neuronx_cc({"answers": dict.fromkeys(TAGS, [0.0] * MODEL["vocab_size"])}):
        built = await client.build(name="neffs-with-room", model=model, neuron_config=CONFIG, target=target)
    bundle = open_bundle(layout, built.digest)
    ((slots,),) = (one.shards for one in bundle.manifest.weight_sets if one.is_mutable)
    named = {tensor.name for tensor in slots.tensors}
    assert len(named) == MODEL["num_hidden_layers"] * 2 * 2
    for executable in bundle.manifest.executables:
        assert executable.neff is not None
        assert named <= {one.tensor for one in executable.neff.inputs if one.kind == "weight"}
        assert {one.tensor for one in executable.constants if one.weight_set == ADAPTER_WEIGHTS} == named
    # A host that the compiler did not see.
    for name, value in make_environment(nrt_library, tmp_path / "host").items():
        monkeypatch.setenv(name, value)
    with RankForkservers() as forkservers:
        group = await RankGroup.start(
            bundle.manifest, bundle.blob_path, num_threads=1, open_forkserver=forkservers.open, cores=(0,)
        )
        try:
            await group.load()
            await group.warm_up()
            await group.write(ADAPTER_WEIGHTS, 1, None)
        finally:
            await group.close()
