"""What a process loads, seen from inside a fresh interpreter: import-linter cannot see `importlib` and lazy imports."""

import json
import subprocess
import sys

import pytest

from tests.repository import ROOT

IMPORT_ALL = """
import importlib, json, pathlib, sys
(root,) = map(pathlib.Path, importlib.import_module({package!r}).__path__)
for path in root.rglob("*.py"):
    name = ".".join(({package!r}, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
    # The one runs when it is imported; the other is for those who have transformers.
    if not name.startswith(("kiln_client.__main__", "kiln_client.hf")):
        importlib.import_module(name)
print(json.dumps(sorted(name.partition(".")[0] for name in sys.modules)))
"""


def modules_loaded_by(package: str) -> set[str]:
    """Top-level modules that importing every module of `package` brings in."""
    code = IMPORT_ALL.format(package=package)
    path = [str(ROOT), str(ROOT / "protos"), str(ROOT / "clients/python")]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("bundle", {"torch", "numpy", "grpc", "google", "safetensors", "transformers"}),
        ("targets", {"torch", "numpy", "grpc", "google", "safetensors", "transformers", "execution"}),
        ("edge", {"torch", "numpy", "transformers", "execution"}),
        ("runtime_svc", {"torch", "numpy", "transformers", "safetensors", "compiler_svc"}),
        (
            "kiln_client",
            {"torch", "numpy", "transformers", "bundle", "targets", "edge", "execution", "compiler_svc", "runtime_svc"},
        ),
    ],
)
def test_package_loads_nothing_forbidden(package: str, forbidden: set[str]) -> None:
    assert modules_loaded_by(package) & forbidden == set()
