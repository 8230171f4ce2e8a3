"""Runs submodels step by step, as a runtime would: picks buckets, pads, keeps the KV cache."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from safetensors.torch import load

from bundle.manifest import Submodel
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.sharding.writer import write_shard
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.program import build_program
from compiler_svc.trace.submodels import SubmodelSpec, describe_state, describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from execution.dtypes import TORCH_DTYPES

Run = Callable[..., tuple[torch.Tensor, ...]]


def load_shard(plan: WeightPlan, checkpoint: Checkpoint, rank: int = 0) -> dict[str, torch.Tensor]:
    shard = io.BytesIO()
    write_shard(plan, checkpoint, rank, shard)
    return load(shard.getvalue())


def run_eagerly(spec: GraphSpec, plan: WeightPlan, submodel: SubmodelSpec, shard: Mapping[str, torch.Tensor]) -> Run:
    """The functional module itself, with the shard's weights."""
    program = build_program(spec, plan, submodel)
    program.core.load_state_dict({tensor.name: shard[tensor.name] for tensor in plan.tensors})
    return torch.no_grad()(program)


def run_exported(spec: GraphSpec, plan: WeightPlan, submodel: SubmodelSpec, shard: Mapping[str, torch.Tensor]) -> Run:
    """The exported graph, with its constants bound to the shard's weights."""
    traced = export_submodel(spec, plan, submodel)
    module = traced.program.module()
    module.load_state_dict({constant.name: shard[constant.tensor] for constant in traced.constants})
    return torch.no_grad()(module)


class Stepper:
    """Two submodels with their buckets over one KV cache.

    The cache starts as noise: reading a position that was never written shows.
    """

    def __init__(
        self,
        spec: GraphSpec,
        plan: WeightPlan,
        checkpoint: Checkpoint,
        *,
        context_buckets: tuple[int, ...],
        token_buckets: tuple[int, ...],
        make_run: Callable[..., Run] = run_eagerly,
        rank: int = 0,
    ) -> None:
        shard = load_shard(plan, checkpoint, rank)
        self.spec = spec
        self.submodels = {
            (kind, bucket): describe_submodel(spec, kind, bucket)
            for kind, buckets in (("context_encoding", context_buckets), ("token_generation", token_buckets))
            for bucket in buckets
        }
        # Made when they are needed: exporting is most of what a test costs.
        self._find_run = cache(lambda kind, bucket: make_run(spec, plan, self.submodels[kind, bucket], shard))
        generator = torch.Generator().manual_seed(3)
        self.state = [
            (torch.randn(tensor.shape, generator=generator) * 20).to(TORCH_DTYPES[tensor.dtype])
            for tensor in describe_state(spec).tensors
        ]

    def prepare(self) -> None:
        """Makes all that steps may need."""
        for kind, bucket in self.submodels:
            self._find_run(kind, bucket)

    def prefill(self, prompts: Mapping[int, list[int]], **extra: Any) -> dict[str, torch.Tensor]:
        """Encodes one prompt a slot; rows are in the order of `prompts`, idle rows last."""
        length = max(len(prompt) for prompt in prompts.values())
        bucket = min(b for kind, b in self.submodels if kind == "context_encoding" and b >= length)
        rows = self.spec.ctx_batch_size
        # Padding holds what a careless caller may leave there.
        inputs = {
            "input_ids": torch.full((rows, bucket), 5, dtype=torch.int32),
            "position_ids": torch.full((rows, bucket), 1, dtype=torch.int32),
            "seq_ids": torch.full((rows,), self.spec.num_slots, dtype=torch.int32),
            "num_tokens": torch.zeros(rows, dtype=torch.int32),
        }
        for row, (slot, prompt) in enumerate(prompts.items()):
            first = bucket - len(prompt) if self.spec.padding_side == "left" else 0
            inputs["input_ids"][row, first : first + len(prompt)] = torch.tensor(prompt)
            inputs["position_ids"][row, first : first + len(prompt)] = torch.arange(len(prompt))
            inputs["seq_ids"][row] = slot
            inputs["num_tokens"][row] = len(prompt)
        return self._run("context_encoding", bucket, inputs | extra)

    def decode(self, tokens: Mapping[int, tuple[int, int]], **extra: Any) -> dict[str, torch.Tensor]:
        """Feeds one (token, position) a slot; slots without one are idle rows."""
        longest = max(position for _, position in tokens.values())
        bucket = min(b for kind, b in self.submodels if kind == "token_generation" and b > longest)
        rows = self.spec.tkg_batch_size
        inputs = {
            "input_ids": torch.full((rows, 1), 5, dtype=torch.int32),
            "position_ids": torch.zeros((rows, 1), dtype=torch.int32),
            "seq_ids": torch.full((rows,), self.spec.num_slots, dtype=torch.int32),
        }
        for slot, (token, position) in tokens.items():
            inputs["input_ids"][slot] = token
            inputs["position_ids"][slot] = position
            inputs["seq_ids"][slot] = slot
        return self._run("token_generation", bucket, inputs | extra)

    def _run(self, kind: Submodel, bucket: int, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        submodel = self.submodels[kind, bucket]
        for tensor in submodel.inputs:
            assert (tuple(inputs[tensor.name].shape), inputs[tensor.name].dtype) == (
                tensor.shape,
                TORCH_DTYPES[tensor.dtype],
            )
        results = self._find_run(kind, bucket)(*(inputs[tensor.name] for tensor in submodel.inputs), *self.state)
        self.state = list(results[len(submodel.outputs) :])
        outputs = dict(zip((output.name for output in submodel.outputs), results, strict=False))
        for output in submodel.outputs:
            assert (tuple(outputs[output.name].shape), outputs[output.name].dtype) == (
                output.shape,
                TORCH_DTYPES[output.dtype],
            )
        return outputs
