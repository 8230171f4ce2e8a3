"""Exporting a submodel: an `ExportedProgram` that touches no weight memory, its digest, and its constants."""

from __future__ import annotations

from dataclasses import dataclass

from torch.export import ExportedProgram

from bundle.manifest import ConstantBinding
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.spec import ModelSpec
from compiler_svc.trace.submodels import SubmodelSpec


@dataclass(frozen=True)
class TracedSubmodel:
    """A functional graph: called with inputs and then state, it returns outputs and then the new state.

    Attributes:
        program: Parameters and example inputs are uninitialized CPU tensors: shapes count, values do not.
        graph_digest: Digest of what the graph computes; see `graph_digest.digest_graph`.
        constants: For every parameter of the graph, by its name there, the tensor of the rank shard.
    """

    spec: SubmodelSpec
    program: ExportedProgram
    graph_digest: str
    constants: tuple[ConstantBinding, ...]


def export_submodel(spec: ModelSpec, plan: WeightPlan, submodel: SubmodelSpec) -> TracedSubmodel:
    """Exports one submodel. The graph is equal for all ranks."""
    raise NotImplementedError
