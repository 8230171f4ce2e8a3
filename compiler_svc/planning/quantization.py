"""Which weights a quantized model keeps in one byte, and what their scales take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from compiler_svc.config import NeuronConfig

#: Every dtype of quantized weights has items of this size.
ITEM_BYTES: Final = 1
_SCALE_BYTES: Final = 4

# As NxD Inference has it: linear layers and the head; neither embeddings nor norms nor biases.
_QUANTIZED: Final = re.compile(r"lm_head\.weight|.*\.[a-z]+_proj\.weight")


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """How weights are quantized.

    Attributes:
        is_per_channel: One scale for each output; otherwise one for each matrix.
        skipped: Parts of the names of modules that stay as they are.
    """

    is_per_channel: bool
    skipped: tuple[str, ...]

    @classmethod
    def of(cls, config: NeuronConfig, skipped: Sequence[str]) -> WeightQuantization | None:
        """What a configuration asks for; None where weights are not quantized."""
        if not config.quantized:
            return None
        return cls(config.quantization_type == "per_channel_symmetric", tuple(skipped))

    def applies_to(self, name: str) -> bool:
        """Whether the tensor of this name is quantized."""
        module = name.removesuffix(".weight")
        return _QUANTIZED.fullmatch(name) is not None and not any(part in module for part in self.skipped)

    def size_bytes(self, rank_shape: tuple[int, ...]) -> int:
        """Bytes of a rank's part of a quantized matrix, scales included.

        Args:
            rank_shape: Outputs and inputs.
        """
        outputs, inputs = rank_shape
        return outputs * inputs * ITEM_BYTES + _SCALE_BYTES * (outputs if self.is_per_channel else 1)
