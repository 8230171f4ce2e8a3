"""Executables of level 0 that executors load and write adapters into: each row of a batch computes what transformers
computes with the matrices that PEFT merges its adapter into, and a row without one what the base computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from bundle.manifest import ADAPTER_WEIGHTS, Executable, Manifest
from compiler_svc.adapters.files import open_adapter
from compiler_svc.adapters.fitting import fit_adapter
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import ALL_LINEAR, Adapters, ModelChanges, Quantization
from execution.executors.arguments import make_tensors
from execution.executors.executor import Executor, load_executor
from execution.step import StepForm
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.adapters import make_adapter
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.contract.families.geometries import FIRST
from tests.contract.families.test_quantized_logits import replace_matrices
from tests.covering import cover
from tests.ranks.threads import run_ranks

#: The slot of each row, and the tokens of its prompt. Two rows have one adapter.
ROWS: Final = ((3, 11), (-1, 5), (0, 16), (4, 1), (1, 9), (2, 7), (3, 2))
NUM_SLOTS: Final = 5
NUM_LATER: Final = 2
SEQUENCES: Final = [draw_tokens(length + NUM_LATER, seed=row) for row, (_, length) in enumerate(ROWS)]
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")

CASES: Final = cover(
    {
        "targets": (ATTENTION, MLP, (ALL_LINEAR,)),
        "rank": (1, 8, 64),
        "tp_degree": (1, 2, 4),
        "format": ("", "int8_per_channel"),
        # Biases; projections that are stored as one; a tied head and norms behind the layers.
        "architecture": ("LlamaForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM"),
        "fuses_qkv": (False, True),
    }
)
#: Cases of `make test`, which have every value of each factor.
NUM_SHOWN: Final = 8


def name(case: dict[str, Any]) -> str:
    targets = {ATTENTION: "attention", MLP: "mlp"}.get(case["targets"], "all")
    return "-".join(map(str, [targets, *(case[one] for one in case if one != "targets")]))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name(case), marks=[] if number < NUM_SHOWN else [pytest.mark.slow])
        for number, case in enumerate(CASES)
    ],
)
def test_five_adapters_in_one_batch(case: dict[str, Any], tmp_path: Path) -> None:
    architecture = case["architecture"]
    family = next(one for one in FIRST if one.architecture == architecture)
    tiny = write_tiny_model(tmp_path / "model", family.attributes, architecture=architecture)
    quantization = Quantization(format=case["format"]) if case["format"] else None
    room = Adapters(slots=AdapterSlots(slots=NUM_SLOTS, rank=case["rank"]), targets=case["targets"])
    changes = ModelChanges(fuses_qkv=case["fuses_qkv"], quantization=quantization, adapters=room)
    description = changes.apply(tiny.checkpoint.description)
    bundle = make(tiny, description, tmp_path, case["tp_degree"])
    if quantization is not None:
        replace_matrices(tiny, tiny.checkpoint.description, quantization)

    merged = list(write_adapters(tiny, tmp_path / "adapters", case))
    with loaded(bundle) as executors:
        write_slots(executors, description, tmp_path / "adapters")
        found = generate(bundle.manifest, executors)
    for row, (slot, length) in enumerate(ROWS):
        reference = tiny if slot == -1 else merged[slot]
        expected = reference.step_logits(SEQUENCES[row], length)
        assert deviation(found[:, row], expected) < TOLERANCE, f"row {row}, adapter {slot}"
        if slot != -1:
            assert deviation(expected, tiny.step_logits(SEQUENCES[row], length)) > 100 * TOLERANCE


def make(tiny: TinyModel, description: ModelDescription, path: Path, tp_degree: int) -> UnpublishedBundle:
    sizes = {"num_slots": len(ROWS), "ctx_batch_size": len(ROWS), "tkg_batch_size": len(ROWS)}
    spec = tiny.spec(description=description, tp_degree=tp_degree, **sizes)
    plan = tiny.plan(description=description, tp_degree=tp_degree)
    (path / "bundle").mkdir()
    return make_bundle(path / "bundle", spec, plan, tiny.checkpoint, context_buckets=(16,), token_buckets=(32,))


def write_adapters(tiny: TinyModel, path: Path, case: dict[str, Any]) -> Iterator[TinyModel]:
    """Writes an adapter for each slot, of the largest rank and smaller ones; yields the merged models."""
    targets = ALL_LINEAR if case["targets"] == (ALL_LINEAR,) else list(case["targets"])
    for slot in range(NUM_SLOTS):
        rank = max(1, case["rank"] >> slot)
        options = {"r": rank, "lora_alpha": 1 + slot, "use_rslora": slot % 2 == 1, "target_modules": targets}
        adapted = make_adapter(tiny, path / str(slot), seed=slot, **options)
        yield TinyModel(adapted.merge_and_unload(), tiny.checkpoint)


@contextmanager
def loaded(bundle: UnpublishedBundle) -> Iterator[list[Executor]]:
    """The executors of all ranks, in this process."""
    with ExitStack() as opened:
        executors = []
        for rank in range(bundle.manifest.tp_degree):
            executors.append(load_executor(bundle.manifest, rank, bundle.blob_path))
            opened.callback(executors[-1].close)
        yield executors


def write_slots(executors: Sequence[Executor], description: ModelDescription, path: Path) -> None:
    """Writes the adapters into the slots of all ranks."""
    tp_degree = len(executors)
    for slot in range(NUM_SLOTS):
        fitted = fit_adapter(open_adapter(path / str(slot)), description, dtype="float32", tp_degree=tp_degree)
        paths = [path / f"slot{slot}-rank{rank}.safetensors" for rank in range(tp_degree)]
        with ExitStack() as files:
            fitted.write({rank: files.enter_context(one.open("wb")) for rank, one in enumerate(paths)})
        for executor, one in zip(executors, paths, strict=True):
            executor.write(ADAPTER_WEIGHTS, slot, one)


def generate(manifest: Manifest, executors: Sequence[Executor]) -> Tensor:
    """Logits of all rows, [steps, rows, vocabulary]: of prompts together, then of later tokens."""
    context, generator = (manifest.executables_of(one)[0] for one in ("context_encoding", "token_generation"))
    starts = [0] * len(ROWS)
    ends = [length for _, length in ROWS]
    logits = [step(manifest, executors, context, starts, ends)]
    for later in range(NUM_LATER):
        starts = [length + later for _, length in ROWS]
        logits.append(step(manifest, executors, generator, starts, [start + 1 for start in starts]))
    return torch.stack(logits)


def step(
    manifest: Manifest, executors: Sequence[Executor], executable: Executable, starts: list[int], ends: list[int]
) -> Tensor:
    form = StepForm(manifest, executable)
    inputs = form.make_idle()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        form.put_tokens(inputs, row, SEQUENCES[row][start:end], start=start, blocks=(row,))
        form.put_values(inputs, "adapter_ids", row, [ROWS[row][0]])
    tensors = make_tensors(executable.inputs, inputs)
    first, *others = run_ranks(len(executors), lambda rank: executors[rank].run(executable.tag, tensors)["logits"])
    assert all(torch.equal(first, other) for other in others)
    return first
