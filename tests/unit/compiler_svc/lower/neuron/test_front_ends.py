"""Which front ends there are, and that nothing else imports upstream's packages.

Front ends call upstream as it is recorded: the doubles in `tests/neuron/site` take nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch

from compiler_svc.lower.errors import FrontEndNotServed
from compiler_svc.lower.neuron.model_builder import OPERATORS
from compiler_svc.lower.neuron.request import FRONT_ENDS, RESERVED_FRONT_ENDS, find_front_end
from compiler_svc.settings import parse_settings
from edge.errors import OptionsInvalid
from targets.neuron import FRONT_END, NEURON_PYTHON, TOP_K_WAYS
from tests.neuron.standin import SITE
from tests.repository import ROOT

#: Upstream's packages. torch_xla is PyTorch's own.
UPSTREAM = {"neuronx_distributed", "torch_neuronx", "libneuronxla", "neuronxcc", "nki", "neuronx_distributed_inference"}
#: Functions that import a module by its name.
LOADERS = ("import_module", "resolve_name")


def list_imports(source: str) -> Iterator[str]:
    """Modules that a source imports, by statements or by their names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOADERS:
            yield from (str(one.value) for one in node.args if isinstance(one, ast.Constant))


def test_front_ends_alone_import_upstream() -> None:
    sources = [path for package in ("compiler_svc", "targets") for path in (ROOT / package).rglob("*.py")]
    packages = {path: {one.partition(".")[0] for one in list_imports(path.read_text())} for path in sources}
    assert [path.name for path, imported in packages.items() if imported & UPSTREAM] == ["model_builder.py"]


@pytest.mark.parametrize("way", TOP_K_WAYS)
def test_operators_are_called_as_they_are_recorded(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Service tests call the rest of what `model_builder` takes of upstream."""
    monkeypatch.syspath_prepend(SITE)
    values = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(OPERATORS[way]["argmax"](values), values.argmax(-1).int())
    for found, expected in zip(OPERATORS[way]["topk"](values, 4), values.topk(4), strict=True):
        assert torch.equal(found, expected)


def test_every_front_end_exists() -> None:
    for name in FRONT_ENDS:
        assert callable(resolve_name(find_front_end(name)))
    assert NEURON_PYTHON.read_choice(FRONT_END) in FRONT_ENDS


@pytest.mark.parametrize("name", [*RESERVED_FRONT_ENDS, "xla", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(FrontEndNotServed, match=f"got {name!r}; accepted: model_builder") as refused:
        find_front_end(name)
    assert refused.value.violations[0].field == "neuron-front-end"


@pytest.mark.parametrize("name", RESERVED_FRONT_ENDS)
def test_the_compiler_does_not_start_with_the_reserved_name(name: str) -> None:
    with pytest.raises(OptionsInvalid, match="neuron-front-end") as refused:
        parse_settings(["--store", "store", "--neuron-front-end", name], {})
    assert all(said in str(refused.value) for said in (name, *FRONT_ENDS))


def test_the_choice_counts_as_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEURON_PYTHON.choices[FRONT_END].variable, "another")
    chosen = replace(NEURON_PYTHON, pins=()).read_versions()
    assert chosen.pop("neuron.front-end") == "another"
    assert chosen.keys() == {"neuron.python", "neuron.top-k"}
