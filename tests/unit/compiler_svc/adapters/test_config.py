"""What configurations of adapters say, and which of their attributes are refused."""

from __future__ import annotations

from typing import Any

import pytest

from compiler_svc.adapters.config import AdapterConfig, read_config
from compiler_svc.adapters.errors import AdapterInvalid

#: Attributes of an adapter that is served, as PEFT writes them.
SERVED = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "bias": "none",
    "init_lora_weights": "gaussian",
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "eva_config": None,
    "lora_dropout": 0.1,
    "fan_in_fan_out": True,
    "target_modules": ["q_proj"],
    "exclude_modules": None,
    "peft_version": "0.18.0",
}
PROJECTION = "model.layers.1.self_attn.q_proj"


def read(**changes: Any) -> AdapterConfig:
    return read_config("adapters/one", SERVED | changes)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 16 / 8**0.5),
        ({"lora_alpha": 1.5, "r": 6}, 0.25),
        ({"rank_pattern": {"q_proj": 4}}, 4.0),
        ({"alpha_pattern": {r"layers\.1\..*": 4}}, 0.5),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 4, "k_proj": 2}}, 2.0),
        ({"alpha_pattern": {"^model.layers.1.self_attn.q_proj": 4, "q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 4}}, 2.0),
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4}, "use_rslora": True}, 2.0),
    ],
)
def test_scales(changes: dict[str, Any], scale: float) -> None:
    assert read(**changes).find_scale(PROJECTION) == scale


def test_ranks() -> None:
    config = read(rank_pattern={"k_proj": 64, r".*\.1\..*": 2})
    assert config.largest_rank == 64
    assert [config.find_rank(f"model.layers.{name}") for name in ("0.q_proj", "1.q_proj", "1.k_proj")] == [8, 2, 64]


def test_nxd_names_the_rank_otherwise() -> None:
    config = read_config("one.pt", {"lora_rank": 4, "lora_alpha": 2, "init_lora_weights": "default", "bias": "none"})
    assert (config.find_rank(PROJECTION), config.find_scale(PROJECTION)) == (4, 0.5)


UNSERVED = {
    "peft_type": ("IA3", "'IA3'; accepted: LORA: other methods"),
    "use_dora": (True, "True; accepted: unset: DoRA scales the model's own matrices"),
    "bias": ("all", "'all'; accepted: none: the model's biases"),
    "lora_bias": (True, "True; accepted: unset: an adapter adds B(A x), without a bias"),
    "modules_to_save": (["lm_head"], "['lm_head']; accepted: unset: the model's own modules"),
    "trainable_token_indices": ([1], "[1]; accepted: unset: embeddings"),
    "target_parameters": (["experts.down_proj"], "['experts.down_proj']; accepted: unset: adapters of experts"),
    "layer_replication": ([[0, 2]], "[[0, 2]]; accepted: unset: the layers"),
    "alora_invocation_tokens": ([1], "[1]; accepted: unset: an adapter acts on every token"),
    "use_qalora": (True, "True; accepted: unset: this variant of LoRA is not served"),
    "init_lora_weights": ("pissa_niter_4", "'pissa_niter_4'; accepted: true, as `save_pretrained` writes it"),
    "r": (0, "0; accepted: an integer from 1 to 65536"),
    "lora_alpha": (float("nan"), "nan; accepted: a number of at most 1048576"),
    "use_rslora": ("yes", "'yes'; accepted: true or false"),
    "rank_pattern": (["q_proj"], "['q_proj']; accepted: an object"),
    "rank_pattern[q_proj]": (True, "True; accepted: an integer"),
    "alpha_pattern[q_proj]": ("8", "'8'; accepted: a number"),
}


@pytest.mark.parametrize("field", UNSERVED)
def test_what_is_not_served_is_named(field: str) -> None:
    value, said = UNSERVED[field]
    name, _, pattern = field.removesuffix("]").partition("[")
    with pytest.raises(AdapterInvalid) as caught:
        read(**{name: {pattern: value} if pattern else value})
    (violation,) = caught.value.violations
    assert violation.field == field
    assert str(violation).startswith(f"{field}: got {said}")


def test_hostile_patterns_take_no_time() -> None:
    """Python's own `re` would take years to say that the first does not match."""
    config = read(rank_pattern={"(a|aa)+b": 4, "(.*)*x": 4})
    assert config.find_rank("a" * 5_000) == 8


@pytest.mark.parametrize("pattern", ["(", "(((a{100}){100}){100}){100}", r"(a)\2", "(?=a)a", "\ud800"])
def test_patterns_of_unbounded_cost_are_refused(pattern: str) -> None:
    with pytest.raises(AdapterInvalid, match="accepted: regular expressions of module names, without backreferences"):
        read(alpha_pattern={pattern: 8})


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(AdapterInvalid) as caught:
        read(use_dora=True, r=None, lora_alpha=10**400, rank_pattern={"(": 8})
    assert [one.field for one in caught.value.violations] == ["use_dora", "r", "lora_alpha", "rank_pattern"]
    assert "adapter adapters/one cannot be served: use_dora: got True" in str(caught.value)
    assert "r: got nothing" in str(caught.value)
