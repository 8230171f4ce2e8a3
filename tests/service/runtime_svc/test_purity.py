"""What the parts of the runtime load, seen from inside a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.repository import ROOT

WIRE = {"grpc", "google", "kiln", "edge"}
#: What of `edge` knows no wire: its errors, what the engine counts with, what a request id is, how large a request is,
#: what sees to tasks.
WIRELESS = {"edge", *(f"edge.{name}" for name in ("errors", "histogram", "request_id", "request_limit", "supervision"))}
TENSORS = {"torch", "numpy", "safetensors", "transformers", "compiler_svc"}

LOAD = """
import importlib, json, pkgutil, sys
sys.path[:0] = {path!r}
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), {package!r} + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


def modules_loaded_by(package: str) -> set[str]:
    code = LOAD.format(path=[str(ROOT), str(ROOT / "protos")], package=package)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("runtime_svc.engine", WIRE | TENSORS | {"tokenizers", "jinja2"}),
        ("runtime_svc.text", WIRE | TENSORS),
        ("runtime_svc.admission", WIRE | TENSORS),
        ("runtime_svc.deployments", WIRE | TENSORS),
        ("runtime_svc", TENSORS | {"tokenizers", "jinja2"}),
    ],
)
def test_package_loads_nothing_forbidden(package: str, forbidden: set[str]) -> None:
    loaded = {name.partition(".")[0] for name in modules_loaded_by(package) - WIRELESS}
    assert loaded & forbidden == set()
