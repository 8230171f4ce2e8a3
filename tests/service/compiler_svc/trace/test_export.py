import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bundle.abi.submodels import SubmodelName
from compiler_svc.trace.export import TracedSubmodel, export_submodel, render_graph
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.headers import write_sparse_checkpoint
from tests.checkpoints.ropes import ROPES
from tests.checkpoints.specs import HOST_SAMPLING
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model
from tests.snippets import run_python

DYNAMIC = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", dynamic=True, global_topk=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("model"), GEOMETRIES["gqa-llama3-tied"] | {"num_hidden_layers": 1})


def export(
    tiny: TinyModel, kind: SubmodelName = "token_generation", bucket: int = 32, **changes: Any
) -> TracedSubmodel:
    spec = tiny.spec(**changes)
    return export_submodel(spec, tiny.plan(dtype=spec.dtype), describe_submodel(spec, kind, bucket))


@pytest.mark.parametrize("kind", ["context_encoding", "token_generation"])
def test_graph_takes_the_tensors_of_the_shard_and_takes_and_returns_what_its_spec_says(
    tiny: TinyModel, kind: SubmodelName
) -> None:
    traced = export(tiny, kind, sampling=DYNAMIC, dtype="bfloat16")
    planned = {tensor.name: tensor for tensor in tiny.plan(dtype="bfloat16").tensors}
    assert {constant.tensor for constant in traced.constants} == planned.keys()
    assert {constant.weight_set for constant in traced.constants} == {"model"}
    for constant in traced.constants:
        parameter = traced.program.state_dict[constant.name]
        assert tuple(parameter.shape) == planned[constant.tensor].rank_shape
    values = {node.name: node.meta["val"] for node in traced.program.graph.nodes if "val" in node.meta}
    state = [(torch.bfloat16, (3, 2, 128 + 1, 8))] * 2
    inputs = [(getattr(torch, tensor.dtype), tensor.shape) for tensor in traced.spec.inputs]
    outputs = [(getattr(torch, tensor.dtype), tensor.shape) for tensor in traced.spec.outputs]
    signature = traced.program.graph_signature
    assert [(values[name].dtype, tuple(values[name].shape)) for name in signature.user_inputs] == inputs + state
    assert [(values[name].dtype, tuple(values[name].shape)) for name in signature.user_outputs] == outputs + state
    assert not signature.buffers_to_mutate
    assert not signature.user_inputs_to_mutate
    assert {value.device.type for value in values.values() if isinstance(value, torch.Tensor)} == {"cpu"}


def test_text_holds_nothing_of_this_process(tiny: TinyModel) -> None:
    text = render_graph(export(tiny, "context_encoding").program)
    assert not re.search(r"0x[0-9a-f]{6}|/[a-z]+/|\.py|line \d|device=meta", text)


def test_digest_tells_graphs_apart(tiny: TinyModel, tmp_path: Path) -> None:
    attributes = GEOMETRIES["gqa-llama3-tied"] | {"num_hidden_layers": 1}
    other_eps = write_tiny_model(tmp_path / "eps", attributes | {"rms_norm_eps": 1e-5})
    other_act = write_tiny_model(tmp_path / "act", attributes | {"hidden_act": "gelu"})
    other_rope = write_tiny_model(tmp_path / "rope", attributes | {"rope_parameters": ROPES["dynamic"]})
    baked = msgspec.structs.replace(DYNAMIC, dynamic=False, temperature=0.5, top_k=5)
    hotter = msgspec.structs.replace(baked, temperature=0.6)
    traced = [
        export(tiny),
        export(tiny, bucket=64),
        export(tiny, "context_encoding", 32),
        export(tiny, dtype="bfloat16"),
        export(tiny, tkg_batch_size=2),
        export(tiny, num_slots=4),
        export(tiny, sampling=DYNAMIC),
        export(tiny, sampling=baked),
        export(tiny, sampling=hotter),
        export(other_eps),
        export(other_act),
        export(other_rope),
    ]
    assert len({one.graph_digest for one in traced}) == len(traced)


@pytest.mark.parametrize("skips_idle", [True, False])
def test_graphs_are_equal_if_their_keys_are(tiny: TinyModel, skips_idle: bool) -> None:
    spec = tiny.spec(skips_idle=skips_idle)
    short, long = (describe_submodel(spec, "token_generation", bucket) for bucket in (24, 64))
    digests = {export_submodel(spec, tiny.plan(), one).graph_digest for one in (short, long)}
    assert (short.graph_key(spec) == long.graph_key(spec)) == skips_idle == (len(digests) == 1)


def test_digest_ignores_weights(tiny: TinyModel, tmp_path: Path) -> None:
    """A fine-tune has its own weights, and frequencies that are equal or not: the graph is the same."""
    attributes = GEOMETRIES["gqa-llama3-tied"] | {"num_hidden_layers": 1}
    stretched = ROPES["llama3"] | {"factor": 5.0}
    fine_tune = write_tiny_model(tmp_path, attributes | {"rope_parameters": stretched, "initializer_range": 0.3})
    assert export(fine_tune).graph_digest == export(tiny).graph_digest


PRINT_DIGESTS = """
import sys
from pathlib import Path
import msgspec
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.specs import HOST_SAMPLING, make_plan, make_spec
checkpoint = Checkpoint.open(Path(sys.argv[1]))
sampling = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", dynamic=True, global_topk=16)
spec = make_spec(checkpoint, sampling=sampling)
for kind in ("context_encoding", "token_generation"):
    print(export_submodel(spec, make_plan(checkpoint), describe_submodel(spec, kind, 32)).graph_digest)
"""


def test_digest_is_the_same_in_every_process(tiny: TinyModel) -> None:
    printed = run_python(PRINT_DIGESTS, tiny.checkpoint.path, PYTHONHASHSEED="1").stdout
    kinds: tuple[SubmodelName, ...] = ("context_encoding", "token_generation")
    assert printed.split() == [export(tiny, kind, 32, sampling=DYNAMIC).graph_digest for kind in kinds]


EXPORT_LARGE = """
import resource, sys
from pathlib import Path
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.specs import make_plan, make_spec
checkpoint = Checkpoint.open(Path(sys.argv[1]))
spec = make_spec(checkpoint, num_slots=64, max_length=4096)
plan = make_plan(checkpoint)
submodel = describe_submodel(spec, "context_encoding", 1024)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_submodel(spec, plan, submodel)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), plan.shard_size_bytes)
"""


def test_export_touches_no_weight_memory(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path)
    grown_bytes, shard_size_bytes = map(int, run_python(EXPORT_LARGE, tmp_path).stdout.split())
    assert shard_size_bytes > 900e6
    assert grown_bytes < 250e6
