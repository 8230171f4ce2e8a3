"""NeuronConfig: the resolved compile-time options, frozen, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_svc.config.tables.attention import AttentionAttributes
from compiler_svc.config.tables.batching import BatchingAttributes
from compiler_svc.config.tables.general import GeneralAttributes
from compiler_svc.config.tables.lora import LoraAttributes
from compiler_svc.config.tables.quantization import QuantizationAttributes
from compiler_svc.config.tables.sampling import SamplingAttributes
from compiler_svc.config.tables.speculation import SpeculationAttributes


# A dataclass takes the fields of its last base first.
@dataclass(frozen=True, kw_only=True)
class NeuronConfig(
    LoraAttributes,
    SpeculationAttributes,
    QuantizationAttributes,
    SamplingAttributes,
    AttentionAttributes,
    BatchingAttributes,
    GeneralAttributes,
):
    """Compile-time options; lengths in tokens. See `kiln.config.v1.NeuronConfig` for each attribute.

    `context_encoding_buckets`, `token_generation_buckets` and, with prefix caching, `prefix_buckets` are the buckets
    that are compiled, whether listed, generated, or the one of a configuration without bucketing. `max_new_tokens`
    None means no limit of its own. `scratchpad_page_size` is in MiB.
    """

    def find_longest_prompt(self, *, in_chunks: bool) -> int:
        """Returns the tokens of the longest prompt: at most a whole sequence, and one bucket unless `in_chunks`."""
        longest = min(self.max_context_length, self.n_active_tokens, self.longest_sequence)
        return longest if in_chunks else min(longest, self.context_encoding_buckets[-1])

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt and generated, that some bucket takes."""
        return min(self.seq_len, self.n_positions, self.token_generation_buckets[-1])
