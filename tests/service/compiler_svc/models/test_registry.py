"""A family that another distribution registers is built like one of ours."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints.outside_families import install_families
from tests.checkpoints.tiny_models import GEOMETRIES, write_tiny_model
from tests.snippets import run_python

#: A family of another distribution: Llama's description under another name, and a module of its own.
FAMILY = """
from dataclasses import replace

from compiler_svc.models.families.llama import FAMILY as LLAMA

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

from compiler_svc.golden import errors
from compiler_svc.models.registry import describe_model, find_family, list_attributes, list_registered
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.sharding.plan import plan_weights
from compiler_svc.trace import graph_spec, submodels
from compiler_svc.weights.checkpoint import Checkpoint

checkpoint = Checkpoint.open(Path(sys.argv[1]))
assert find_family(checkpoint.config).model == "camelid_model:build"
assert describe_model(checkpoint.config).numeric_config["architecture"] == "CamelidForCausalLM"
assert "mlp_bias" in list_attributes(checkpoint.config)
assert list_registered() == {"camelid": "camelid-family 1.2"}
plan = plan_weights(describe_model(checkpoint.config), checkpoint, dtype="float32", cast_type="config", tp_degree=1)
assert plan.shard_size_bytes > 0
assert not {"torch", "transformers"} & sys.modules.keys(), "planning needs none, which take seconds to load"

from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.submodels import describe_submodel
from tests.checkpoints.specs import make_plan, make_spec

traced = export_submodel(
    make_spec(checkpoint), make_plan(checkpoint), describe_submodel(make_spec(checkpoint), "context_encoding", 16)
)
print(digest_bundle_code(), traced.graph_digest)
"""


def test_a_family_from_outside(tmp_path: Path) -> None:
    modules = {"camelid": FAMILY, "camelid_model": MODEL}
    site = install_families(tmp_path / "site", modules, {"camelid": "camelid:FAMILY"})
    model = tmp_path / "model"
    write_tiny_model(model, GEOMETRIES["gqa-llama3-tied"])
    config = model / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "CamelidForCausalLM"))
    code_digest, graph_digest = run_python(USE, model, site=site).stdout.split()
    own = "from compiler_svc.planning.code_digest import digest_bundle_code; print(digest_bundle_code())"
    assert code_digest != run_python(own).stdout.strip(), "cached bundles would not notice the family"
    assert graph_digest.startswith("sha256:")
