"""Files of adapters: every form that is read gives the same adapter, and what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compiler_svc.adapters.errors import AdapterInvalid, AdapterNotFound
from compiler_svc.adapters.files import open_adapter
from compiler_svc.models.description import ModelDescription
from tests.checkpoints.adapters import State, WrittenAdapter, fit, load_ranks, make_adapter
from tests.checkpoints.tiny_models import TinyModel

PREFIX = "base_model.model."
Q_PROJ = "model.layers.1.self_attn.q_proj"
#: As NxD saves it.
NXD_CONFIG = {
    "bias": "none",
    "init_lora_weights": "default",
    "lora_alpha": 6,
    "lora_dropout": 0.0,
    "lora_rank": 4,
    "use_rslora": False,
    "target_modules": {"q_proj", "down_proj"},
    "modules_to_save": None,
    "save_lora_base": False,
    "merge_lora": False,
    "save_lora_config_adapter": True,
}


def write_nxd(path: Path, written: WrittenAdapter, **changes: Any) -> Path:
    """NxD's file of the same adapter, whose names have no prefix."""
    state = load_file(written.path / "adapter_model.safetensors")
    torch.save(
        {name.removeprefix(PREFIX): one for name, one in state.items()} | {"lora_config": NXD_CONFIG} | changes, path
    )
    return path


def rename(state: State, old: str, new: str) -> None:
    for name in [*state]:
        state[name.replace(old, new)] = state.pop(name)


def list_violations(path: Path) -> list[str]:
    with pytest.raises(AdapterInvalid) as caught:
        open_adapter(path)
    return [str(one) for one in caught.value.violations]


class TestForms:
    """Every form has the same digest, and the same bytes for ranks."""

    def check(self, path: Path, written: WrittenAdapter, description: ModelDescription) -> None:
        one, other = (fit(each, description, tp_degree=2) for each in (path, written.path))
        assert one.digest == other.digest
        for ours, theirs in zip(load_ranks(one), load_ranks(other), strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    def test_a_pickle_of_peft(
        self, tiny: TinyModel, written: WrittenAdapter, description: ModelDescription, tmp_path: Path
    ) -> None:
        make_adapter(tiny, tmp_path, target_modules=["q_proj", "down_proj"], is_pickled=True)
        assert not (tmp_path / "adapter_model.safetensors").exists()
        self.check(tmp_path, written, description)

    def test_a_file_of_nxd(self, written: WrittenAdapter, description: ModelDescription, tmp_path: Path) -> None:
        self.check(write_nxd(tmp_path / "one.pt", written), written, description)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (PREFIX, PREFIX * 2),
            ("lora_A.weight", "lora_A.default.weight"),
            (f"{PREFIX}model.", PREFIX),
            (PREFIX, ""),
        ],
        ids=["of a model wrapped twice", "with the adapter's name", "of the model without its head", "without prefix"],
    )
    def test_other_names(
        self, written: WrittenAdapter, description: ModelDescription, tmp_path: Path, old: str, new: str
    ) -> None:
        self.check(written.copy(tmp_path / "one", lambda state: rename(state, old, new)), written, description)


