"""Which layers have a window, for what `config.json` says or leaves out of it, beside transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from compiler_svc.models.decoder_config import Windows
from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.registry import describe_model
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.families import FAMILIES
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, draw_tokens, write_tiny_model
from tests.contract.families.numbers import make_stepper

_ABSENT: Final = object()
_WINDOW: Final = 5
_SLIDING, _FULL = "sliding_attention", "full_attention"
#: What files say, by attribute.
_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "sliding_window": (_ABSENT, None, _WINDOW),
    "use_sliding_window": (False, True),
    "layer_types": (_ABSENT, [_SLIDING, _FULL], [_FULL, _FULL]),
    "max_window_layers": (_ABSENT, 1),
    "sliding_window_pattern": (_ABSENT, 2),
}
#: By family, the attributes that its models or others' of its kind have.
_COMMON: Final = ("sliding_window", "use_sliding_window")
_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "Qwen2ForCausalLM": (*_COMMON, "layer_types", "max_window_layers"),
    "Qwen3ForCausalLM": (*_COMMON, "layer_types", "max_window_layers"),
    "SmolLM3ForCausalLM": (*_COMMON, "layer_types"),
    "Gemma2ForCausalLM": ("sliding_window", "layer_types"),
    "Gemma3ForCausalLM": ("sliding_window", "layer_types", "sliding_window_pattern"),
    "MistralForCausalLM": _COMMON,
    "Phi3ForCausalLM": _COMMON,
    "Starcoder2ForCausalLM": _COMMON,
    "LlamaForCausalLM": _COMMON,
    "GraniteForCausalLM": _COMMON,
}
_WITHOUT_WINDOWS: Final = ("LlamaForCausalLM", "GraniteForCausalLM")


def list_cases(architecture: str) -> Iterator[dict[str, Any]]:
    names = _FAMILIES[architecture]
    for values in product(*(_VALUES[name] for name in names)):
        yield {name: value for name, value in zip(names, values, strict=True) if value is not _ABSENT}


@torch.no_grad()
def ask_transformers(tiny: TinyModel, tokens: list[int]) -> tuple[Windows, torch.Tensor] | None:
    """The window of each layer, and the logits behind a prompt, f32 [vocab_size]; None if transformers fails."""
    try:
        config = type(tiny.model.config).from_pretrained(tiny.checkpoint.path)
        model = type(tiny.model)(config).eval()
        model.load_state_dict(tiny.model.state_dict())
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    except ValueError:
        return None
    kinds = config.layer_types if hasattr(type(config), "layer_types") else [_SLIDING] * config.num_hidden_layers
    window = config.sliding_window if hasattr(type(config), "sliding_window") else None
    return tuple(window if kind == _SLIDING else None for kind in kinds), logits.float()


def describe_windows(config: dict[str, Any]) -> Windows | None:
    """The window of each layer; None if the configuration is refused."""
    try:
        return tuple(state.window for state in describe_model(config).states)
    except ModelConfigInvalid:
        return None


@pytest.mark.parametrize("architecture", _FAMILIES)
def test_windows_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """The prompt is longer than the window. What has equal windows is computed once here."""
    geometry = next(iter(FAMILIES[architecture].geometries.values()))
    attributes = geometry | {"layer_types": None, "num_hidden_layers": 2}
    tiny = write_tiny_model(tmp_path, attributes, architecture=architecture)
    written = {name: value for name, value in tiny.checkpoint.config.items() if name not in _VALUES}
    tokens, computed = draw_tokens(4 * _WINDOW), {}
    for case in list_cases(architecture):
        (tmp_path / "config.json").write_text(json.dumps(written | case))
        expected, windows = ask_transformers(tiny, tokens), describe_windows(written | case)
        if windows is None:
            assert expected is None or _disagrees(architecture, case), case
        elif expected is None:
            assert not any(windows), case
        else:
            assert windows == expected[0], case
            if windows not in computed:
                stepper = make_stepper(TinyModel(tiny.model, Checkpoint.open(tmp_path)))
                computed[windows] = stepper.prefill({1: tokens})["logits"][0]
            assert deviation(computed[windows], expected[1]) < TOLERANCE, case
    assert any(_WINDOW in windows for windows in computed) or architecture in _WITHOUT_WINDOWS


def _disagrees(architecture: str, case: dict[str, Any]) -> bool:
    """Whether transformers' implementations of attention disagree: masks have a window, flash attention has none."""
    return (
        architecture == "SmolLM3ForCausalLM"
        and _SLIDING in case.get("layer_types", ())
        and not case.get("use_sliding_window")
    )
