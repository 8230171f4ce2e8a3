"""The check of a plan's graphs: by processes with torch-xla, which trace submodels without weights."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Final

import pytest

from compiler_svc.config import resolve_config
from compiler_svc.lower.errors import NeuronTraceFailed
from compiler_svc.lower.neuron.hlo_check import Finding
from compiler_svc.lower.neuron.interpreter import check_graph
from compiler_svc.lower.neuron.request import GraphRequest
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.planning.graph_check import GraphCheck, check_graphs, require_checks
from compiler_svc.trace.submodel_document import MAKE_MODULE
from compiler_svc.weights.checkpoint import Checkpoint
from targets.neuron import NEURON_PYTHON
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.neuron.standin import make_interpreter

TARGET: Final = "trn2"
CONFIG: Final[dict[str, Any]] = {
    "seq_len": 32,
    "batch_size": 2,
    "enable_bucketing": True,
    "context_encoding_buckets": [8],
    "token_generation_buckets": [32],
}
SAMPLED: Final = {"on_device_sampling_config": {"dynamic": True, "global_topk": 8}}
TAG: Final = "token_generation_32"


@pytest.fixture(autouse=True)
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python with its own torch-xla, which also finds the submodels of tests."""
    monkeypatch.setenv(NEURON_PYTHON.variable, str(make_interpreter(tmp_path, {})))


def write_model(directory: Path, architecture: str) -> TinyModel:
    name, attributes = next(iter(FAMILIES[architecture].geometries.items()))
    return write_tiny_model(directory / name, attributes, architecture=architecture)


def plan(checkpoint: Checkpoint, **changes: Any) -> BuildPlan:
    document = {"neuron_config": CONFIG | changes}
    resolution = resolve_config(document, checkpoint_dtype="float32", target=TARGET, compiles=True)
    return plan_build(checkpoint, resolution.config.neuron_config, target=TARGET)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"tp_degree": 2} | SAMPLED),
        ("GPT2LMHeadModel", {"torch_dtype": "bfloat16"}),
        ("LlamaForCausalLM", {"quantized": True, "quantization_dtype": "f8e4m3"}),
    ],
    ids=["two-ranks-sampled", "learned-positions", "quantized"],
)
def test_nothing_is_found(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    require_checks(TARGET)
    tiny = write_model(tmp_path, architecture)
    build = plan(tiny.checkpoint, **changes)
    checked = check_graphs(build, tiny.checkpoint.config, tmp_path, target=TARGET, memory_bytes=1 << 30)
    assert checked == GraphCheck(num_graphs=2, num_findings=0, findings=())


def test_a_core_without_memory_for_a_graph(tmp_path: Path) -> None:
    """What counts is weights, state and inputs, though none of them took memory in the check."""
    (finding,) = check(tmp_path, MAKE_MODULE, memory_bytes=1 << 10)
    assert finding.code == "NCC_EVRF009"
    weights = plan(write_model(tmp_path, "LlamaForCausalLM").checkpoint).weights.describe_shard(0, None, 0).tensors
    assert int(finding.operation.split()[-2]) >= 4 * sum(prod(tensor.shape) for tensor in weights)


@pytest.mark.parametrize(
    ("make", "finding"),
    [
        ("make_double", Finding("NCC_ESPP004", "convert", "float32 or narrower", "")),
        ("make_unused", Finding("", "input seq_ids is missing", "each that the submodel has, and each is used", "")),
        (
            "make_written_buffer",
            Finding("", "buffer k_cache.0 is no alias", "an output for each buffer, which takes its memory", ""),
        ),
    ],
)
def test_what_a_lowering_refuses_is_found(tmp_path: Path, make: str, finding: Finding) -> None:
    found = check(tmp_path, f"tests.neuron.refused_modules:{make}")
    assert any(
        (one.code, one.wanted) == (finding.code, finding.wanted) and one.operation.startswith(finding.operation)
        for one in found
    ), found


def test_an_operation_that_torch_xla_does_not_lower(tmp_path: Path) -> None:
    """Its fallback would read numbers that no placeholder has."""
    with pytest.raises(NeuronTraceFailed, match=r"ended with SIGSEGV at compiler_svc/lower/neuron/graph_tracer\.py"):
        check(tmp_path, "tests.neuron.refused_modules:make_fallback")


def test_a_buffer_that_other_graphs_write(tmp_path: Path) -> None:
    assert check(tmp_path, "tests.neuron.refused_modules:make_read_buffer") == ()


def test_an_operator_that_differs_without_functionalization(tmp_path: Path) -> None:
    with pytest.raises(NeuronTraceFailed, match=r"aten::split_with_sizes .* accepted: tensor_split"):
        check(tmp_path, "tests.neuron.refused_modules:make_refused_operator")


def check(directory: Path, make_module: str, *, memory_bytes: int | None = None) -> tuple[Finding, ...]:
    tiny = write_model(directory, "LlamaForCausalLM")
    build = plan(tiny.checkpoint)
    submodel = next(one for one in build.submodels if one.tag == TAG)
    request = GraphRequest(
        top_k="single",
        tag=submodel.tag,
        make_module=make_module,
        document=build.write_submodel(tiny.checkpoint.config, submodel),
        target=TARGET,
        memory_bytes=memory_bytes,
    )
    return check_graph(request, directory).findings
