"""LoRA adapters: each row of a step computes what transformers computes with the matrices that its adapter is merged
into, and a row without one what the model computes that has room for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from bundle.abi.tensor import DType
from bundle.manifest import ADAPTER_WEIGHTS, MODEL_WEIGHTS
from compiler_svc.lower.program import save_program
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.registry import describe_model
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.transforms import ALL_LINEAR, Adapters, ModelChanges, Quantization
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import ExecutableSpec
from execution.dtypes import TORCH_DTYPES
from execution.executors.arguments import order_constants
from execution.executors.eager import EagerProgram
from tests.bundles.manifests import describe_executable
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, write_tiny_model
from tests.contract.families.geometries import FIRST, Geometry
from tests.contract.families.test_quantized_logits import find_rows, replace_matrices
from tests.covering import cover
from tests.parity.geometries import LLAMA_GEOMETRIES
from tests.ranks.adapter_batches import RANKS, ROWS, SEQUENCES, draw_adapters, generate_on_ranks
from tests.ranks.stepping import run_eagerly

#: Families that `make test` shows: layers put together in every way, and matrices stored in every way.
SHOWN: Final = ("Gemma2ForCausalLM", "GPTNeoXForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "Phi3ForCausalLM")
#: From one module to all.
TARGETS: Final = (("q_proj",), ("v_proj", "k_proj"), ("o_proj",), ("down_proj", "up_proj"), (ALL_LINEAR,))


def merge(tiny: TinyModel, description: ModelDescription, adapters: dict[str, Tensor], slot: int) -> TinyModel:
    """The reference with an adapter in its matrices."""
    merged = TinyModel(deepcopy(tiny.model), tiny.checkpoint)
    for linear in description.linears():
        if f"{linear.name}.lora_A" in adapters:
            matrix, rows = find_rows(merged, linear, description)
            target = matrix.detach().t() if description.storage.is_transposed else matrix.detach()
            a, b = (adapters[f"{linear.name}.{kind}"][slot].float() for kind in ("lora_A", "lora_B"))
            target[rows] += b @ a
    return merged


def check(
    tiny: TinyModel,
    targets: tuple[str, ...],
    *,
    tp_degree: int = 1,
    dtype: DType = "float32",
    quantization: Quantization | None = None,
    make_run: Callable[..., Any] = run_eagerly,
    **options: Any,
) -> None:
    """Compares a model with room for adapters with the reference, and with the module of the model that has none;
    `options` are other changes of both.
    """
    plain = describe_model(tiny.checkpoint.config)
    room = Adapters(slots=AdapterSlots(slots=len(RANKS), rank=max(RANKS)), targets=targets)
    changes = ModelChanges(quantization=quantization, **options)
    adapted = replace(changes, adapters=room).apply(plain)
    sizes: dict[str, Any] = {"num_slots": len(ROWS), "ctx_batch_size": len(ROWS), "tkg_batch_size": len(ROWS)}
    sizes |= {"tp_degree": tp_degree, "dtype": dtype}
    adapters = {name: tensor.to(TORCH_DTYPES[dtype]) for name, tensor in draw_adapters(adapted).items()}
    slots = torch.tensor([slot for slot, _ in ROWS], dtype=torch.int32)
    results = generate_on_ranks(tiny, tiny.spec(description=adapted, **sizes), adapters, slots, make_run)

    base = generate_on_ranks(tiny, tiny.spec(description=changes.apply(plain), **sizes), {}, None)[0]
    if quantization is not None:
        replace_matrices(tiny, plain, quantization)
    for row, (slot, num_prompt_tokens) in enumerate(ROWS):
        reference = tiny if slot == -1 else merge(tiny, plain, adapters, slot)
        expected = reference.step_logits(SEQUENCES[row], num_prompt_tokens)
        tolerance = TOLERANCE if dtype == "float32" else 2 * find_rounding(reference, expected, row)
        for logits in results:
            assert deviation(logits[:, row], expected) < tolerance
        moved = deviation(results[0][:, row], base[:, row])
        assert moved == 0 if slot == -1 else moved > max(2 * tolerance, 10 * TOLERANCE)


def find_rounding(reference: TinyModel, expected: Tensor, row: int) -> float:
    """How far transformers' logits are from those in float32 if it computes in bfloat16."""
    narrow = TinyModel(deepcopy(reference.model).to(torch.bfloat16), reference.checkpoint)
    return deviation(narrow.step_logits(SEQUENCES[row], ROWS[row][1]), expected)


CASES: Final = cover(
    {
        "targets": TARGETS,
        "tp_degree": (1, 2, 4),
        "fuses_qkv": (False, True),
        "format": ("", "int8_per_channel"),
        # Four ranks copy KV heads of the first; they pad the query heads of the second, which have biases.
        "geometry": ("gqa2-tied-linear", "padded-groups-bias"),
    }
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case.values())), marks=[] if number % 2 else [pytest.mark.slow])
        for number, case in enumerate(CASES)
    ],
)
def test_targets_and_degrees(case: dict[str, Any], tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES[case["geometry"]])
    changes = {name: case[name] for name in ("targets", "tp_degree", "fuses_qkv")}
    check(tiny, quantization=Quantization(format=case["format"]) if case["format"] else None, **changes)


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, id=str(one), marks=[] if one.architecture in SHOWN else [pytest.mark.slow]) for one in FIRST],
)
def test_families(family: Geometry, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, family.attributes, architecture=family.architecture)
    check(tiny, (ALL_LINEAR,), tp_degree=2, fuses_qkv=True)


def test_programs_of_level_0(tmp_path: Path) -> None:
    """Their constants are in two weight sets, and their files need none of them."""
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES["gqa2-tied-linear"] | {"num_hidden_layers": 1})

    def run_program(
        spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec, shard: Mapping[str, Tensor]
    ) -> Callable[..., Sequence[Tensor]]:
        traced = export_submodel(spec, plan, submodel)
        path = tmp_path / f"{submodel.tag}.pt2"
        save_program(traced.program, path)
        sets: dict[str, dict[str, Tensor]] = {MODEL_WEIGHTS: {}, ADAPTER_WEIGHTS: {}}
        for name, tensor in shard.items():
            sets[ADAPTER_WEIGHTS if ".lora_" in name else MODEL_WEIGHTS][name] = tensor
        executable = describe_executable(submodel, constants=traced.constants)
        program = EagerProgram(executable, path)
        program.stage_constants(order_constants(executable, sets))
        program.swap_constants()
        return lambda *arguments: program.run(arguments)

    check(tiny, (ALL_LINEAR,), make_run=run_program)


def test_attention_in_another_dtype(tmp_path: Path) -> None:
    """Its projections compute in float32 with adapters that are kept in bfloat16, as their matrices are."""
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES["mha-bias-default"], dtype=torch.bfloat16)
    tiny.model.float()
    check(tiny, (ALL_LINEAR,), dtype="bfloat16", attention_dtype="float32")
