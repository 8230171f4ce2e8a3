"""Which front ends there are, and that front ends call nothing of upstream's that is not recorded."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from compiler_svc.lower.errors import FrontEndNotServed
from compiler_svc.lower.neuron.request import FRONT_ENDS, RESERVED_FRONT_ENDS, find_front_end
from compiler_svc.settings import parse_settings
from edge.errors import OptionsInvalid
from targets.neuron import FRONT_END, NEURON_PYTHON
from tests.repository import ROOT

SOURCES = sorted((ROOT / "compiler_svc").rglob("*.py")) + sorted((ROOT / "targets").rglob("*.py"))
RECORD = json.loads((ROOT / "tests/neuron/signatures.json").read_text())["python"]
#: Upstream's packages. torch_xla is PyTorch's own.
UPSTREAM = ("neuronx_distributed", "torch_neuronx", "libneuronxla", "neuronxcc", "nki", "neuronx_distributed_inference")
#: Functions that import a module by its name.
LOADERS = ("import_module", "resolve_name")
#: Classes that the top of the package gives, as its documentation says.
TOP = {"ModelBuilder", "NxDModel", "NxDParallelState", "shard_checkpoint"}
#: What functions return, and what the messages inside have, as `nxd_model.py` and `functions.py` use them.
RETURNS = {"trace": "TraceArtifacts", "compile": "CompilationArtifacts"}
FIELDS = {
    "hlo": {"SerializeToString"},
    "metaneff": {"SerializeToString", "input_tensors", "output_tensors", "output_aliases_to"},
}
TRACED = """
from neuronx_distributed.trace.functions import trace
traced = trace(1)
print(traced.hlo.computations, traced.metaneff.name, traced.graph)
"""


def signature_of(name: str, owner: str | None = None) -> list[str] | None:
    """Names of the parameters that are recorded of a function, of a class's constructor, or of a method of `owner`."""
    wanted = (name, "__init__") if owner is None and name[0].isupper() else (owner, name)
    rows = [one for one in RECORD if (one["class"], one["name"]) == wanted]
    return [one["name"] for one in rows[0]["parameters"]] if rows else None


def find_unrecorded(source: str) -> Iterator[str]:
    """What a module takes of upstream that is not recorded: names, arguments, attributes of what calls return."""
    tree = ast.parse(source)
    taken: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.partition(".")[0] in UPSTREAM)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in UPSTREAM:
            for one in node.names:
                recorded = [row for row in RECORD if one.name in (row["class"], row["name"])]
                modules = {row["module"] for row in recorded} | ({UPSTREAM[0]} if one.name in TOP else set())
                if node.module not in modules:
                    yield f"{node.module}.{one.name}"
                taken[one.asname or one.name] = one.name
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("import_module", "resolve_name")
        ):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).partition(".")[0] in UPSTREAM:
                    yield f"{argument.value}, by its name"
    yield from _find_calls(tree, taken)
    yield from _find_attributes(tree, taken)


def _find_calls(tree: ast.AST, taken: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, method = ast.unparse(node.func).partition(".")
        if first not in taken:
            continue
        name = method or taken[first]
        parameters = signature_of(name, taken[first] if method else None)
        if parameters is None:
            yield f"a call of {name}"
            continue
        yield from (f"{name}({one.arg}=…)" for one in node.keywords if one.arg not in parameters)
        if len(node.args) > len(parameters):
            yield f"{name} with {len(node.args)} arguments"


def _find_attributes(tree: ast.AST, taken: dict[str, str]) -> Iterator[str]:
    """Attributes of variables with the names that front ends give to what upstream returns."""
    variables = {"traced": "TraceArtifacts", "compiled": "CompilationArtifacts"}
    if not taken.keys() & RETURNS.keys():
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in variables:
            kind = variables[node.value.id]
            if node.attr not in (signature_of(kind) or []):
                yield f"{kind}.{node.attr}"
        inner = node.value
        is_field = (
            isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id in variables
        )
        if is_field and node.attr not in FIELDS.get(inner.attr, set()):  # type: ignore[attr-defined]
            yield f"{inner.attr}.{node.attr}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_upstream_is_called_as_it_is_recorded(path: Path) -> None:
    assert list(find_unrecorded(path.read_text())) == []


def test_front_ends_alone_import_upstream() -> None:
    importing = [
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UPSTREAM
    ]
    assert set(importing) == {"model_builder.py"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from neuronx_distributed import NxDParallelState\nNxDParallelState(world_size=2)", []),
        ("import torch_neuronx", ["torch_neuronx"]),
        ("from neuronx_distributed import NeuronRunner", ["neuronx_distributed.NeuronRunner"]),
        ("from neuronx_distributed.trace.trace import trace", ["neuronx_distributed.trace.trace.trace"]),
        ("from neuronx_distributed import NxDParallelState\nNxDParallelState(ranks=2)", ["NxDParallelState(ranks=…)"]),
        (
            "from neuronx_distributed.trace.functions import compile\ncompiled = compile(target=1)\ncompiled.neff_name",
            ["compile(target=…)", "CompilationArtifacts.neff_name"],
        ),
        (
            TRACED,
            ["TraceArtifacts.graph", "hlo.computations", "metaneff.name"],
        ),
        ("from torch_neuronx.xla_impl.ops import TopK\nTopK.apply(values, 5, dim=1)", []),
        ("from torch_neuronx.xla_impl.ops import TopK\nTopK.apply(values, 5, sorted=True)", ["apply(sorted=…)"]),
        ("from torch_neuronx.xla_impl.ops import TopK\nTopK.run(values)", ["a call of run"]),
        ("import_module('torch_neuronx.xla_impl')", ["torch_neuronx.xla_impl, by its name"]),
    ],
)
def test_the_search_finds(source: str, found: list[str]) -> None:
    assert sorted(find_unrecorded(source)) == sorted(found)


def test_every_front_end_exists() -> None:
    for name in FRONT_ENDS:
        assert callable(resolve_name(find_front_end(name)))
    assert NEURON_PYTHON.read_choice(FRONT_END) in FRONT_ENDS


@pytest.mark.parametrize("name", [*RESERVED_FRONT_ENDS, "xla", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(FrontEndNotServed, match=f"got {name!r}; accepted: model_builder") as refused:
        find_front_end(name)
    assert refused.value.violations[0].field == "neuron-front-end"


def test_the_reserved_name_is_not_served() -> None:
    assert RESERVED_FRONT_ENDS == ("torch_neuron",)
    assert not FRONT_ENDS.keys() & {*RESERVED_FRONT_ENDS}


@pytest.mark.parametrize("name", RESERVED_FRONT_ENDS)
def test_the_compiler_does_not_start_with_the_reserved_name(name: str) -> None:
    with pytest.raises(OptionsInvalid) as refused:
        parse_settings(["--store", "store", "--neuron-front-end", name], {})
    message = str(refused.value)
    assert "neuron-front-end" in message
    assert name in message
    assert all(served in message for served in FRONT_ENDS)


def test_the_choice_counts_as_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEURON_PYTHON.choices[FRONT_END].variable, "another")
    chosen = replace(NEURON_PYTHON, pins=()).read_versions()
    assert chosen.pop("neuron.front-end") == "another"
    assert chosen.keys() == {"neuron.python"}
