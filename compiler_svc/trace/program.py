"""A submodel as a module: its arguments and results are tensors in the order of its executable spec."""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from bundle.abi.inputs import COMPUTED_CONTEXT, INPUTS, LIVE_ROWS, PROCESSORS, read_sampling_params
from bundle.abi.outputs import IDLE_TOKEN, OUTPUTS
from bundle.abi.submodels import SUBMODELS
from bundle.manifest import Sampling, WeightTensor
from compiler_svc.models.layers.decoder import CausalLm
from compiler_svc.models.layers.logits import RankLogits
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.models.layers.step import StepKind
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import ExecutableSpec, describe_state, list_adapter_tensors
from execution.dtypes import TORCH_DTYPES
from execution.logit_changes import change_logits
from execution.sampling import greedy, sample


class SubmodelProgram(nn.Module):
    """Functional `(inputs…, state…) → (outputs…, new state…)`. Parameters are those of `core`."""

    def __init__(self, spec: GraphSpec, submodel: ExecutableSpec, core: CausalLm) -> None:
        super().__init__()
        self.spec = spec
        self.submodel = submodel
        self.core = core

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs one step. The executable spec gives order, shapes and dtypes."""
        num_inputs = len(self.submodel.inputs)
        inputs = {tensor.name: value for tensor, value in zip(self.submodel.inputs, tensors[:num_inputs], strict=True)}
        state = tensors[num_inputs:]
        of_core = {name: value for name, value in inputs.items() if not INPUTS[name].is_for_sampling}
        kind = StepKind(
            reads_cache=SUBMODELS[self.submodel.submodel].reads_cache or COMPUTED_CONTEXT in self.submodel.flags,
            max_context=self._max_context,
            padding_side=self.spec.padding_side,
            spare_positions=self.spec.has_spare_positions,
        )
        if any(OUTPUTS[output.name].is_reported for output in self.submodel.outputs):
            logits, new_state, outputs = self.core.read_prompts(**of_core, state=state, kind=kind)
        else:
            logits, new_state = self.core(**of_core, state=state, kind=kind)
            outputs = {}
        outputs["rank_logits"] = logits.part
        if self.spec.returns_logits:
            outputs["logits"] = logits.gather()
        if self.spec.samples_on_device:
            tokens = self._pick_tokens(logits, outputs.get("logits"), inputs)
            outputs["tokens"] = _mark_idle(tokens, inputs[LIVE_ROWS]) if LIVE_ROWS in inputs else tokens
        return (*(outputs[output.name] for output in self.submodel.outputs), *new_state)

    @property
    def _max_context(self) -> int:
        bucket, flags = self.submodel.bucket, self.submodel.flags
        if self.spec.skips_idle or (COMPUTED_CONTEXT in flags and len(bucket) == 1):
            return self.spec.max_length
        return bucket[-1] if SUBMODELS[self.submodel.submodel].reads_cache else sum(bucket)

    def _pick_tokens(self, logits: RankLogits, gathered: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        """Picks tokens, int32 [rows], from `gathered` f32 [rows, vocab_size] if the ranks exchange all logits."""
        if PROCESSORS in self.submodel.flags:
            logits = logits.change(inputs)
            gathered = None if gathered is None else change_logits(gathered, inputs, logits.vocab_size, None)
        if self.spec.is_greedy:
            return logits.greedy() if gathered is None else greedy(gathered)
        sampling, rows = self.spec.sampling, logits.part.shape[0]
        params = inputs["sampling_params"] if sampling.dynamic else _bake_params(sampling, rows, logits.part.device)
        is_fixed, device = sampling.deterministic, logits.part.device
        chance = torch.full((rows, 1), 0.5, device=device) if is_fixed else inputs["noise_keys"]
        if gathered is not None:
            return sample(gathered, params, chance, sampling.global_topk, inputs.get("cuts"))
        needs_total = sampling.dynamic or sampling.top_k == 0
        return logits.sample(params, chance, sampling.global_topk, needs_total=needs_total, cuts=inputs.get("cuts"))


def build_program(spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec) -> SubmodelProgram:
    """Builds a submodel with uninitialized parameters in the shapes and dtypes of the plan's shards."""
    return build_submodel(spec, plan.describe_shard(0, None, 0).tensors, submodel)


def build_submodel(spec: GraphSpec, tensors: Iterable[WeightTensor], submodel: ExecutableSpec) -> SubmodelProgram:
    """Builds a submodel with uninitialized parameters, the model's in the shapes and dtypes of a shard's tensors."""
    reduce_dtype = None if spec.reduce_dtype is None else TORCH_DTYPES[spec.reduce_dtype]
    ranks = Ranks(spec.tp_degree, reduce_dtype)
    core: CausalLm = resolve_name(spec.model)(spec.description, dtype=TORCH_DTYPES[spec.dtype], ranks=ranks)
    planned = {tensor.name: tensor for tensor in (*tensors, *list_adapter_tensors(spec))}
    parameters = dict(core.named_parameters())
    assert parameters.keys() == planned.keys(), parameters.keys() ^ planned.keys()
    for name, parameter in parameters.items():
        assert tuple(parameter.shape) == planned[name].shape, name
        parameter.data = torch.empty(parameter.shape, dtype=TORCH_DTYPES[planned[name].dtype])
    return SubmodelProgram(spec, submodel, core)


def make_example_tensors(spec: GraphSpec, submodel: ExecutableSpec) -> tuple[Tensor, ...]:
    """Makes uninitialized inputs and state of a submodel."""
    inputs = [torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]) for tensor in submodel.inputs]
    state = [torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]) for tensor in describe_state(spec).tensors]
    return (*inputs, *state)


def _mark_idle(tokens: Tensor, live_rows: Tensor) -> Tensor:
    """Puts IDLE_TOKEN in place of what was picked from logits that no layer may have computed."""
    rows = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
    return torch.where(rows < live_rows, tokens, IDLE_TOKEN)


def _bake_params(sampling: Sampling, rows: int, device: torch.device) -> Tensor:
    columns = [torch.full((rows, 1), value, device=device) for value in read_sampling_params(sampling)]
    return torch.cat(columns, dim=1)
