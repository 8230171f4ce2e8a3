"""Layers that quantize what they multiply, against transformers with modules that a test of its own rules, or
compressed-tensors, lets do so."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import chain, product
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor, nn

from bundle.abi.formats import ACTIVATION_FORMATS
from compiler_svc.config import resolve_config
from compiler_svc.errors import FeatureNotServed
from compiler_svc.golden.reference import Reference
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.transforms import ModelChanges, Quantization
from compiler_svc.planning.build_plan import choose_changes
from compiler_svc.planning.checkpoint_quantization import note_activations, read_quantization
from compiler_svc.sharding.errors import ShardingNotServed
from compiler_svc.trace.export import export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import describe_submodel
from compiler_svc.weights.checkpoint import Checkpoint
from execution.quantized_linear import quantize_rows
from tests.checkpoints.quantized import TOKEN_WRITERS, compress
from tests.checkpoints.tiny_models import TinyModel, deviation, draw_tokens, write_tiny_model
from tests.contract.families.geometries import FIRST, Geometry
from tests.contract.families.test_quantized_logits import replace_matrices
from tests.parity.geometries import LLAMA_GEOMETRIES
from tests.ranks.threads import run_ranks
from tests.unit.compiler_svc.config.resolving import resolve, unserved_in
from tests.unit.compiler_svc.sharding.test_ranks import make_stepper
from tests.unit.compiler_svc.weights.test_packed import write_quantized

#: Short, so that few numbers lie where their last digits decide between two items.
SEQUENCES: Final = tuple(draw_tokens(5, seed=seed) for seed in range(6))
NUM_PROMPT_TOKENS: Final = 4
GQA: Final = LLAMA_GEOMETRIES["gqa2-tied-linear"]
#: Each format with what quantizes a matrix, and the largest item.
FORMATS: Final = {
    "int8": ("int8_per_channel", 127.0),
    "f8e4m3": ("f8e4m3_per_channel", 240.0),
    "int8 of int4": ("int4", 127.0),
}

Logits = list[Tensor]


def find_distance(logits: Logits, expected: Logits) -> float:
    """The deviation of the sequence in the middle: some others may have an item that is one step away."""
    return statistics.median(map(deviation, logits, expected))


def compute(tiny: TinyModel, spec: GraphSpec) -> Logits:
    steppers = [make_stepper(tiny, rank, spec) for rank in range(spec.tp_degree)]

    def run(rank: int) -> Logits:
        logits = []
        for tokens in SEQUENCES:
            first = steppers[rank].prefill({1: tokens[:NUM_PROMPT_TOKENS]})["logits"][0]
            last = steppers[rank].decode({1: (tokens[-1], NUM_PROMPT_TOKENS)})["logits"][1]
            logits.append(torch.stack([first, last]))
        return logits

    first, *others = run_ranks(spec.tp_degree, run)
    assert all(map(torch.equal, first * len(others), chain.from_iterable(others)))
    return first


def expect(tiny: TinyModel) -> Logits:
    return [tiny.step_logits(tokens, NUM_PROMPT_TOKENS) for tokens in SEQUENCES]


def refer(tiny: TinyModel, quantization: Quantization) -> Logits:
    """What the golden check's reference computes."""
    reference = Reference(tiny.checkpoint, torch.float32, ModelChanges(quantization=quantization))
    return [torch.stack([*reference.run(tokens, NUM_PROMPT_TOKENS)]) for tokens in SEQUENCES]


def leave(hidden: Tensor, largest: float) -> Tensor:
    """What is left of rows, computed in float64."""
    scales = hidden.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    items = hidden.double() / scales
    items = items.to(torch.float8_e4m3fn).double() if largest == 240 else items.round()
    return (items * scales).to(hidden.dtype)


def quantize_inputs(tiny: TinyModel, description: ModelDescription, largest: float) -> None:
    """Lets the reference's modules of quantized layers multiply what is left of their inputs."""
    modules = set()
    for linear in (one for one in description.linears() if one.format):
        for one in linear.list_stored("weight"):
            path = description.storage.find_name(one.whole.tensor).removesuffix(".weight")
            is_head = linear is description.head
            modules.add(tiny.model.get_output_embeddings() if is_head else tiny.model.get_submodule(path))
    for module in modules:
        module.register_forward_pre_hook(lambda _, args: (leave(args[0], largest),))


