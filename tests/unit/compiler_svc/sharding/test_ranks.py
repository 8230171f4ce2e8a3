"""Ranks together compute what transformers computes: shards, rank-local modules and KV caches fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bundle.abi.inputs import read_sampling_params
from bundle.manifest import Sampling
from compiler_svc.trace.graph_spec import GraphSpec
from execution.sampling import greedy, sample
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.parity.geometries import LLAMA_GEOMETRIES as GEOMETRIES
from tests.ranks.noise import draw_keys
from tests.ranks.stepping import Run, Stepper, run_eagerly, run_exported
from tests.ranks.threads import run_ranks

DEGREES = (1, 2, 3, 4)
TOKENS = draw_tokens(16)
NUM_PROMPT_TOKENS = 11


def choose(*factors: Iterable[Any], every: int) -> list[Any]:
    """All combinations of two factors as parameters; `make test` takes every so many of them, of each value some."""
    return [
        pytest.param(one, other, marks=[] if (number + place) % every == 0 else [pytest.mark.slow])
        for (number, one), (place, other) in product(*map(enumerate, factors))
    ]


def make_stepper(tiny: TinyModel, rank: int, spec: GraphSpec, make_run: Callable[..., Run] = run_eagerly) -> Stepper:
    plan = tiny.plan(tp_degree=spec.tp_degree, dtype=spec.dtype, description=spec.description)
    buckets: dict[str, Any] = {"context_buckets": (16,), "token_buckets": (32,)}
    return Stepper(spec, plan, tiny.checkpoint, **buckets, make_run=make_run, rank=rank)


def generate(stepper: Stepper, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs after the prompt and after each later token, stacked, of a sequence in slot 1 of three."""

    def rows(count: int) -> dict[str, torch.Tensor]:
        return {name: tensor.expand(count, -1).contiguous() for name, tensor in extra.items()}

    steps = [{name: output[0] for name, output in stepper.prefill({1: TOKENS[:NUM_PROMPT_TOKENS]}, **rows(1)).items()}]
    for position in range(NUM_PROMPT_TOKENS, len(TOKENS)):
        outputs = stepper.decode({1: (TOKENS[position], position)}, **rows(3))
        steps.append({name: output[1] for name, output in outputs.items()})
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


def generate_together(
    tiny: TinyModel, spec: GraphSpec, make_run: Callable[..., Run] = run_eagerly, **extra: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """What every rank generates."""
    steppers = [make_stepper(tiny, rank, spec, make_run) for rank in range(spec.tp_degree)]
    for stepper in steppers:
        # Not in the ranks' threads, as torch exports in one at a time.
        stepper.prepare()
    return run_ranks(spec.tp_degree, lambda rank: generate(steppers[rank], **extra))


def check_against_transformers(
    tiny: TinyModel, tp_degree: int, make_run: Callable[..., Run] = run_eagerly, **changes: Any
) -> None:
    spec = tiny.spec(tp_degree=tp_degree, **changes)
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    results = [outputs["logits"] for outputs in generate_together(tiny, spec, make_run)]
    for logits in results:
        assert deviation(logits, expected) < TOLERANCE
        assert torch.equal(logits, results[0])


@pytest.mark.parametrize(("geometry", "tp_degree"), choose(GEOMETRIES, DEGREES, every=2))
def test_ranks_compute_what_transformers_computes(geometry: str, tp_degree: int, tmp_path: Path) -> None:
    check_against_transformers(write_tiny_model(tmp_path, GEOMETRIES[geometry]), tp_degree)


def test_more_ranks_than_heads(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["mha-bias-default"])
    check_against_transformers(tiny, 7)
    check_against_transformers(tiny, 8)


def test_partial_sums_in_another_dtype(tmp_path: Path) -> None:
    """The result is as coarse as bfloat16 sums are, and neither exact nor wrong."""
    tiny = write_tiny_model(tmp_path, GEOMETRIES["gqa2-tied-linear"])
    spec = tiny.spec(tp_degree=2, reduce_dtype="bfloat16")
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    for outputs in generate_together(tiny, spec):
        assert 1e-4 < deviation(outputs["logits"], expected) < 5e-2
    check_against_transformers(tiny, 2, reduce_dtype="float32")
    # One rank has no partial sums.
    check_against_transformers(tiny, 1, reduce_dtype="bfloat16")


@pytest.mark.parametrize(("geometry", "tp_degree"), [("padded-gqa2-yarn", 2), ("mha-bias-default", 4)])
def test_bfloat16_is_about_as_near_to_float32_as_transformers_is(geometry: str, tp_degree: int, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES[geometry], dtype=torch.bfloat16)
    wide = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    truth = TinyModel(wide, tiny.checkpoint).step_logits(TOKENS, NUM_PROMPT_TOKENS)
    theirs = deviation(tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS), truth)
    for reduce_dtype in (None, "float32"):
        spec = tiny.spec(tp_degree=tp_degree, dtype="bfloat16", reduce_dtype=reduce_dtype)
        for outputs in generate_together(tiny, spec):
            assert 0 < deviation(outputs["logits"], truth) < 2 * theirs


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "dynamic": {"dynamic": True},
    "whole-vocabulary": {"dynamic": True, "global_topk": 0},
    "deterministic": {"top_p": 0.5, "deterministic": True},
}


