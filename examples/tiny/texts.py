"""What the models are trained on: the words, the facts and the plots of `texts.yaml`, whose keys are the attributes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

Beat = tuple[str, ...]
Plot = tuple[Beat, ...]


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _freeze(one) for key, one in value.items()}
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

words, facts, plots, pirate_plots = (
    SimpleNamespace(**_freeze(_TEXTS[part])) for part in ("words", "facts", "plots", "pirate_plots")
)
