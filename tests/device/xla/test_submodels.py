"""Every family's submodels on an XLA device, under torch 2.9, against the same modules on the CPU and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from bundle.abi.inputs import PROMPT_LOGPROBS
from bundle.abi.outputs import EMBEDDINGS
from compiler_svc.models.registry import describe_model
from compiler_svc.models.transforms import UNCHANGED, ModelChanges
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import describe_state
from execution.collectives import operators
from tests.checkpoints.ropes import ROPES
from tests.checkpoints.tiny_models import GEOMETRIES as LLAMA
from tests.checkpoints.tiny_models import TinyModel, deviation, draw_tokens, write_tiny_model
from tests.device.xla.graphs import check_graph
from tests.device.xla.models import FAMILIES, MODELS
from tests.device.xla.traces import Traces
from tests.ranks.stepping import Run, Stepper, run_eagerly, run_exported
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

#: Largest difference, as a share of the largest value.
TOLERANCE: Final = 2e-5
CONTEXT_BUCKET: Final = 32
TOKEN_BUCKET: Final = 48

#: Prompts by slot, and the tokens that follow: one fills its bucket, beyond the 24 tokens at which some rope kinds
#: switch; one is short.
PROMPTS: Final = {2: draw_tokens(CONTEXT_BUCKET, seed=1), 0: draw_tokens(5, seed=2)}
LATER: Final = {slot: draw_tokens(4, seed=10 + slot) for slot in PROMPTS}


#: In place of collectives.
ECHOES: Final = {"all_reduce": operators.sum_by_communicator, "all_gather": operators.join_by_communicator}


@dataclass(frozen=True)
class EchoCommunicator:
    """Stands in for ranks that all hold what this one holds, so that a rank can run alone on any device."""

    tp_degree: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.tp_degree

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.tp_degree, dim=-1)


def generate(tiny: TinyModel, spec: GraphSpec, rank: int, make_run: Callable[..., Run]) -> dict[str, torch.Tensor]:
    """Outputs of the live rows after the prompts and after each later token, and the slots' state at the end."""
    stepper = Stepper(
        spec,
        tiny.plan(tp_degree=spec.tp_degree, dtype=spec.dtype, description=spec.description),
        tiny.checkpoint,
        context_buckets=(CONTEXT_BUCKET,),
        token_buckets=(TOKEN_BUCKET,),
        make_run=make_run,
        rank=rank,
    )
    with operators.use_communicator(EchoCommunicator(spec.tp_degree)):
        steps = [{name: output[: len(PROMPTS)] for name, output in stepper.prefill(PROMPTS).items()}]
        for number in range(len(LATER[0])):
            fed = {slot: (LATER[slot][number], len(prompt) + number) for slot, prompt in PROMPTS.items()}
            steps.append({name: output[list(PROMPTS)] for name, output in stepper.decode(fed).items()})
    outputs = {name: torch.stack([step[name] for step in steps if name in step]) for name in steps[0]}
    # Padding of several rows meets in the scratch slot, in any order.
    return outputs | {"state": torch.stack([tensor[: spec.num_slots].cpu() for tensor in stepper.state])}


def check(
    tiny: TinyModel,
    make_run: Callable[..., Run] | None = None,
    *,
    rank: int = 0,
    model_changes: ModelChanges = UNCHANGED,
    limit: float = TOLERANCE,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Compares what a rank generates with the modules on the CPU, and gives it; tokens are the same in float32."""
    config = tiny.checkpoint.config
    own: dict[str, Any] = {
        "description": model_changes.apply(describe_model(config)),
        "sampling": make_sampling(temperature=0.0),
        "ctx_batch_size": 3,
    }
    spec = tiny.spec(**(own | changes))
    traces = Traces(config, changes=model_changes, operators=ECHOES)
    results, expected = (generate(tiny, spec, rank, one) for one in (make_run or traces.make_run, run_eagerly))
    for graph in traces.graphs.values():
        check_graph(graph, {prod(tensor.shape) for tensor in describe_state(spec).tensors})
    assert results.keys() == expected.keys()
    assert spec.dtype != "float32" or torch.equal(results["tokens"], expected["tokens"])
    for name in results.keys() - {"tokens"}:
        assert compare(results[name], expected[name]) < limit, name
    return results


def compare(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; of bytes, the share of those that differ."""
    if result.itemsize == 1:
        return float((result != expected).float().mean())
    # A rank that echoes finds the tokens of the other's part nowhere.
    numbers = (one.float().nan_to_num(nan=float("nan"), neginf=0.0) for one in (result, expected))
    return deviation(*numbers)


@pytest.mark.parametrize(("architecture", "attributes"), MODELS)
def test_logits_and_tokens(architecture: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, attributes, architecture=architecture)
    results = check(tiny)
    for row, (slot, prompt) in enumerate(PROMPTS.items()):
        logits = results["logits"][:, row]
        assert deviation(logits, tiny.step_logits(prompt + LATER[slot], len(prompt))) < TOLERANCE
        assert torch.equal(results["tokens"][:, row], logits.argmax(-1).int())


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_kind(rope: str, tmp_path: Path) -> None:
    attributes = LLAMA["gqa-llama3-tied"] | {"num_hidden_layers": 1, "rope_parameters": ROPES[rope]}
    if rope == "dynamic":
        attributes["max_position_embeddings"] = 24
    check(write_tiny_model(tmp_path, attributes))


@pytest.mark.parametrize(("architecture", "attributes"), FAMILIES)
def test_prompts_that_end_their_rows(architecture: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    check(write_tiny_model(tmp_path, attributes, architecture=architecture), padding_side="left")


def test_fused_projections(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA["mha-bias-untied"])
    check(tiny, model_changes=ModelChanges(fuses_qkv=True))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("architecture", "attributes"), FAMILIES)
def test_ranks_of_two(rank: int, architecture: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    """A rank's graph picks a token from the ranks' candidates, without their logits; the vocabulary is padded."""
    tiny = write_tiny_model(tmp_path, attributes, architecture=architecture)
    check(tiny, rank=rank, tp_degree=2, output_logits=False)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("global_topk", [20, 1])
def test_ranks_of_two_sample(rank: int, global_topk: int, tmp_path: Path) -> None:
    """Sampling is the same part of every family's graphs."""
    sampling = make_sampling(global_topk=global_topk, top_p=0.8, temperature=1.5, deterministic=True)
    tiny = write_tiny_model(tmp_path, LLAMA["gqa-llama3-tied"] | {"num_hidden_layers": 1})
    check(tiny, rank=rank, tp_degree=2, output_logits=False, sampling=sampling)


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_what_is_told_of_prompts(tp_degree: int, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA["gqa-llama3-tied"] | {"num_hidden_layers": 1})
    own = {"optional_inputs": (PROMPT_LOGPROBS, EMBEDDINGS), "output_logits": False}
    results = check(tiny, tp_degree=tp_degree, **own)
    assert results["prompt_top_ids"].shape[-1] == 20
    assert {"prompt_logprobs", "last_hidden", "hidden_sum"} <= results.keys()


@pytest.mark.parametrize(("architecture", "attributes"), FAMILIES)
def test_exported_graphs(architecture: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    """Neuron's lowering may start from an exported graph; torch 2.9 exports and runs it on the CPU."""
    check(write_tiny_model(tmp_path, attributes, architecture=architecture), run_exported)
