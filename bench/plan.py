"""What a run measures: rows of workloads, each a model in one dtype, with its batches, prompts and rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Bytes of an item, by dtype.
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model in one dtype, and what is measured of it.

    Attributes:
        name: For the command line.
        model: Changes to the configuration of the random Llama.
        dtype: Of weights, activations, keys and values, of all engines.
        batches: Streams that are decoded at once, each with a bundle of its own.
        prompts: Tokens of the prompts whose prefill is measured.
        context: Tokens before those whose decoding is measured.
        length: Positions of the KV cache of each stream.
        rounds: How often everything is measured, in turns.
        steps: Decode steps of one stream in one measurement; fewer with more streams.
        num_threads: Threads of everything that is compared.
    """

    name: str
    model: Mapping[str, int]
    dtype: str
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int
    length: int
    rounds: int
    steps: int
    num_threads: int = 2

    @property
    def bundles(self) -> dict[str, dict[str, Any]]:
        """The InferenceConfig of each bundle, by its name."""
        decode = {decode_bundle(batch): self._configure(batch, self.length, (self.context,)) for batch in self.batches}
        return decode | {PREFILL: self._configure(1, self.prompts[-1], self.prompts)}

    def count_steps(self, batch: int) -> int:
        """Decode steps of one measurement of so many streams."""
        return max(8, self.steps // batch)

    def count_tokens(self, batch: int) -> int:
        """Tokens of each of so many streams that are served at once."""
        return min(2 * self.steps, max(24, 40 * self.steps // batch))

    def count_prefills(self, tokens: int) -> int:
        """Prompts of one measurement: fewer if they are long."""
        return max(1, 5 * self.prompts[0] // tokens)

    def decode_position(self, batch: int) -> int:
        """The position in the middle of those that a measurement decodes."""
        return self.context + self.count_steps(batch) // 2

    def _configure(self, batch: int, length: int, prompts: tuple[int, ...]) -> dict[str, Any]:
        return {
            "neuron_config": {
                "seq_len": length,
                "max_context_length": prompts[-1],
                "batch_size": batch,
                "ctx_batch_size": 1,
                "torch_dtype": self.dtype,
                "enable_bucketing": True,
                "context_encoding_buckets": list(prompts),
                "token_generation_buckets": [length],
                "is_continuous_batching": True,
                "on_device_sampling_config": {"dynamic": True},
            }
        }


#: Name of the bundle whose prefill is measured.
PREFILL: Final = "prefill"


def decode_bundle(batch: int) -> str:
    """Name of the bundle that decodes so many streams at once."""
    return f"batch{batch}"


#: The shape of the published models of 160 M parameters.
_SMALL: Final = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
#: 1.1 B parameters with grouped queries.
_LARGE: Final = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_TINY: Final = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _small(dtype: str) -> Workload:
    return Workload(
        name=f"160m-{dtype}",
        model=_SMALL,
        dtype=dtype,
        batches=(1, 4, 16, 64),
        prompts=(128, 512, 2048),
        context=32,
        length=128,
        rounds=5,
        steps=40,
    )


#: A run takes about half an hour with both.
DEFAULT: Final = (_small("float32"), _small("bfloat16"))
#: In float32, the weights of all engines together would not fit into 24 GiB beside their caches.
LARGE: Final = Workload(
    name="1b-bfloat16",
    model=_LARGE,
    dtype="bfloat16",
    batches=(1, 4, 16),
    prompts=(128, 512, 2048),
    context=32,
    length=128,
    rounds=3,
    steps=24,
)
QUICK: Final = tuple(
    Workload(
        name=f"tiny-{dtype}",
        model=_TINY,
        dtype=dtype,
        batches=(1, 4),
        prompts=(32, 64),
        context=16,
        length=64,
        rounds=2,
        steps=16,
    )
    for dtype in ITEM_BYTES
)
#: By name, all that the command line can ask for.
WORKLOADS: Final = {workload.name: workload for workload in (*DEFAULT, LARGE, *QUICK)}
