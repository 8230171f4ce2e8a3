"""What people's files have besides, or name otherwise: every family makes of them what transformers does."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bundle.digest import sha256_bytes
from compiler_svc.sharding.writer import write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.inventory import set_surplus_aside
from compiler_svc.weights.tensors import check_zeros
from tests.checkpoints.forms import copy_in_form
from tests.checkpoints.specs import make_plan
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model
from tests.contract.families.geometries import FIRST, Geometry
from tests.covering import cover

Tensors = dict[str, torch.Tensor]

#: Names of tensors before their own ones: those of the whole model, of the base model, of one inside of another.
PREFIXES: Final = ("once", "never", "twice")


def find_layer(model: TinyModel) -> str:
    """The path of the last layer in the checkpoint."""
    return model.checkpoint.description.storage.find_name("model.layers.1.x").removesuffix(".x")


def list_biases(model: TinyModel) -> Tensors:
    """Zeros for modules without a bias: those of the last norm, or of a head that is the table."""
    known = {*model.checkpoint.tensors}
    modules = [name.removesuffix(".weight") for name in known if name.endswith(".weight")]
    lacking = [f"{name}.bias" for name in sorted(modules) if f"{name}.bias" not in known]
    return {name: torch.zeros(8) for name in lacking if "embed" not in name and "wte" not in name}


#: What is added to the checkpoint.
SURPLUS: Final = {
    "nothing": lambda model: {},
    "value head": lambda model: {"v_head.summary.weight": torch.ones(1, 8), "v_head.summary.bias": torch.ones(1)},
    "cached tables": lambda model: {f"{find_layer(model)}.attn.rotary_emb.cos_cached": torch.ones(4)},
    "layer beyond": lambda model: {find_layer(model).removesuffix("1") + "2.mlp.up_proj.bias": torch.ones(4)},
    "empty": lambda model: {f"{find_layer(model)}.attn.q_proj.lora_A.weight": torch.ones(0, 8)},
    "zeros": list_biases,
}

CASES: Final = cover(
    {
        "family": FIRST,
        "prefix": PREFIXES,
        "surplus": list(SURPLUS),
        "form": ("safetensors", "pickle"),
        "architectures": ("own", "none", "base"),
    }
)
#: `make test` runs one case of each family.
_SHOWN: Final = [next(case for case in CASES if case["family"] is family) for family in FIRST]


def describe(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "_") for value in case.values())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Geometry, TinyModel]:
    """The models that tests have written so far."""
    return {}


def rename(tensors: Tensors, prefix: str, how: str) -> Tensors:
    if how == "never":
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if how == "twice":
        # A head under its name in files alone is one that transformers does not find below the prefix.
        return {name if name == "embed_out.weight" else prefix + name: tensor for name, tensor in tensors.items()}
    return tensors


def name_architecture(path: Path, model: TinyModel, how: str) -> None:
    """Writes which model `config.json` names: its own, none, or the one without a head."""
    config = json.loads((path / "config.json").read_text())
    names = {"none": None, "base": [type(model.model.base_model).__name__]}
    (path / "config.json").write_text(json.dumps(config | ({} if how == "own" else {"architectures": names[how]})))


def digest_shard(checkpoint: Checkpoint) -> str:
    sink = io.BytesIO()
    write_shards(make_plan(checkpoint, tp_degree=2), checkpoint, {1: sink})
    return sha256_bytes(sink.getvalue())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=describe(case), marks=[] if case in _SHOWN else [pytest.mark.slow]) for case in CASES],
)
def test_files_of_users_make_what_transformers_makes(
    models: dict[Geometry, TinyModel], case: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = case["family"]
    if family not in models:
        path = tmp_path_factory.mktemp("model")
        models[family] = write_tiny_model(path, family.attributes, architecture=family.architecture)
    tiny = models[family]
    state = load_file(tiny.checkpoint.path / "model.safetensors")
    added = SURPLUS[case["surplus"]](tiny)
    tensors = rename(state | added, f"{tiny.model.base_model_prefix}.", case["prefix"])
    path = copy_in_form(tiny.checkpoint.path, tmp_path / "copy", case["form"], tensors)
    name_architecture(path, tiny, case["architectures"])
    checkpoint = set_surplus_aside(Checkpoint.open(path))
    check_zeros(checkpoint)
    assert len(checkpoint.surplus) == len(added)
    assert digest_shard(checkpoint) == digest_shard(tiny.checkpoint)
    assert checkpoint.description.numeric_config == tiny.checkpoint.description.numeric_config

    loaded, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert type(loaded) is type(tiny.model)
    assert not info["missing_keys"]
    assert len(info["unexpected_keys"]) == len(added)
    expected = tiny.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
