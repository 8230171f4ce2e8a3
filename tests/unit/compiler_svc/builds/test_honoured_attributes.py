"""Attributes of a configuration, each with what another value of it changes in the plan or in the graphs."""

from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from bundle.abi.outputs import OUTPUTS
from compiler_svc.config import resolve_config
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.trace.export import export_submodel, render_graph
from compiler_svc.trace.submodels import ExecutableSpec
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.random_weights import write_checkpoint
from tests.unit.compiler_svc.builds.honoured_cases import GRAPH_CASES, PLAN_CASES, SAMPLING_VALUES, GraphCase, PlanCase

CACHE_INPUTS = ("seq_ids", "slot_mapping", "active_block_table")
SAMPLED = {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One layer, which is traced in half the time of two."""
    path = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    save_file(kept, path / "model.safetensors")
    return Checkpoint.open(path)


def plan(checkpoint: Checkpoint, **neuron_config: Any) -> BuildPlan:
    document = {"neuron_config": {"seq_len": 32} | neuron_config}
    config = resolve_config(document, checkpoint_dtype="float32").config.neuron_config
    return plan_build(checkpoint, config, target="cpu")


def describe(planned: BuildPlan) -> dict[str, Any]:
    """The part of a plan that executables or the runtime depend on."""
    model, limits = planned.model, planned.limits
    tensors = planned.weights.describe_shard(0, None, 0).tensors
    return {
        "prompts": _join(planned, "context_encoding_"),
        "decodes": _join(planned, "token_generation_"),
        "prefill rows": dict(_shapes(planned.submodels[0]))["input_ids"][0],
        "decode rows": dict(_shapes(planned.submodels[-1]))["input_ids"][0],
        "outputs": " ".join(tensor.name for tensor in planned.submodels[-1].outputs),
        "prompt outputs": " ".join(
            tensor.name for tensor in planned.submodels[0].outputs if OUTPUTS[tensor.name].is_reported
        ),
        "slots": model.num_slots,
        "KV positions": model.max_length,
        "blocks": (model.num_blocks, model.block_tokens),
        "cache inputs": " ".join(one for one in dict(_shapes(planned.submodels[-1])) if one in CACHE_INPUTS),
        "left padded": " ".join(one.submodel for one in planned.submodels if "left_padded" in one.flags),
        "prefix caching": planned.serving.prefix_caching,
        "truncates prompts": planned.serving.input_truncation,
        "skips warm-up": planned.serving.skip_warmup,
        "prompt": limits.max_context_length,
        "sequence": limits.max_length,
        "new tokens": limits.max_new_tokens,
        "weights": next(tensor.dtype for tensor in tensors if "q_proj" in tensor.name),
        "queries": next(tensor.shape[0] for tensor in tensors if "q_proj" in tensor.name),
    }


def _join(planned: BuildPlan, prefix: str) -> str:
    """Buckets of a submodel, as tags have them."""
    tags = (submodel.tag for submodel in planned.submodels)
    return " ".join(tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix))


def _shapes(submodel: ExecutableSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((tensor.name, tensor.shape) for tensor in submodel.inputs)


@pytest.mark.parametrize("case", PLAN_CASES, ids=str)
def test_plan(checkpoint: Checkpoint, case: PlanCase) -> None:
    before, after = describe(plan(checkpoint, **case.common)), describe(plan(checkpoint, **case.common | case.values))
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == case.changed


@pytest.mark.parametrize("case", GRAPH_CASES, ids=str)
def test_graph(checkpoint: Checkpoint, case: GraphCase) -> None:
    assert trace(checkpoint, **case.common) != trace(checkpoint, **case.common | case.values)


@pytest.mark.parametrize(("name", "value"), SAMPLING_VALUES.items())
def test_graph_of_sampling(checkpoint: Checkpoint, sampled: str, name: str, value: Any) -> None:
    assert trace(checkpoint, on_device_sampling_config=SAMPLED | {name: value}) != sampled


def test_equal_configurations_are_traced_equally(checkpoint: Checkpoint, sampled: str) -> None:
    assert trace(checkpoint, on_device_sampling_config=SAMPLED) == sampled


@pytest.fixture(scope="module")
def sampled(checkpoint: Checkpoint) -> str:
    return trace(checkpoint, on_device_sampling_config=SAMPLED)


def trace(checkpoint: Checkpoint, **neuron_config: Any) -> str:
    """The text of the token generation graph."""
    planned = plan(checkpoint, **neuron_config)
    return render_graph(export_submodel(planned.model, planned.weights, planned.submodels[-1]).program)
