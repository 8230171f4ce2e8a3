"""Every kind of rotary embedding that transformers knows, in every family that has one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compiler_svc.models.errors import ModelError
from compiler_svc.models.registry import describe_model, list_families
from compiler_svc.models.rope_config import FIXED_ROPE_KINDS, ROPE_KINDS
from tests.checkpoints.families import FAMILIES as SHOWN
from tests.checkpoints.ropes import ROPES
from tests.contract.families.numbers import check_numbers

#: A new kind of transformers is a case here, whether it is served or not.
KINDS = ("default", *ROPE_INIT_FUNCTIONS)
FAMILIES = sorted(name for name, family in list_families().items() if "rope_parameters" in family.attributes)
#: Heads of eight dimensions, and as many positions as the kinds are trained for that say it.
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 24,
}


def make_attributes(architecture: str, kind: str) -> dict[str, Any]:
    rope = dict(ROPES[kind])
    if architecture == "GPTNeoXForCausalLM" and kind != "proportional":
        rope["partial_rotary_factor"] = 1.0
    own = {"original_max_position_embeddings": 24} if architecture == "Phi3ForCausalLM" else {}
    return SIZES | own | {"rope_parameters": rope}


def pair_with_kinds() -> list[Any]:
    """Families and kinds. `make test` takes all kinds of families that show all or take few, one of each other."""
    pairs = []
    for number, architecture in enumerate(one for one in FAMILIES if one != "Gemma3ForCausalLM"):
        shown = SHOWN[architecture]
        taken = KINDS if shown.shows is None or shown.rope_kinds else (KINDS[number % len(KINDS)],)
        pairs += [pytest.param(architecture, kind, marks=[] if kind in taken else [pytest.mark.slow]) for kind in KINDS]
    return pairs


def make_gemma3_attributes(full: str, sliding: str) -> dict[str, Any]:
    return make_attributes("Gemma3ForCausalLM", "default") | {
        "num_hidden_layers": 2,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": dict(ROPES[full]), "sliding_attention": dict(ROPES[sliding])},
    }


def find_violations(architecture: str, attributes: dict[str, Any]) -> list[str]:
    with pytest.raises(ModelError) as caught:
        describe_model({"architectures": [architecture]} | attributes)
    return [str(one) for one in caught.value.violations]


def test_every_kind_of_transformers_has_numbers() -> None:
    assert {rope["rope_type"] for rope in ROPES.values()} == {*KINDS} == {*ROPE_KINDS}


@pytest.mark.parametrize(("architecture", "kind"), pair_with_kinds())
def test_within_and_beyond_the_original_length(architecture: str, kind: str) -> None:
    """Generation crosses the original length of 24 tokens, and then a prompt has more, in chunks."""
    attributes = make_attributes(architecture, kind)
    try:
        getattr(transformers, architecture).config_class(**make_attributes(architecture, kind))
    except (StrictDataclassError, KeyError):
        # What transformers refuses has no numbers.
        assert all(one.startswith("rope_parameters.") for one in find_violations(architecture, attributes))
        return
    for num_prompt_tokens in (21, 33):
        check_numbers(architecture, attributes, num_prompt_tokens=num_prompt_tokens, num_tokens=num_prompt_tokens + 6)


@pytest.mark.parametrize("sliding", ["default", *(kind for kind in KINDS if kind in FIXED_ROPE_KINDS[1:])])
def test_layers_with_a_window_have_a_kind_of_their_own(sliding: str) -> None:
    check_numbers("Gemma3ForCausalLM", make_gemma3_attributes("linear", sliding), num_prompt_tokens=33, num_tokens=39)


@pytest.mark.parametrize("full", KINDS)
def test_layers_without_a_window_have_any_kind(full: str) -> None:
    for num_prompt_tokens in (21, 33):
        check_numbers(
            "Gemma3ForCausalLM",
            make_gemma3_attributes(full, "default"),
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_prompt_tokens + 6,
        )


@pytest.mark.parametrize("sliding", [kind for kind in KINDS if kind not in FIXED_ROPE_KINDS])
def test_layers_with_a_window_do_not_depend_on_the_length(sliding: str) -> None:
    (violation,) = find_violations("Gemma3ForCausalLM", make_gemma3_attributes("default", sliding))
    assert violation.startswith(f"rope_parameters.sliding_attention.rope_type: got '{sliding}'; ")
    assert violation.endswith("accepted: default, linear, llama3, proportional, yarn")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        (architecture, kind)
        for architecture in FAMILIES
        for kind in (("default", "longrope") if architecture == "Phi3ForCausalLM" else KINDS)
        if architecture != "Gemma3ForCausalLM"
    ],
)
def test_both_forms_of_the_file_mean_the_same(architecture: str, kind: str) -> None:
    """transformers 5 writes `rope_parameters`; before, `rope_scaling` stood beside `rope_theta`, with `type`."""
    today = make_attributes(architecture, kind) | {"architectures": [architecture]}
    scaling = {**today["rope_parameters"], "type": kind}
    del scaling["rope_type"]
    theta = "rotary_emb_base" if architecture == "GPTNeoXForCausalLM" else "rope_theta"
    before = today | {theta: scaling.pop("rope_theta"), "rope_scaling": scaling}
    del before["rope_parameters"]
    assert describe_model(before) == describe_model(today)
    config_class = getattr(transformers, architecture).config_class
    theirs, ours = (config_class(**copy.deepcopy(one)).rope_parameters for one in (before, today))
    assert {name: value for name, value in theirs.items() if name != "type"} == ours
