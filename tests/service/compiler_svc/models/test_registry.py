"""A family that another distribution registers is built like one of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.checkpoints.tiny_models import GEOMETRIES, write_tiny_model
from tests.repository import ROOT

#: A family of another distribution: Llama's description under another name, and a module of its own.
FAMILY = """
from dataclasses import replace

from compiler_svc.models.families.llama.config import FAMILY as LLAMA

FAMILY = replace(LLAMA, architectures=("CamelidForCausalLM",), model="camelid_model:build")
"""
MODEL = """
from functools import partial

from compiler_svc.models.layers.decoder import CausalLm, PreNormLayer

build = partial(CausalLm, make_layer=PreNormLayer)
"""

#: What a compiler does with a checkpoint of it, in a process that finds the distribution.
USE = """
import sys
from pathlib import Path

from compiler_svc.models.registry import describe_model, find_family, list_attributes, list_registered
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.weights.checkpoint import Checkpoint

checkpoint = Checkpoint.open(Path(sys.argv[1]))
assert find_family(checkpoint.config).model == "camelid_model:build"
assert describe_model(checkpoint.config).numeric_config["architecture"] == "CamelidForCausalLM"
assert "mlp_bias" in list_attributes(checkpoint.config)
assert list_registered() == {"camelid": "camelid-family 1.2"}
assert "torch" not in sys.modules, "planning needs none"

from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.specs import make_plan, make_spec

traced = export_submodel(
    make_spec(checkpoint), make_plan(checkpoint), describe_submodel(make_spec(checkpoint), "context_encoding", 16)
)
print(digest_bundle_code(), traced.graph_digest)
"""


def test_a_family_from_outside(tmp_path: Path) -> None:
    site = tmp_path / "site"
    metadata = site / "camelid_family-1.2.dist-info"
    metadata.mkdir(parents=True)
    (site / "camelid.py").write_text(FAMILY)
    (site / "camelid_model.py").write_text(MODEL)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: camelid-family\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text("[kiln.model_families]\ncamelid = camelid:FAMILY\n")
    model = tmp_path / "model"
    write_tiny_model(model, GEOMETRIES["gqa-llama3-tied"])
    config = model / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "CamelidForCausalLM"))
    code_digest, graph_digest = _run(USE, str(model), path=f"{site}:{ROOT}").split()
    own = "from compiler_svc.planning.code_digest import digest_bundle_code; print(digest_bundle_code())"
    assert code_digest != _run(own, path=str(ROOT)).strip(), "cached bundles would not notice the family"
    assert graph_digest.startswith("sha256:")


def _run(code: str, *arguments: str, path: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