def make_sampling(**changes: Any) -> Sampling:
    defaults: dict[str, Any] = {"dynamic": False, "deterministic": False, "global_topk": 20}
    defaults |= {"temperature": 1.0, "top_k": 0, "top_p": 0.95}
    changes = defaults | changes
    chance = "rand" if changes["deterministic"] else "noise_keys"
    return Sampling(mode="on_device", semantics="hf", chance=chance, **changes)


@pytest.mark.parametrize(("name", "tp_degree"), choose(SAMPLINGS, (1, 3, 4), every=2))
def test_tokens_are_those_that_whole_logits_give(name: str, tp_degree: int, tmp_path: Path) -> None:
    """With and without the logits among the outputs, which changes what the ranks exchange."""
    tiny = write_tiny_model(tmp_path, GEOMETRIES["padded-groups-bias"] | {"num_hidden_layers": 1})
    sampling = make_sampling(**SAMPLINGS[name])
    params = torch.tensor([[6.0, 0.8, 1.5]])
    if not sampling.dynamic:
        params = torch.tensor([read_sampling_params(sampling)])
    chance = torch.tensor([[0.5]]) if sampling.deterministic else draw_keys(1)

    specs = [tiny.spec(tp_degree=tp_degree, sampling=sampling, output_logits=logits) for logits in (True, False)]
    extra = {"sampling_params": params, "noise_keys": chance}
    with_logits, without_logits = (generate_together(tiny, spec, **extra) for spec in specs)
    for rank in range(tp_degree):
        logits = with_logits[rank]["logits"]
        expected = torch.cat([sample(row[None], params, chance, sampling.global_topk) for row in logits])
        assert torch.equal(with_logits[rank]["tokens"], expected)
        assert torch.equal(without_logits[rank]["tokens"], expected)
        assert torch.equal(expected, greedy(logits)) == (name == "greedy")


def test_exported_graphs_pick_tokens_together(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GEOMETRIES["padded-groups-bias"] | {"num_hidden_layers": 1})
    extra = {"sampling_params": torch.tensor([[0.0, 0.9, 1.2]]), "noise_keys": draw_keys(1)}
    spec = tiny.spec(tp_degree=3, sampling=make_sampling(dynamic=True), output_logits=False)
    eager, exported = (generate_together(tiny, spec, make_run, **extra) for make_run in (run_eagerly, run_exported))
    for rank in range(3):
        assert torch.equal(exported[rank]["tokens"], eager[0]["tokens"])
