"""A submodel as JSON, from which another interpreter builds the same module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import msgspec

from bundle.digest import canonical_json, sha256_bytes
from bundle.manifest import Sampling, WeightTensor
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.models.registry import describe_model
from compiler_svc.models.transforms import ModelChanges
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import ExecutableSpec

#: Makes the module of a document, in another interpreter.
MAKE_MODULE: Final = "compiler_svc.trace.named_submodel:make_named_submodel"


class SubmodelDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document; `graph` has the fields of the graph spec other than its description.

    That comes from `model_config`, the model's `config.json` with the configuration's values for its attributes. The
    other interpreter must come to the same `graph_digest`, the digest of what the graph spec says of the model.
    """

    model_config: dict[str, Any]
    changes: ModelChanges
    graph: dict[str, Any]
    graph_digest: str
    tensors: tuple[WeightTensor, ...]
    submodel: ExecutableSpec


def write_document(
    model_config: Mapping[str, Any],
    spec: GraphSpec,
    tensors: Sequence[WeightTensor],
    submodel: ExecutableSpec,
    *,
    changes: ModelChanges,
) -> dict[str, Any]:
    """Writes a submodel as JSON; `tensors` are those of any rank's shard, as all have the same shapes.

    `model_config` is the `config.json` that the graph spec's description comes from, with the changes.
    """
    graph = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name != "description"}
    document = SubmodelDocument(
        model_config=dict(model_config),
        changes=changes,
        graph=msgspec.to_builtins(graph),
        graph_digest=_digest(spec),
        tensors=tuple(tensors),
        submodel=submodel,
    )
    written: dict[str, Any] = msgspec.to_builtins(document)
    return written


def read_document(document: dict[str, Any]) -> tuple[GraphSpec, tuple[WeightTensor, ...], ExecutableSpec]:
    """Reads what `write_document` wrote."""
    read = msgspec.convert(document, SubmodelDocument)
    description = read.changes.apply(describe_model(read.model_config))
    graph = dict(read.graph)
    graph["sampling"] = msgspec.convert(graph["sampling"], Sampling)
    graph["optional_inputs"] = tuple(graph["optional_inputs"])
    spec = GraphSpec(description=description, **graph)
    if _digest(spec) != read.graph_digest:
        raise ProgramUnsupported(read.submodel.tag, "is described in another way by the interpreter that lowers it")
    return spec, read.tensors, read.submodel


def _digest(spec: GraphSpec) -> str:
    return sha256_bytes(canonical_json(msgspec.to_builtins(spec.to_json())))
