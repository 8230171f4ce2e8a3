"""What fits besides the configuration as it is: other sizes, other degrees, each with all else as configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiler_svc.config import InferenceConfig, NeuronConfig
from compiler_svc.config.findings import Findings
from compiler_svc.config.options import expand_options
from compiler_svc.errors import CompilerError
from compiler_svc.planning.largest import Judgement, find_largest
from compiler_svc.planning.report import LargestSizes
from compiler_svc.sharding.errors import ShardingNotServed
from targets.target import Target

#: Whether the ranks of a configuration fit.
Fits = Callable[[InferenceConfig], bool]
#: Resolves a document.
Resolve = Callable[[Mapping[str, Any]], InferenceConfig]


class Variations:
    """Judges a configuration's neighbours. A size that the rules refuse is none."""

    def __init__(self, document: Mapping[str, Any], *, resolve: Resolve, fits: Fits) -> None:
        """Takes a document that is in order. Attributes that it does not give follow what is changed."""
        # Sections that stand for attributes of neuron_config are in it from here on.
        self._document, _ = expand_options(document, Findings())
        self._given: Mapping[str, Any] = self._document.get("neuron_config") or {}
        self._resolve = resolve
        self._fits = fits

    def find_largest(self, config: NeuronConfig) -> LargestSizes:
        """The largest sizes that fit.

        What is given of the rows of the cache, or of its positions, changes together.

        Args:
            config: The configuration as it is.
        """
        rows = self._given_of("max_batch_size", "tkg_batch_size") or ["batch_size"]
        lengths = ["seq_len", *self._given_of("max_length", "n_positions")]
        return LargestSizes(
            batch_size=find_largest(self._judge(*rows), config.max_batch_size),
            seq_len=find_largest(
                self._judge(*lengths),
                config.seq_len,
                # Sequence parallelism divides prompts evenly.
                step=config.tp_degree if config.sequence_parallel_enabled else 1,
            ),
            pa_num_blocks=(
                find_largest(self._judge("pa_num_blocks"), config.pa_num_blocks) if config.is_block_kv_layout else 0
            ),
        )

    def count_cores(self, target: Target) -> int:
        """The smallest degree of the target's whose ranks fit; 0 where none does."""
        judge = self._judge("tp_degree")
        return next((degree for degree in target.tp_degrees if judge(degree) is Judgement.FITS), 0)

    def _given_of(self, *names: str) -> list[str]:
        return [name for name in names if self._given.get(name) is not None]

    def _judge(self, *names: str) -> Callable[[int], Judgement]:
        def judge(value: int) -> Judgement:
            try:
                varied = self._document | {"neuron_config": {**self._given, **dict.fromkeys(names, value)}}
                config = self._resolve(varied)
                return Judgement.FITS if self._fits(config) else Judgement.EXCEEDS
            except (CompilerError, ShardingNotServed):
                return Judgement.ILLEGAL

        return judge
