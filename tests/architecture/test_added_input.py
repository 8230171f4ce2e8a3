"""A new input of executables is one row of `bundle.abi.inputs`, beside the model code that consumes it.

Nothing else is touched here: the manifest, executors, the golden check's and warm-up's idle rows, the engine's step
builder and tracing take the row as they find it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bundle.abi.inputs import INPUTS, Input
from bundle.consistency import check_consistency
from bundle.manifest import Executable, Manifest, TensorSpec
from bundle.manifest_parser import parse_manifest
from compiler_svc.models.layers.logits import RankLogits
from compiler_svc.models.layers.ranks import Ranks
from compiler_svc.trace.program import SubmodelProgram, make_example_tensors
from compiler_svc.trace.submodels import describe_submodel
from execution.errors import StepInvalid
from execution.executors.arguments import StepArguments, make_tensors
from execution.ranks.step_memory import StepMemory
from execution.step import Step, StepForm
from tests.bundles.manifests import DYNAMIC_FLAGS, make_manifest
from tests.ranks import fakes
from tests.ranks.engines import StartEngine, collect, is_async, start_engine, tokens_of
from tests.unit.compiler_svc.trace.test_submodels import make_spec

__all__ = ["is_async", "start_engine"]

FLAGS = ("style_ids", *DYNAMIC_FLAGS)
NUM_STYLES = 8


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Input(
        name="style_ids",
        dtype="int32",
        dims=("R",),
        idle=(0,),
        accepted=(0, NUM_STYLES - 1),
        flag="style_ids",
    )
    monkeypatch.setitem(INPUTS, row.name, row)  # type: ignore[arg-type]


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest(flags=FLAGS)


def names_of(executable: Executable) -> list[str]:
    return [spec.name for spec in executable.inputs]


def test_manifests_with_it_are_read(manifest: Manifest) -> None:
    parsed = parse_manifest(manifest.to_json())
    check_consistency(parsed)
    assert all(names_of(executable)[-1] == "style_ids" for executable in parsed.executables)


def test_executables_take_it_in_its_range(manifest: Manifest) -> None:
    executable = manifest.executables[-1]
    arguments, idle = StepArguments(manifest), StepForm(manifest, executable).make_idle()
    assert idle["style_ids"].tolist() == [0] * executable.batch_size
    inputs = make_tensors(executable.inputs, idle)
    assert len(arguments.order(executable, inputs)) == len(executable.inputs)
    inputs["style_ids"] += NUM_STYLES
    with pytest.raises(StepInvalid, match=r"inputs\[style_ids\]: got 8; accepted: 0 to 7"):
        arguments.order(executable, inputs)


def test_step_memory_has_room_for_it(manifest: Manifest) -> None:
    executable = manifest.executables[-1]
    memory = StepMemory(manifest)
    memory.write_inputs(Step(executable.tag, StepForm(manifest, executable).make_idle()), 0)
    memory.close()


async def test_engines_fill_it(start_engine: StartEngine) -> None:
    harness = await start_engine(flags=FLAGS)
    tokens = tokens_of(await collect(harness.submit([5, 6], max_new_tokens=6)))
    assert tokens == fakes.expected_tokens([5, 6], 6)
    assert {tuple(step.inputs["style_ids"]) for step in harness.ranks.steps} == {(0,), (0, 0, 0, 0)}


class Core(nn.Module):
    """The model code that consumes it: a style adds its number to every logit of a token."""

    def forward(self, *, style_ids: Tensor, input_ids: Tensor, state: Any, **_: Any) -> tuple[RankLogits, Any]:
        part = nn.functional.one_hot(input_ids[:, 0].long(), 100).float() * (1 + style_ids[:, None])
        return RankLogits(part=part, rank=None, vocab_size=100, ranks=Ranks(1)), list(state)


def test_tracing_hands_it_to_the_model() -> None:
    spec = make_spec(optional_inputs=("style_ids",))
    submodel = describe_submodel(spec, "token_generation", 64)
    assert submodel.flags == ("logits", "style_ids")
    assert submodel.inputs[-1] == TensorSpec(name="style_ids", dtype="int32", shape=(5,))
    program = SubmodelProgram(spec, submodel, Core())  # type: ignore[arg-type]
    examples = make_example_tensors(spec, submodel)
    traced = torch.export.export(program, examples, strict=False).module()
    values = {"input_ids": [7] * 5, "position_ids": [0] * 5, "seq_ids": [0] * 5, "style_ids": [0, 1, 2, 3, 4]}
    inputs = make_tensors(submodel.inputs, values)
    logits, *_ = traced(*inputs.values(), *examples[len(inputs) :])
    assert logits[:, 7].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
