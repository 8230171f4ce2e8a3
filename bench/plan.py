"""What a run measures: the size of the model, the batches, the number of rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run.

    Attributes:
        model: Changes to the configuration of the random Llama.
        batches: Streams that are decoded at once, each with a bundle of its own.
        prompt_tokens: Tokens of the prompt whose prefill is measured.
        max_length: Positions of the KV cache.
        context: Tokens before those whose decoding is measured.
        rounds: How often everything is measured, in turns.
        steps: Decode steps of one measurement.
        num_threads: Threads of everything that is compared.
    """

    model: dict[str, Any]
    batches: tuple[int, ...]
    prompt_tokens: int
    max_length: int
    context: int
    rounds: int
    steps: int
    num_threads: int = 2

    def config(self, batch: int) -> dict[str, Any]:
        """The InferenceConfig of the bundle for one batch size."""
        return {
            "neuron_config": {
                "seq_len": self.max_length,
                "max_context_length": self.prompt_tokens,
                "batch_size": batch,
                "ctx_batch_size": 1,
                "torch_dtype": "float32",
                # As in serving: a step reads the positions of the smallest bucket that holds its sequences.
                "enable_bucketing": True,
                "is_continuous_batching": True,
                "on_device_sampling_config": {"dynamic": True},
            }
        }


#: The shape of the published models of 160 M parameters.
FULL = Plan(
    model={
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    batches=(1, 4, 16),
    prompt_tokens=128,
    max_length=256,
    context=32,
    rounds=5,
    steps=48,
)
QUICK = Plan(
    model={
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    batches=(1, 4),
    prompt_tokens=32,
    max_length=128,
    context=16,
    rounds=2,
    steps=16,
)
