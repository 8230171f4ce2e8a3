"""Bundles with room for adapters: the golden check computes a sequence with one, too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compiler_svc.adapters.fitting import fit_adapter
from compiler_svc.golden.adapter import draw_adapter
from compiler_svc.golden.check import check_golden, compare_steps
from compiler_svc.golden.errors import GoldenMismatch
from compiler_svc.golden.reference import Reference
from compiler_svc.golden.steps import loaded_steps
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import Adapters, ModelChanges, Quantization
from execution.ranks.forkservers import RankForkservers
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.adapters import load_ranks
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.contract.families.geometries import FIRST, Geometry
from tests.contract.families.test_adapters import SHOWN
from tests.parity.geometries import LLAMA_GEOMETRIES
from tests.ranks.stepping import Stepper

ROOM = AdapterSlots(slots=3, rank=4)


def bundle_of(
    tiny: TinyModel, directory: Path, tp_degree: int = 1, **changes: Any
) -> tuple[UnpublishedBundle, ModelChanges]:
    made = ModelChanges(adapters=Adapters(slots=ROOM, targets=changes.pop("targets", ())), **changes)
    description = made.apply(tiny.checkpoint.description)
    spec = tiny.spec(description=description, tp_degree=tp_degree)
    plan = tiny.plan(description=description, tp_degree=tp_degree)
    bundle = make_bundle(directory, spec, plan, tiny.checkpoint, context_buckets=(16,), token_buckets=(32,))
    return bundle, made


def write_family(directory: Path, architecture: str) -> TinyModel:
    family = next(one for one in FIRST if one.architecture == architecture)
    return write_tiny_model(directory, family.attributes, architecture=architecture)


@pytest.mark.parametrize(
    ("architecture", "tp_degree", "changes"),
    [
        ("GPT2LMHeadModel", 1, {}),
        ("Phi3ForCausalLM", 1, {"fuses_qkv": True, "targets": ("qkv_proj", "down_proj")}),
        ("GPTNeoXForCausalLM", 2, {"quantization": Quantization(format="int8_per_channel")}),
        ("LlamaForCausalLM", 1, {"quantization": Quantization(format="int8_per_channel", activations="int8")}),
    ],
)
def test_an_adapter_is_compared(
    forkservers: RankForkservers, tmp_path: Path, architecture: str, tp_degree: int, changes: dict[str, Any]
) -> None:
    tiny = write_family(tmp_path / "model", architecture)
    (tmp_path / "bundle").mkdir()
    bundle, made = bundle_of(tiny, tmp_path / "bundle", tp_degree, **changes)
    result = check_golden(bundle.manifest, bundle.blob_path, tiny.checkpoint, forkservers.open, made)
    assert result.adapter_rank == ROOM.rank
    assert ", also with an adapter of rank 4, logits within" in result.summary


def test_an_adapter_that_changes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = write_tiny_model(tmp_path / "model", LLAMA_GEOMETRIES["gqa2-tied-linear"])
    (tmp_path / "bundle").mkdir()
    bundle, made = bundle_of(tiny, tmp_path / "bundle", targets=("v_proj",))
    compared: dict[str, Any] = {"checkpoint": tiny.checkpoint, "changes": made}
    with loaded_steps(bundle.manifest, bundle.blob_path) as steps:
        monkeypatch.setattr(steps, "write_adapter", lambda _slot, _paths: None)
        with pytest.raises(GoldenMismatch, match="logits deviate"):
            compare_steps(bundle.manifest, steps, **compared)


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, id=str(one), marks=[] if one.architecture in SHOWN else [pytest.mark.slow]) for one in FIRST],
)
def test_the_reference_adds_what_graphs_add(tmp_path: Path, family: Geometry) -> None:
    tiny = write_tiny_model(tmp_path, family.attributes, architecture=family.architecture)
    description = ModelChanges(adapters=Adapters(slots=AdapterSlots(slots=1, rank=4))).apply(
        tiny.checkpoint.description
    )
    adapter = draw_adapter(description, "float32")
    assert adapter is not None
    (matrices,) = load_ranks(fit_adapter(adapter, description, dtype="float32", tp_degree=1))
    stepper = Stepper(
        tiny.spec(description=description, num_slots=1),
        tiny.plan(description=description),
        tiny.checkpoint,
        context_buckets=(16,),
        token_buckets=(32,),
        adapters={name: tensor[None] for name, tensor in matrices.items()},
    )
    tokens, slot = draw_tokens(8, seed=1), torch.zeros(1, dtype=torch.int32)
    found = [stepper.prefill({0: tokens[:7]}, adapter_ids=slot), stepper.decode({0: (tokens[7], 7)}, adapter_ids=slot)]
    reference = Reference(tiny.checkpoint, torch.float32)
    plain = torch.stack([*reference.run(tokens, 7)])
    with reference.adapted(adapter, description):
        expected = torch.stack([*reference.run(tokens, 7)])
    assert deviation(torch.stack([step["logits"][0] for step in found]), expected) < TOLERANCE
    assert deviation(plain, expected) > 100 * TOLERANCE
    assert torch.equal(torch.stack([*reference.run(tokens, 7)]), plain)
