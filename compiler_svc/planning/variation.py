"""Whether neighbours of a configuration fit: one size or degree differs, all else is as configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiler_svc.config import InferenceConfig, NeuronConfig
from compiler_svc.config.findings import Findings
from compiler_svc.config.transformers_neuronx import expand_options
from compiler_svc.errors import CompilerError
from compiler_svc.planning.largest import Verdict, find_largest
from compiler_svc.planning.report import LargestSizes
from compiler_svc.sharding.errors import ShardingNotServed
from targets.target import Target

#: Whether the ranks of a configuration fit.
Fits = Callable[[InferenceConfig], bool]
#: Resolves a document.
Resolve = Callable[[Mapping[str, Any]], InferenceConfig]


class Variations:
    """Checks variations of one configuration. A size that breaks a rule counts as illegal."""

    def __init__(self, document: Mapping[str, Any], *, resolve: Resolve, fits: Fits) -> None:
        """Takes a valid document. Attributes that it leaves out get their defaults from the varied sizes."""
        # Moves sections that stand for attributes of neuron_config into it.
        self._document, _ = expand_options(document, Findings())
        self._given: Mapping[str, Any] = self._document.get("neuron_config") or {}
        self._resolve = resolve
        self._fits = fits

    def find_largest(self, config: NeuronConfig, *, trained_positions: int) -> LargestSizes:
        """Finds the largest sizes that fit, but no sequence longer than `trained_positions`, in tokens, the longest
        that the model was trained for, unless the configuration has it. Attributes that give the rows of the cache
        change together; so do attributes that give its positions.
        """
        rows = self._given_of("max_batch_size", "tkg_batch_size") or ["batch_size"]
        lengths = self._make_check("seq_len", *self._given_of("max_length", "n_positions"))
        max_length = max(trained_positions, config.seq_len)
        return LargestSizes(
            batch_size=find_largest(self._make_check(*rows), config.max_batch_size),
            seq_len=find_largest(
                lambda length: lengths(length) if length <= max_length else Verdict.EXCEEDS,
                config.seq_len,
                # Sequence parallelism divides prompts evenly among ranks.
                step=config.tp_degree if config.sequence_parallel_enabled else 1,
            ),
            pa_num_blocks=(
                find_largest(self._make_check("pa_num_blocks"), config.pa_num_blocks)
                if config.is_block_kv_layout
                else 0
            ),
        )

    def count_cores(self, target: Target) -> int:
        """Finds the target's smallest tensor-parallel degree at which ranks fit; 0 if none does."""
        check = self._make_check("tp_degree")
        return next((degree for degree in target.tp_degrees if check(degree) is Verdict.FITS), 0)

    def _given_of(self, *names: str) -> list[str]:
        return [name for name in names if self._given.get(name) is not None]

    def _make_check(self, *names: str) -> Callable[[int], Verdict]:
        def check(value: int) -> Verdict:
            try:
                varied = self._document | {"neuron_config": {**self._given, **dict.fromkeys(names, value)}}
                config = self._resolve(varied)
                return Verdict.FITS if self._fits(config) else Verdict.EXCEEDS
            except (CompilerError, ShardingNotServed):
                return Verdict.ILLEGAL

        return check
