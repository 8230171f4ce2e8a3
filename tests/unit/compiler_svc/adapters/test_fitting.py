"""Adapters of a model: what ranks hold of them, what their digest covers, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler_svc.adapters.errors import AdapterInvalid
from compiler_svc.models.description import ModelDescription
from tests.checkpoints.adapters import (
    State,
    WrittenAdapter,
    check_merged,
    fit,
    load_ranks,
    make_adapter,
    merge,
    with_room,
)
from tests.checkpoints.families import grouped, odd
from tests.checkpoints.tiny_models import TinyModel, write_tiny_model

PREFIX = "base_model.model."
LAYER = "model.layers.1"
Q_PROJ = f"{LAYER}.self_attn.q_proj"


class TestOptions:
    """Whatever options of PEFT an adapter has, base and adapter are the merged model."""

    @pytest.mark.parametrize(
        "options",
        [
            {"target_modules": ["v_proj"]},
            {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
            {"r": 1},
            {"r": 8, "use_rslora": True},
            {"rank_pattern": {"down_proj": 7, f"^{Q_PROJ}": 2}, "alpha_pattern": {r".*\.0\.mlp\..*": 3.5}},
            {"rank_pattern": {"k_proj": 8}, "alpha_pattern": {"k_proj": 1, "gate_proj": 9}, "use_rslora": True},
            {"init_lora_weights": "orthogonal", "r": 2, "lora_dropout": 0.5},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("tp_degree", [1, 2])
    def test_of_llama(self, tiny: TinyModel, tmp_path: Path, options: dict[str, Any], tp_degree: int) -> None:
        model = make_adapter(tiny, tmp_path / "one", **options)
        description = with_room(tiny.checkpoint.description, fuses_qkv=tp_degree == 2)
        fitted = fit(tmp_path / "one", description, tp_degree=tp_degree)
        check_merged(tiny, merge(model, tmp_path / "merged"), fitted, description)

    @pytest.mark.parametrize("tp_degree", [1, 2, 4])
    @pytest.mark.parametrize(
        ("architecture", "attributes"),
        [
            ("LlamaForCausalLM", odd()),
            ("Qwen2ForCausalLM", odd(tied=True)),
            ("Phi3ForCausalLM", grouped(tied=True)),
            ("GPT2LMHeadModel", {"n_embd": 72, "n_head": 6, "n_layer": 2, "n_inner": 90}),
        ],
    )
    def test_of_other_models(
        self, tmp_path: Path, architecture: str, attributes: dict[str, Any], tp_degree: int
    ) -> None:
        tiny = write_tiny_model(tmp_path / "model", attributes, architecture=architecture)
        model = make_adapter(tiny, tmp_path / "one")
        description = with_room(tiny.checkpoint.description)
        fitted = fit(tmp_path / "one", description, tp_degree=tp_degree)
        check_merged(tiny, merge(model, tmp_path / "merged"), fitted, description)


class TestFiles:
    """A file has the tensors of one slot."""

    def test_shapes_are_those_of_the_slots(self, written: WrittenAdapter, description: ModelDescription) -> None:
        for rank in load_ranks(fit(written.path, description, tp_degree=4)):
            expected = {spec.name: spec.rank_shape(4)[1:] for spec in description.adapter_parameters()}
            assert {name: tuple(one.shape) for name, one in rank.items()} == expected

    def test_what_the_adapter_lacks_is_zero(self, written: WrittenAdapter, description: ModelDescription) -> None:
        (rank,) = load_ranks(fit(written.path, description))
        changed = {name for name, tensor in rank.items() if tensor.any()}
        assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
        assert rank[f"{Q_PROJ}.lora_A"][:4].any()
        assert not rank[f"{Q_PROJ}.lora_A"][4:].any()
        assert not rank[f"{Q_PROJ}.lora_B"][:, 4:].any()

    def test_the_scale_multiplies_before_the_cast(
        self, written: WrittenAdapter, description: ModelDescription, tmp_path: Path
    ) -> None:
        (wide,), (narrow,) = (
            load_ranks(fit(written.path, description, dtype=dtype)) for dtype in ("float32", "bfloat16")
        )
        assert all(torch.equal(wide[name].to(torch.bfloat16), tensor) for name, tensor in narrow.items())


class TestDigests:
    def test_they_cover_values_alone(self, tiny: TinyModel, written: WrittenAdapter) -> None:
        description = tiny.checkpoint.description
        fitted = [
            fit(written.path, with_room(description, rank=rank, fuses_qkv=fuses, targets=targets), tp_degree=degree)
            for rank, fuses, targets, degree in [(4, False, ("q_proj", "down_proj"), 1), (64, True, (), 4)]
        ]
        assert len({one.digest for one in fitted}) == 1

    @pytest.mark.parametrize("module", ["q_proj", "down_proj"])
    @pytest.mark.parametrize("kind", ["lora_A", "lora_B"])
    def test_one_other_item_gives_another(
        self, written: WrittenAdapter, description: ModelDescription, tmp_path: Path, module: str, kind: str
    ) -> None:
        def edit(state: State) -> None:
            name = next(name for name in state if f"{module}.{kind}" in name)
            state[name][-1, -1] += 1e-3

        path = written.copy(tmp_path / "one", edit)
        assert fit(path, description).digest != fit(written.path, description).digest

    def test_another_scale_gives_another(
        self, written: WrittenAdapter, description: ModelDescription, tmp_path: Path
    ) -> None:
        file = written.copy(tmp_path / "one") / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 12}))
        assert fit(file.parent, description).digest != fit(written.path, description).digest


def edit_matrix(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    return lambda state: state.update({f"{PREFIX}{name}": change(state[f"{PREFIX}{name}"])})


def add_module(name: str) -> Callable[[State], None]:
    added = {f"{PREFIX}{name}.lora_A.weight": torch.ones(4, 64), f"{PREFIX}{name}.lora_B.weight": torch.ones(64, 4)}
    return lambda state: state.update(added)


def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.index_put((torch.tensor([0]), torch.tensor([3])), torch.tensor(value))


MISTAKES: dict[str, tuple[Callable[[State], None], str]] = {
    "a module of another model": (
        add_module("model.layers.7.self_attn.q_proj"),
        "model.layers.7.self_attn.q_proj: got no linear layer of the model; accepted: adapters of q_proj, k_proj",
    ),
    "the head": (
        add_module("lm_head"),
        "lm_head: got a layer without room for adapters; accepted: adapters of q_proj, k_proj, v_proj, o_proj, gate_",
    ),
    "a module under two names": (
        add_module("layers.1.self_attn.q_proj"),
        "model.layers.1.self_attn.q_proj: got one more adapter of it; accepted: layers.1.self_attn.q_proj alone",
    ),
    "another base": (
        edit_matrix(f"{Q_PROJ}.lora_B.weight", lambda tensor: tensor[:-1].contiguous()),
        f"{PREFIX}{Q_PROJ}.lora_B.weight: got shape [63, 4]; accepted: shape [64, 4], as the model and the adapter's",
    ),
    "another rank than the configuration's": (
        edit_matrix(f"{Q_PROJ}.lora_A.weight", lambda tensor: tensor[:3].contiguous()),
        f"{PREFIX}{Q_PROJ}.lora_A.weight: got shape [3, 64]; accepted: shape [4, 64]",
    ),
    "integers": (
        edit_matrix(f"{Q_PROJ}.lora_A.weight", lambda tensor: tensor.to(torch.int8)),
        f"{PREFIX}{Q_PROJ}.lora_A.weight: got dtype int8; accepted: one of bfloat16, float16, float32, float64",
    ),
    "NaN": (
        edit_matrix(f"{Q_PROJ}.lora_B.weight", put(float("nan"))),
        f"{PREFIX}{Q_PROJ}.lora_B.weight: got nan at [0, 3]; accepted: finite numbers of float16",
    ),
    "an infinity": (
        edit_matrix(f"{Q_PROJ}.lora_A.weight", put(float("-inf"))),
        f"{PREFIX}{Q_PROJ}.lora_A.weight: got -inf at [0, 3] with the scale 1.5; accepted: finite numbers of float16",
    ),
    "more than float16 holds": (
        edit_matrix(f"{Q_PROJ}.lora_A.weight", put(60_000.0)),
        f"{PREFIX}{Q_PROJ}.lora_A.weight: got 60000 at [0, 3] with the scale 1.5; accepted: finite numbers of float16",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_named(
    written: WrittenAdapter, description: ModelDescription, tmp_path: Path, name: str
) -> None:
    edit, said = MISTAKES[name]
    with pytest.raises(AdapterInvalid) as caught:
        fit(written.copy(tmp_path / "one", edit), description, dtype="float16")
    (violation,) = caught.value.violations
    assert str(violation).startswith(said)


class TestSlots:
    """An adapter needs room in every layer that it changes."""

    def test_a_rank_above_theirs(self, tiny: TinyModel, written: WrittenAdapter) -> None:
        with pytest.raises(AdapterInvalid) as caught:
            fit(written.path, with_room(tiny.checkpoint.description, rank=3))
        assert [str(one) for one in caught.value.violations] == [
            f"model.layers.{{0-1}}.{module}: got rank 4; accepted: at most 3, the rank of the slots"
            for module in ("mlp.down_proj", "self_attn.q_proj")
        ]

    def test_modules_without_any(self, tiny: TinyModel, written: WrittenAdapter) -> None:
        with pytest.raises(AdapterInvalid) as caught:
            fit(written.path, with_room(tiny.checkpoint.description, targets=("q_proj", "v_proj")))
        (violation,) = caught.value.violations
        assert str(violation) == (
            "model.layers.{0-1}.mlp.down_proj: got a layer without room for adapters; "
            "accepted: adapters of q_proj, v_proj"
        )

    def test_a_part_of_a_stored_module_without_any(self, tmp_path: Path) -> None:
        """Rows of keys and values would be lost."""
        tiny = write_tiny_model(tmp_path / "model", grouped(), architecture="Phi3ForCausalLM")
        make_adapter(tiny, tmp_path / "one", target_modules=["qkv_proj"])
        with pytest.raises(AdapterInvalid, match="got a layer without room for adapters; accepted: none: no layer"):
            fit(tmp_path / "one", with_room(tiny.checkpoint.description, targets=("q_proj",)))
