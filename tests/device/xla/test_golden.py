"""The golden check of bundles for Neuron without a core: a process with torch-xla computes what is compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from bundle.manifest import Manifest
from compiler_svc.golden.check import GoldenResult, compare_steps
from compiler_svc.golden.errors import GoldenMismatch
from compiler_svc.golden.steps import RankSteps
from compiler_svc.lower.errors import XlaRunFailed
from compiler_svc.lower.neuron.xla_runner import XlaRunner, xla_runner
from compiler_svc.models.registry import describe_model
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.token_ids import read_token_ids
from compiler_svc.models.transforms import UNCHANGED, Adapters, ModelChanges, Quantization
from compiler_svc.sharding.writer import write_shards
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodel_document import MAKE_MODULE, write_document
from compiler_svc.trace.submodels import describe_adapters, describe_state, describe_submodel
from targets.neuron import NEURON_PYTHON
from tests.bundles.manifests import describe_executable, make_manifest
from tests.checkpoints.specs import HOST_SAMPLING
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

TIMEOUT_S: Final = 300.0
SUBMODELS: Final = (
    ("context_encoding", 8),
    ("context_encoding", 16),
    ("token_generation", 16),
    ("token_generation", 32),
)
ADAPTED: Final = ModelChanges(adapters=Adapters(slots=AdapterSlots(slots=2, rank=4)))
QUANTIZED: Final = ModelChanges(fuses_qkv=True, quantization=Quantization(format="f8e4m3_per_channel"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), GEOMETRIES["gqa-llama3-tied"])


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[XlaRunner]:
    monkeypatch.setenv(NEURON_PYTHON.variable, sys.executable)
    with xla_runner(tmp_path, timeout_s=TIMEOUT_S) as runner:
        assert runner is not None
        yield runner


def check(
    tiny: TinyModel,
    runner: XlaRunner,
    directory: Path,
    *,
    weights: TinyModel | None = None,
    model_changes: ModelChanges = UNCHANGED,
    **changes: Any,
) -> GoldenResult:
    """Compares a bundle with transformers whose executables are described and do not exist."""
    description = model_changes.apply(describe_model(tiny.checkpoint.config))
    spec = tiny.spec(description=description, **changes)
    plan = tiny.plan(dtype=spec.dtype, tp_degree=spec.tp_degree, description=description)
    manifest = describe(tiny, spec)
    internal = replace(spec, returns_internal=True)
    tensors = plan.describe_shard(0, None, 0).tensors
    submodels = [describe_submodel(internal, *submodel) for submodel in SUBMODELS]
    documents = {
        one.tag: write_document(tiny.checkpoint.config, internal, tensors, one, changes=model_changes)
        for one in submodels
    }
    shards = [directory / f"rank{rank}.safetensors" for rank in range(spec.tp_degree)]
    for rank, path in enumerate(shards):
        with path.open("wb") as file:
            write_shards(plan, (weights or tiny).checkpoint, {rank: file})
    runner.open(MAKE_MODULE, documents, shards)
    steps = RankSteps(runner.run, runner.write_adapter, manifest.tokens.vocab_size)
    return compare_steps(manifest, steps, tiny.checkpoint, method="xla_cpu", changes=model_changes)


def describe(tiny: TinyModel, spec: GraphSpec) -> Manifest:
    manifest = make_manifest(
        executables=[describe_executable(describe_submodel(spec, *submodel)) for submodel in SUBMODELS],
        architecture=spec.description.architecture,
        tp_degree=spec.tp_degree,
        state=describe_state(spec),
        sampling=spec.sampling,
        tokens=read_token_ids(tiny.checkpoint.config, tiny.checkpoint.generation_config, spec.description.vocab_size),
    )
    return msgspec.structs.replace(manifest, weight_sets=(*manifest.weight_sets, *describe_adapters(spec)))


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"sampling": HOST_SAMPLING}, 2e-5),
        ({"sampling": make_sampling(temperature=0.0), "output_logits": False, "tp_degree": 2}, 2e-5),
        ({"sampling": make_sampling(dynamic=True), "output_logits": False, "num_blocks": 12, "block_tokens": 32}, 2e-5),
        ({"sampling": HOST_SAMPLING, "dtype": "bfloat16"}, 5e-2),
        ({"sampling": HOST_SAMPLING, "tp_degree": 2, "model_changes": QUANTIZED}, 2e-5),
        ({"sampling": HOST_SAMPLING, "tp_degree": 2, "model_changes": ADAPTED}, 2e-5),
    ],
    ids=["logits", "two-ranks", "sampled-in-blocks", "bfloat16", "quantized", "room-for-adapters"],
)
def test_logits_and_tokens_are_those_of_transformers(
    tiny: TinyModel, runner: XlaRunner, tmp_path: Path, changes: dict[str, Any], limit: float
) -> None:
    result = check(tiny, runner, tmp_path, **changes)
    assert {one.tag for one in result.executables} == {f"{name}_{bucket}" for name, bucket in SUBMODELS}
    assert all(one.num_steps > 0 for one in result.executables)
    assert result.max_deviation is not None
    assert 0 < result.max_deviation < limit
    assert result.summary.startswith(f"{result.num_prompts} prompts, {result.num_tokens} tokens, computed by XLA")
    assert result.adapter_rank == (4 if changes.get("model_changes") is ADAPTED else 0)


def test_an_adapter_that_changes_nothing_is_found(
    tiny: TinyModel, runner: XlaRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "write_adapter", lambda _slot, _paths: None)
    with pytest.raises(GoldenMismatch, match="logits deviate"):
        check(tiny, runner, tmp_path, sampling=HOST_SAMPLING, model_changes=ADAPTED)


def test_other_weights_are_found(tiny: TinyModel, runner: XlaRunner, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", GEOMETRIES["gqa-llama3-tied"], seed=8)
    with pytest.raises(GoldenMismatch, match="logits deviate"):
        check(tiny, runner, tmp_path, weights=other)


def test_a_process_that_fails_is_named(tiny: TinyModel, runner: XlaRunner, tmp_path: Path) -> None:
    runner.open(MAKE_MODULE, {}, [tmp_path / "nowhere"])
    with pytest.raises(XlaRunFailed, match="token_generation_16 on the CPU"):
        runner.run("token_generation_16", {})
