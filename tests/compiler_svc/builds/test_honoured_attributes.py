"""Attributes of a configuration, each with what another value of it changes in the plan or in the graphs."""

from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from compiler_svc.config import resolve_config
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_digest import render_graph
from compiler_svc.trace.submodels import SubmodelSpec
from compiler_svc.weights.checkpoint import Checkpoint
from tests.compiler_svc.random_checkpoint import write_checkpoint

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
    return plan_build(checkpoint, resolve_config(document, checkpoint_dtype="float32").config.neuron_config)


def describe(planned: BuildPlan) -> dict[str, Any]:
    """What a plan says that executables or the runtime depend on."""
    model, limits = planned.model, planned.limits
    tensors = planned.weights.describe_shard(0, None, 0).tensors
    return {
        "executables": [submodel.tag for submodel in planned.submodels],
        "prefill rows": dict(_shapes(planned.submodels[0]))["input_ids"][0],
        "decode rows": dict(_shapes(planned.submodels[-1]))["input_ids"][0],
        "slots": model.num_slots,
        "KV positions": model.max_length,
        "prompt": limits.max_context_length,
        "sequence": limits.max_length,
        "new tokens": limits.max_new_tokens,
        "weights": next(tensor.dtype for tensor in tensors if "q_proj" in tensor.name),
        "queries": next(tensor.shape[0] for tensor in tensors if "q_proj" in tensor.name),
    }


def _shapes(submodel: SubmodelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((tensor.name, tensor.shape) for tensor in submodel.inputs)


@pytest.mark.parametrize(
    ("common", "values", "changed"),
    [
        pytest.param(
            {},
            {"batch_size": 3},
            {"slots": (1, 3), "prefill rows": (1, 3), "decode rows": (1, 3)},
            id="batch_size",
        ),
        pytest.param({"batch_size": 3}, {"ctx_batch_size": 1}, {"prefill rows": (3, 1)}, id="ctx_batch_size"),
        pytest.param(
            {},
            {"max_batch_size": 2, "tkg_batch_size": 2},
            {"slots": (1, 2), "decode rows": (1, 2)},
            id="max_batch_size-tkg_batch_size",
        ),
        pytest.param(
            {},
            {"seq_len": 64},
            {
                "executables": (
                    ["context_encoding_32", "token_generation_32"],
                    ["context_encoding_64", "token_generation_64"],
                ),
                "KV positions": (32, 64),
                "prompt": (32, 64),
                "sequence": (32, 64),
            },
            id="seq_len",
        ),
        pytest.param(
            {"max_new_tokens": 8},
            {"max_context_length": 24},
            {
                "executables": (
                    ["context_encoding_32", "token_generation_32"],
                    ["context_encoding_24", "token_generation_32"],
                ),
                "prompt": (32, 24),
            },
            id="max_context_length",
        ),
        pytest.param({}, {"max_new_tokens": 7}, {"new tokens": (None, 7)}, id="max_new_tokens"),
        pytest.param(
            {},
            {"max_length": 96},
            {
                "executables": (
                    ["context_encoding_32", "token_generation_32"],
                    ["context_encoding_32", "token_generation_96"],
                ),
                "KV positions": (32, 96),
            },
            id="max_length",
        ),
        pytest.param(
            {"seq_len": 256},
            {"enable_bucketing": True},
            {
                "executables": (
                    ["context_encoding_256", "token_generation_256"],
                    ["context_encoding_128", "context_encoding_256", "token_generation_128", "token_generation_256"],
                ),
            },
            id="enable_bucketing",
        ),
        pytest.param(
            {"enable_bucketing": True},
            {"context_encoding_buckets": [8, 32], "token_generation_buckets": [16, 32]},
            {
                "executables": (
                    ["context_encoding_32", "token_generation_32"],
                    ["context_encoding_8", "context_encoding_32", "token_generation_16", "token_generation_32"],
                ),
            },
            id="context_encoding_buckets-token_generation_buckets",
        ),
        pytest.param({}, {"torch_dtype": "bfloat16"}, {"weights": ("float32", "bfloat16")}, id="torch_dtype"),
        pytest.param({}, {"tp_degree": 2}, {"queries": (32, 16)}, id="tp_degree"),
    ],
)
def test_plan(
    checkpoint: Checkpoint, common: dict[str, Any], values: dict[str, Any], changed: dict[str, tuple[Any, Any]]
) -> None:
    """Everything that a plan says differently, and how."""
    before, after = describe(plan(checkpoint, **common)), describe(plan(checkpoint, **common | values))
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize(
    ("common", "values"),
    [
        pytest.param({}, {"on_device_sampling_config": {}}, id="on_device_sampling_config"),
        pytest.param({"on_device_sampling_config": {}}, {"output_logits": True}, id="output_logits"),
        pytest.param({"tp_degree": 2}, {"rpl_reduce_dtype": "bfloat16"}, id="rpl_reduce_dtype"),
    ],
)
def test_graph(checkpoint: Checkpoint, common: dict[str, Any], values: dict[str, Any]) -> None:
    assert trace(checkpoint, **common) != trace(checkpoint, **common | values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", False),
        ("top_k", 6),
        ("top_p", 0.8),
        ("temperature", 0.6),
        ("dynamic", True),
        ("deterministic", True),
        ("global_topk", 32),
    ],
)
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