TENSORS = {
    "the head": (
        lambda state: state.update({f"{PREFIX}lm_head.weight": torch.zeros(2)}),
        f"{PREFIX}lm_head.weight: got a tensor of the model itself; accepted: an adapter that was saved without",
    ),
    "embeddings": (
        lambda state: state.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(4, 211)}),
        f"{PREFIX}model.embed_tokens.lora_embedding_A: got an adapter of embeddings; accepted: adapters of linear",
    ),
    "experts": (
        lambda state: state.update({f"{PREFIX}model.layers.0.mlp.experts.0.up_proj.lora_A.weight": torch.zeros(4, 64)}),
        f"{PREFIX}model.layers.0.mlp.experts.0.up_proj.lora_A.weight: got an adapter of experts; accepted: adapters",
    ),
    "DoRA": (
        lambda state: state.update({f"{PREFIX}{Q_PROJ}.lora_magnitude_vector": torch.zeros(64)}),
        f"{PREFIX}{Q_PROJ}.lora_magnitude_vector: got DoRA's magnitudes; accepted: plain LoRA",
    ),
    "a bias": (
        lambda state: state.update({f"{PREFIX}{Q_PROJ}.lora_B.bias": torch.zeros(64)}),
        f"{PREFIX}{Q_PROJ}.lora_B.bias: got a bias of an adapter; accepted: an adapter with lora_bias false",
    ),
    "AdaLoRA": (
        lambda state: state.update({f"{PREFIX}{Q_PROJ}.lora_E": torch.zeros(4)}),
        f"{PREFIX}{Q_PROJ}.lora_E: got no matrix of plain LoRA; accepted: lora_A.weight and lora_B.weight",
    ),
    "one matrix twice": (
        lambda state: state.update({f"{PREFIX}{Q_PROJ}.lora_A.second.weight": torch.zeros(4, 64)}),
        f"{PREFIX}{Q_PROJ}.lora_A.weight: got one more lora_A of {Q_PROJ}; accepted: {PREFIX}{Q_PROJ}.lora_A.second.w",
    ),
    "no B": (
        lambda state: state.pop(f"{PREFIX}{Q_PROJ}.lora_B.weight"),
        f"{Q_PROJ}.lora_B.weight: got missing; accepted: both matrices of it",
    ),
    "nothing": (lambda state: state.clear(), ".: got no tensors; accepted: lora_A and lora_B of at least one"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_no_adapter_may_have_are_named(written: WrittenAdapter, tmp_path: Path, name: str) -> None:
    edit, said = TENSORS[name]
    (violation,) = list_violations(written.copy(tmp_path / "one", edit))
    assert violation.startswith(said)


class TestBrokenFiles:
    def test_a_truncated_file(self, written: WrittenAdapter, tmp_path: Path) -> None:
        file = written.copy(tmp_path / "one") / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-16])
        (violation,) = list_violations(file.parent)
        assert violation.startswith("adapter_model.safetensors: got a broken file (")
        assert violation.endswith("accepted: a whole safetensors file")

    def test_a_truncated_pickle(self, written: WrittenAdapter, tmp_path: Path) -> None:
        file = write_nxd(tmp_path / "one.pt", written)
        file.write_bytes(file.read_bytes()[:-100])
        (violation,) = list_violations(file)
        assert violation.startswith("one.pt: got a broken file (")

    def test_a_pickle_that_holds_more_than_tensors(self, written: WrittenAdapter, tmp_path: Path) -> None:
        file = write_nxd(tmp_path / "one.pt", written, step=3)
        assert list_violations(file)[0].startswith("one.pt: step: got a int")

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            (None, "lora_config: got missing; accepted: NxD's configuration"),
            (7, "lora_config: got a int"),
            ({"lora_rank": 4, "use_dora": torch.zeros(2)}, "lora_config: got a dict"),
            ({"lora_rank": 4, "modules_to_save": {"lm_head"}}, "modules_to_save: got {'lm_head'}; accepted: unset"),
        ],
    )
    def test_a_file_of_nxd_whose_configuration_is_none(
        self, written: WrittenAdapter, tmp_path: Path, config: object, said: str
    ) -> None:
        (violation,) = list_violations(write_nxd(tmp_path / "one.pt", written, lora_config=config))
        assert violation.startswith(said)

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_a_configuration_that_is_no_object(self, written: WrittenAdapter, tmp_path: Path, text: str) -> None:
        path = written.copy(tmp_path / "one")
        (path / "adapter_config.json").write_text(text)
        (violation,) = list_violations(path)
        assert violation.startswith("adapter_config.json: got ")
        assert violation.endswith("accepted: a JSON object")

    def test_a_configuration_that_is_not_served(self, written: WrittenAdapter, tmp_path: Path) -> None:
        file = written.copy(tmp_path / "one") / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
        assert list_violations(file.parent)[0].startswith("use_dora: got True; accepted: unset: DoRA")

    @pytest.mark.parametrize(
        ("missing", "said"),
        [
            ("adapter_config.json", "has no adapter_config.json"),
            ("adapter_model.safetensors", "has no weights"),
            (".", "no such directory or file"),
        ],
    )
    def test_a_missing_file(self, written: WrittenAdapter, tmp_path: Path, missing: str, said: str) -> None:
        path = tmp_path / "one"
        if missing != ".":
            (written.copy(path) / missing).unlink()
        with pytest.raises(AdapterNotFound, match=said) as caught:
            open_adapter(path)
        assert "accepted: a directory of PEFT with adapter_config.json" in str(caught.value)

    def test_a_link_out_of_the_roots(self, written: WrittenAdapter, tmp_path: Path) -> None:
        path = written.copy(tmp_path / "roots" / "one")
        assert open_adapter(path, roots=(tmp_path / "roots",)).changes
        file = (path / "adapter_model.safetensors").rename(tmp_path / "outside.safetensors")
        (path / "adapter_model.safetensors").symlink_to(file)
        with pytest.raises(AdapterInvalid, match="a link out of the model roots"):
            open_adapter(path, roots=(tmp_path / "roots",))