def check(
    tiny: TinyModel, quantization: Quantization, tp_degree: int, largest: float, *, fuses_qkv: bool, **changes: Any
) -> None:
    replace_matrices(tiny, tiny.checkpoint.description, quantization)
    whole = expect(tiny)
    quantize_inputs(tiny, ModelChanges(quantization=quantization).apply(tiny.checkpoint.description), largest)
    expected = expect(tiny)
    assert find_distance(expected, whole) > 2e-3, "whole activations are no different"
    described = ModelChanges(fuses_qkv=fuses_qkv, quantization=quantization).apply(tiny.checkpoint.description)
    spec = tiny.spec(tp_degree=tp_degree, description=described, **changes)
    assert find_distance(compute(tiny, spec), expected) < (1e-3 if spec.dtype == "float32" else 1e-1)
    assert find_distance(refer(tiny, quantization), expected) < 1e-3


def choose_cases() -> list[Any]:
    """Each format of each family's first geometry, by turns with one rank or two, and fused or not."""
    return [
        pytest.param(one, name, 1 + number % 2, number // 2 % 2 == 1, marks=[] if is_short else [pytest.mark.slow])
        for number, ((place, one), (other, name)) in enumerate(product(enumerate(FIRST), enumerate(FORMATS)))
        for is_short in [(place + other) % (2 * len(FORMATS)) == 0]
    ]


@pytest.mark.parametrize(("geometry", "name", "tp_degree", "fuses_qkv"), choose_cases())
def test_families(geometry: Geometry, name: str, tp_degree: int, fuses_qkv: bool, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, geometry.attributes, architecture=geometry.architecture)
    format_name, largest = FORMATS[name]
    quantization = Quantization(format=format_name, activations=name.partition(" ")[0])
    check(tiny, quantization, tp_degree, largest, fuses_qkv=fuses_qkv)


def test_bfloat16(tmp_path: Path) -> None:
    quantization = Quantization(format="int8_per_channel", activations="int8")
    check(write_tiny_model(tmp_path, GQA), quantization, 1, 127, fuses_qkv=False, dtype="bfloat16")


@pytest.mark.parametrize(
    ("architecture", "skipped"), [("LlamaForCausalLM", "up_proj"), ("GPT2LMHeadModel", "attn.k_proj")]
)
def test_skipped_layers_multiply_whole_activations(architecture: str, skipped: str, tmp_path: Path) -> None:
    """Also those whose outputs share a module of the checkpoint with layers that are quantized."""
    one = next(one for one in FIRST if one.architecture == architecture)
    tiny = write_tiny_model(tmp_path, one.attributes, architecture=architecture)
    quantization = Quantization(format="int8_per_channel", activations="int8", skipped=(skipped, "lm_head"))
    described = ModelChanges(quantization=quantization).apply(tiny.checkpoint.description)
    assert {one.activations for one in described.linears() if skipped in one.name} == {""}
    expected = refer(tiny, quantization)
    assert find_distance(compute(tiny, tiny.spec(description=described)), expected) < 1e-3
    everywhere = Quantization(format="int8_per_channel", activations="int8", skipped=("lm_head",))
    assert find_distance(refer(tiny, everywhere), expected) > 2e-3


@pytest.mark.parametrize("name", TOKEN_WRITERS)
def test_checkpoints_that_quantize_activations_are_followed(name: str, tmp_path: Path) -> None:
    tiny = write_quantized(tmp_path, TOKEN_WRITERS[name])
    config = resolve(**read_quantization(tiny.checkpoint, "cpu")).config.neuron_config
    assert config.activation_quantization_type == "dynamic_whole"
    assert "activation_quantization_type" not in read_quantization(tiny.checkpoint, "trn2")
    given = TOKEN_WRITERS[name].config["config_groups"]["group_0"]["input_activations"]
    args = QuantizationArgs(**given)

    def fake(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scales, zeros = compute_dynamic_scales_and_zp(inputs[0], args, module)
        return (fake_quantize(inputs[0], scales, zeros, args),)

    whole = expect(tiny)
    for path, module in tiny.model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            module.register_forward_pre_hook(fake)
    expected = expect(tiny)
    assert find_distance(expected, whole) > 2e-3
    for tp_degree in (1, 2):
        spec = tiny.spec(description=choose_changes(config).apply(tiny.checkpoint.description), tp_degree=tp_degree)
        assert find_distance(compute(tiny, spec), expected) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_items_are_exact_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    kind = ACTIVATION_FORMATS[name]
    rows = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    rows[1] = 0
    rows[2, 7] = torch.nan
    items, scales = quantize_rows(rows, rows.abs().amax(-1, keepdim=True), kind)
    assert (items.dtype, scales.dtype, scales.shape) == (dtype, torch.float32, (4, 1))
    numbers = items.double() * kind.unit
    assert not numbers[1].any(), "a row of zeros stays one"
    assert items[2].isnan().any(), "a row without numbers stays one"
    kept = numbers[[0, 3]].float()
    assert torch.equal(kept.to(getattr(torch, kind.item)).float(), kept)
    assert kept.abs().amax() >= min(abs(bound) for bound in kind.bounds)
    step = rows[[0, 3]].double().abs().amax() / 127
    left = (items.double() * scales.double())[[0, 3]]
    torch.testing.assert_close(left, rows[[0, 3]].double(), rtol=2**-4, atol=float(step))


def test_degrees_that_pad_groups_of_heads_are_refused(tmp_path: Path) -> None:
    """A head of padding attends to values, and would count as a row's largest magnitude."""
    tiny = write_tiny_model(tmp_path, LLAMA_GEOMETRIES["padded-groups-bias"])
    quantization = Quantization(format="int8_per_channel", activations="int8")
    description = ModelChanges(quantization=quantization).apply(tiny.checkpoint.description)
    tiny.plan(description=description, tp_degree=2)
    with pytest.raises(ShardingNotServed, match="got 4 with num_attention_heads 14; accepted: a degree that pads no"):
        tiny.plan(description=description, tp_degree=4)


def test_what_becomes_of_activations_is_said(tmp_path: Path) -> None:
    followed = write_quantized(tmp_path / "tokens", TOKEN_WRITERS["int"]).checkpoint
    said = read_quantization(followed, "cpu")

    def note(checkpoint: Checkpoint, **neuron_config: Any) -> str:
        (text,) = note_activations(checkpoint, resolve(**neuron_config).config.neuron_config)
        return text

    assert "activations are quantized, as its quantization_config says" in note(followed, **said)
    whole = said | {"activation_quantization_type": "none"}
    assert "activations are not quantized, although" in note(followed, **whole)
    assert (
        resolve_config(
            {"neuron_config": {"activation_quantization_type": "none"}}, checkpoint_dtype=None, quantization=said
        ).config.neuron_config
        == resolve_config({"neuron_config": whole}, checkpoint_dtype=None).config.neuron_config
    )
    static = compress(
        activations=QuantizationArgs(num_bits=8, type="int", strategy="tensor", dynamic=False),
        num_bits=8,
        type="int",
        strategy="channel",
    )
    left = write_quantized(tmp_path / "static", static).checkpoint
    said = read_quantization(left, "cpu")
    assert "activation_quantization_type" not in said
    assert "activations are not quantized, although" in note(left, **said)
    plain = write_tiny_model(tmp_path / "plain", GQA).checkpoint
    assert "ignored because quantized is false" in note(plain, activation_quantization_type="dynamic")


def test_what_is_not_there_is_refused_by_name() -> None:
    refused = unserved_in(quantized=True, activation_quantization_type="static")
    assert (
        refused["activation_quantization_type"].accepted
        == "'none' or 'dynamic' or 'dynamic_whole', all that this version serves"
    )
    document = {"neuron_config": {"quantized": True, "activation_quantization_type": "dynamic"}}
    with pytest.raises(FeatureNotServed, match="activation_quantization_type: got 'dynamic'; accepted: 'none'"):
        resolve_config(document, checkpoint_dtype=None, target="trn2", compiles=True)


def test_layers_that_share_an_input_quantize_it_once(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path, GQA)
    quantization = Quantization(format="int8_per_channel", activations="int8", skipped=("lm_head",))
    description = ModelChanges(quantization=quantization).apply(tiny.checkpoint.description)
    spec = tiny.spec(description=description)
    traced = export_submodel(spec, tiny.plan(description=description), describe_submodel(spec, "token_generation", 32))
    counts = Counter(str(node.target) for node in traced.program.graph.nodes)
    assert (counts["kiln.quantized_linear.default"], counts["aten.round.default"]) == (7 * 2, 4 * 2)
