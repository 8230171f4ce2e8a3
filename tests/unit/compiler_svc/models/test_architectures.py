"""Which family a `config.json` names: by `architectures`, and by `model_type` where they do not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from compiler_svc.models.errors import ModelConfigInvalid, ModelNotServed
from compiler_svc.models.registry import (
    describe_model,
    find_family,
    flatten_attributes,
    list_families,
    list_nested_families,
    read_text_config,
)
from compiler_svc.planning.model_overrides import keep_changes
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.random_weights import CONFIG, write_checkpoint

FAMILIES = {**list_families(), **list_nested_families()}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_types_are_those_by_which_transformers_picks_the_model(architecture: str) -> None:
    kind = FAMILIES[architecture].model_type
    # AutoModelForCausalLM has no entry for the models of Mistral with images.
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, architecture) == architecture
    assert AutoConfig.for_model(kind).model_type == kind


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("said", ["absent", "null", "empty", "base"])
def test_the_type_decides_under_the_familys_own_name(architecture: str, said: str) -> None:
    kind = FAMILIES[architecture].model_type
    names: dict[str, Any] = {
        "absent": {},
        "null": {"architectures": None},
        "empty": {"architectures": []},
        "base": {"architectures": [MODEL_MAPPING_NAMES[kind]]},
    }[said]
    config = read_text_config({"model_type": kind, **names})
    assert config["architectures"] == [architecture]
    assert find_family(config) is FAMILIES[architecture]


@pytest.mark.parametrize("architecture", list_families())
def test_case_does_not_matter(architecture: str) -> None:
    kind = FAMILIES[architecture].model_type
    assert find_family({"architectures": [architecture.lower()], "model_type": kind}) is FAMILIES[architecture]


@pytest.mark.parametrize(
    "name", ["LLaMAForCausalLM", "LlaMaForCausalLM", "LlamaModel", "LlamaLMHeadModel", "LlamaPreTrainedModel"]
)
def test_other_names_describe_the_same_model(tmp_path: Path, name: str) -> None:
    plain = Checkpoint.open(write_checkpoint(tmp_path / "plain"))
    other = Checkpoint.open(write_checkpoint(tmp_path / "other", architectures=[name]))
    assert other.description == plain.description
    assert describe_model(CONFIG | {"architectures": [name]}) == plain.description
    assert other.whole_config["architectures"] == [name], "as the file has it"


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("LlamaForCausalLM", "mistral", "LlamaForCausalLM"),
        ("MistralForCausalLM", "llama", "MistralForCausalLM"),
        ("Qwen2Model", "llama", "Qwen2ForCausalLM"),
        ("GPT2LMHeadModel", "gptj", "GPT2LMHeadModel"),
        ("Gemma3ForCausalLM", "gemma2", "Gemma3ForCausalLM"),
    ],
)
def test_names_that_disagree_are_both_named(name: str, kind: str, own: str) -> None:
    with pytest.raises(ModelConfigInvalid) as caught:
        find_family({"architectures": [name], "model_type": kind})
    (violation,) = caught.value.violations
    assert violation.field == "architectures"
    assert name in violation.value
    by_type = next(one for one in FAMILIES.values() if one.model_type == kind)
    assert by_type.architectures[0] in violation.accepted
    assert f"model_type {kind!r}" in violation.accepted
    assert f"model_type {FAMILIES[own].model_type!r}" in violation.accepted


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForSequenceClassification", "llama"),
        ("Qwen2ForTokenClassification", "qwen2"),
        ("Qwen2ForRewardModel", "qwen2"),
        ("OPTForQuestionAnswering", "opt"),
        ("MixtralForCausalLM", "mistral"),
        ("MixtralForCausalLM", "mixtral"),
        ("Phi3SmallForCausalLM", "phi3small"),
        ("Qwen2Model", None),
    ],
)
def test_what_makes_no_text_or_is_another_model_is_not_served(name: str, kind: str | None) -> None:
    with pytest.raises(ModelNotServed) as caught:
        find_family({"architectures": [name], "model_type": kind})
    assert caught.value.violations[0].field == "architectures"


@pytest.mark.parametrize("names", [["LlamaForCausalLM", "LlamaModel"], "LlamaForCausalLM", [3], {"a": 1}])
def test_what_is_no_list_with_one_architecture_is_invalid(names: object) -> None:
    with pytest.raises(ModelConfigInvalid, match="a list with one architecture"):
        find_family({"architectures": names, "model_type": "llama"})


def test_neither_name_is_an_error() -> None:
    with pytest.raises(ModelConfigInvalid, match="architectures: got nothing"):
        find_family({"model_type": "unheard_of"})


@pytest.mark.parametrize("names", [None, ["LlamaModel"], ["LlamaForCausalLM"]])
def test_documents_that_repeat_the_file_change_nothing(tmp_path: Path, names: object) -> None:
    path = write_checkpoint(tmp_path / "tiny", architectures=names)
    checkpoint, repeated = Checkpoint.open(path), json.loads((path / "config.json").read_text())
    assert keep_changes(checkpoint, repeated, {})[0] == {}
    assert flatten_attributes(checkpoint.config, {"architectures": names}) == {"architectures": ["LlamaForCausalLM"]}
