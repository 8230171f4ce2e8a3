"""A submodel's document says all that a configuration makes of it, so that another interpreter builds the same."""

from dataclasses import fields, replace
from typing import Any, Final

import msgspec
import pytest

from compiler_svc.config import resolve_config
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import UNCHANGED, Adapters, ModelChanges
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.trace.named_submodel import make_named_submodel
from compiler_svc.trace.submodel_document import read_document, write_document
from compiler_svc.trace.submodels import ExecutableSpec, describe_submodel, list_adapter_tensors
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.random_weights import write_checkpoint
from tests.unit.compiler_svc.builds.honoured_cases import GRAPH_CASES, PLAN_CASES, SAMPLING_VALUES

#: Every honoured attribute that changes a submodel: `tests/unit/compiler_svc/config/test_honoured.py` fails if one is
#: in no case.
CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    **{str(case): case.common | case.values for case in (*PLAN_CASES, *GRAPH_CASES)},
    **{
        f"on_device_sampling_config.{name}": {
            "on_device_sampling_config": {"do_sample": True, "top_k": 5, "temperature": 0.7, name: value}
        }
        for name, value in SAMPLING_VALUES.items()
    },
}
#: Sets every field of `ModelChanges` but `adapters`, which no compile honours yet.
ALL_CHANGES: Final = {
    "tp_degree": 2,
    "fused_qkv": True,
    "vocab_parallel": True,
    "cast_type": "as-declared",
    "attention_dtype": "bfloat16",
    "kv_cache_quant": True,
    "quantized": True,
    "modules_to_not_convert": ["lm_head"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


def plan(checkpoint: Checkpoint, values: dict[str, Any]) -> BuildPlan:
    """As for a plan, which takes what compiles for Neuron refuse."""
    document = {"neuron_config": {"seq_len": 32} | values}
    resolution = resolve_config(document, checkpoint_dtype="float32", target="trn2", compiles=False)
    return plan_build(checkpoint, resolution.config.neuron_config, target="trn2")


def write(checkpoint: Checkpoint, planned: BuildPlan, submodel: ExecutableSpec, changes: ModelChanges) -> Any:
    """The document as the other interpreter gets it."""
    tensors = planned.weights.describe_shard(0, None, 0).tensors
    written = write_document(checkpoint.config, planned.model, tensors, submodel, changes=changes)
    return msgspec.json.decode(msgspec.json.encode(written))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_an_attribute_changes_crosses(checkpoint: Checkpoint, name: str) -> None:
    planned = plan(checkpoint, CONFIGURATIONS[name])
    for submodel in planned.submodels:
        spec, tensors, read = read_document(write(checkpoint, planned, submodel, planned.changes))
        assert (spec, read) == (planned.model, submodel)
        assert tensors == tuple(planned.weights.describe_shard(0, None, 0).tensors)


@pytest.mark.parametrize("name", [one.name for one in fields(ModelChanges)])
def test_a_change_that_does_not_cross_is_noticed(checkpoint: Checkpoint, name: str) -> None:
    planned = add_adapters(checkpoint, plan(checkpoint, ALL_CHANGES))
    lost = replace(planned.changes, **{name: getattr(UNCHANGED, name)})
    assert lost != planned.changes
    with pytest.raises(ProgramUnsupported, match="described in another way"):
        read_document(write(checkpoint, planned, planned.submodels[-1], lost))


def add_adapters(checkpoint: Checkpoint, planned: BuildPlan) -> BuildPlan:
    """What a configuration will do that asks for adapters."""
    adapters = Adapters(slots=AdapterSlots(slots=2, rank=3), targets=("q_proj", "down_proj"))
    changes = replace(planned.changes, adapters=adapters)
    model = replace(planned.model, description=changes.apply(checkpoint.description))
    return replace(planned, changes=changes, model=model)


def test_adapters_cross(checkpoint: Checkpoint) -> None:
    """Their tensors are none of the shard's, whose names the document has."""
    planned = add_adapters(checkpoint, plan(checkpoint, ALL_CHANGES))
    submodel = describe_submodel(planned.model, "token_generation", 32)
    written = write(checkpoint, planned, submodel, planned.changes)
    assert read_document(written)[0] == planned.model
    made = make_named_submodel(written)
    assert made.examples["adapter_ids"].shape == (planned.model.tkg_batch_size,)
    shapes = {name: tuple(made.module.get_parameter(name).shape) for name in made.weights if ".lora_" in name}
    assert shapes == {one.name: one.shape for one in list_adapter_tensors(planned.model)}
    assert len(shapes) == 2 * 2 * len(planned.model.description.layers)
