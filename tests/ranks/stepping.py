"""Runs submodels step by step, as a runtime would: picks buckets, pads, keeps the KV cache."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load

from bundle.abi.submodels import SubmodelName
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.sharding.writer import write_shards
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.program import build_program
from compiler_svc.trace.submodels import ExecutableSpec, describe_state, describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from execution.dtypes import TORCH_DTYPES
from execution.executors.arguments import make_tensors
from execution.step import StepForm, StepInputs
from tests.bundles.manifests import describe_executable, make_manifest

Run = Callable[..., tuple[torch.Tensor, ...]]


def load_shard(plan: WeightPlan, checkpoint: Checkpoint, rank: int = 0) -> dict[str, torch.Tensor]:
    shard = io.BytesIO()
    write_shards(plan, checkpoint, {rank: shard})
    return load(shard.getvalue())


def run_eagerly(spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec, shard: Mapping[str, torch.Tensor]) -> Run:
    """The functional module itself, with the shard's weights."""
    program = build_program(spec, plan, submodel)
    program.core.load_state_dict({name: shard[name] for name in program.core.state_dict()})
    return torch.no_grad()(program)


def run_exported(spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec, shard: Mapping[str, torch.Tensor]) -> Run:
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
        adapters: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        shard = load_shard(plan, checkpoint, rank) | dict(adapters)
        self.spec = spec
        self.submodels = {
            (kind, bucket): describe_submodel(spec, kind, bucket)
            for kind, buckets in (("context_encoding", context_buckets), ("token_generation", token_buckets))
            for bucket in buckets
        }
        executables = {key: describe_executable(one) for key, one in self.submodels.items()}
        manifest = make_manifest(
            executables=list(executables.values()),
            state=describe_state(spec),
            sampling=spec.sampling,
            vocab_size=spec.description.vocab_size,
        )
        self._forms = {key: StepForm(manifest, executable) for key, executable in executables.items()}
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
        form = self._forms["context_encoding", bucket]
        inputs = _fill(form.make_idle(), input_ids=5, position_ids=1, num_tokens=0)
        for row, (slot, prompt) in enumerate(prompts.items()):
            form.put_tokens(inputs, row, prompt, start=0, blocks=(slot,))
        return self._run("context_encoding", bucket, inputs, extra)

    def decode(
        self, tokens: Mapping[int, tuple[int, int]], *, packed: bool = False, **extra: Any
    ) -> dict[str, torch.Tensor]:
        """Feeds one (token, position) a slot; rows without one are idle.

        Args:
            packed: Slots take the first rows, in the order of `tokens`. Otherwise each takes the row of its number.
        """
        longest = max(position for _, position in tokens.values())
        bucket = min(b for kind, b in self.submodels if kind == "token_generation" and b > longest)
        form = self._forms["token_generation", bucket]
        inputs = _fill(form.make_idle(), input_ids=5)
        for index, (slot, (token, position)) in enumerate(tokens.items()):
            form.put_tokens(inputs, index if packed else slot, [token], start=position, blocks=(slot,))
        return self._run("token_generation", bucket, inputs, extra)

    def run(
        self,
        kind: SubmodelName,
        bucket: int,
        rows: Mapping[int, tuple[list[int], int, tuple[int, ...]]],
        *,
        num_moved: int = 0,
        num_prompt_tokens: int = 0,
        extra: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Runs one step. Of each row that is not idle: its tokens, the position of the first, and the KV blocks.

        Args:
            extra: Inputs that replace those of this step.
            num_moved: Of each row's tokens, the first ones that the cache holds and that are not written.
            num_prompt_tokens: Tokens of each row's prompt; 0 if it ends here.
        """
        form = self._forms[kind, bucket]
        inputs = form.make_idle()
        for row, (tokens, start, blocks) in rows.items():
            form.put_tokens(
                inputs,
                row,
                tokens,
                start=start,
                blocks=blocks,
                num_moved=num_moved,
                num_prompt_tokens=num_prompt_tokens,
            )
        return self._run(kind, bucket, inputs, extra)

    def _run(
        self, kind: SubmodelName, bucket: int, values: StepInputs, extra: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        submodel = self.submodels[kind, bucket]
        inputs = make_tensors(submodel.inputs, values) | dict(extra)
        results = self._find_run(kind, bucket)(*(inputs[tensor.name] for tensor in submodel.inputs), *self.state)
        self.state = list(results[len(submodel.outputs) :])
        outputs = dict(zip((output.name for output in submodel.outputs), results, strict=False))
        for output in submodel.outputs:
            assert (tuple(outputs[output.name].shape), outputs[output.name].dtype) == (
                output.shape,
                TORCH_DTYPES[output.dtype],
            )
        return outputs


def _fill(inputs: StepInputs, **numbers: int) -> StepInputs:
    """Replaces whole inputs by values that a careless caller may leave in padding and idle rows."""
    return inputs | {
        name: array(inputs[name].typecode, [number]) * len(inputs[name]) for name, number in numbers.items()
    }
