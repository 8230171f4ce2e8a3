"""Which geometry is compiled how, and which run of the tests does it.

`make test-full` runs a covering array: every pair of values of family, ranks, level, padding side, sampling,
projections, layout of the KV cache and way of computing prompts stands in one of its rows, if the compiler takes it;
and every geometry at every degree and level. `make test` runs the first rows of the array, which have every value of
each property and the pairs that one piece of code brings together; and rows for what other families add to the graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import pytest

from tests.checkpoints.families import FAMILIES
from tests.covering import cover
from tests.parity.geometries import ARCHITECTURES, GEOMETRIES

DEGREES: Final = (1, 2, 4)
LEVELS: Final = (0, 1, 2)

#: Positions of a sequence.
SEQ_LEN: Final = 128
#: Sequences at once. The blocks are as many as two of full length need, too few for four.
NUM_SLOTS: Final = 4
NUM_BLOCKS: Final = 64
BLOCK_TOKENS: Final = 4

#: Longest prompts, by the way they are computed. Those in parts are longer than every window and every bucket.
MAX_PROMPT_TOKENS: Final = {"whole": 32, "chunked": 90, "cached": 90}


@dataclass(frozen=True)
class Case:
    """One bundle.

    Attributes:
        num_buckets: Buckets of each submodel, 1 or 2.
        padding_side: Of prompts that are shorter than their bucket.
        sampling: Whether executables pick tokens, or the executor does from their logits.
        is_fused: Whether one projection makes queries, keys and values.
        has_logits: Whether its executables return logits. Without, ranks never gather them: each picks among its own
            part of the vocabulary, and the picks are compared.
        layout: Of the KV cache.
        prompts: How prompts are computed: each in one step, in chunks, or behind a beginning that the cache holds.
    """

    geometry: str
    tp_degree: int
    level: int
    num_buckets: int = 2
    padding_side: Literal["right", "left"] = "right"
    sampling: Literal["device", "host"] = "device"
    is_fused: bool = False
    has_logits: bool = True
    layout: Literal["slots", "blocks"] = "slots"
    prompts: Literal["whole", "chunked", "cached"] = "whole"

    @property
    def name(self) -> str:
        """Name of the case, of its bundle and of its deployment; it says what is not as in most cases."""
        options = {
            "left": self.padding_side == "left",
            "host": self.sampling == "host",
            "fused": self.is_fused,
            "tokens": not self.has_logits,
            "blocks": self.layout == "blocks",
            self.prompts: self.prompts != "whole",
        }
        unusual = [name for name, is_set in options.items() if is_set]
        return "-".join([self.geometry, f"tp{self.tp_degree}", f"o{self.level}", *unusual])

    @property
    def num_libraries(self) -> int:
        """Libraries of the bundle: executables that differ in what they read of the cache share one."""
        return 2 * self.num_buckets

    @property
    def context_buckets(self) -> tuple[int, ...]:
        """Buckets of context_encoding, in tokens."""
        return (16, 32)[-self.num_buckets :]

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Buckets of token_generation, in tokens."""
        return (32, SEQ_LEN)[-self.num_buckets :]

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return MAX_PROMPT_TOKENS[self.prompts]

    @property
    def edges(self) -> tuple[int, ...]:
        """Prompt lengths at and around every bucket's edge."""
        longest = self.max_prompt_tokens
        lengths = {1, longest} | {bucket + offset for bucket in self.context_buckets for offset in (-1, 0, 1)}
        return tuple(sorted(length for length in lengths if 1 <= length <= longest))

    @property
    def num_streams(self) -> int:
        """Streams at once."""
        return 8 if (self.layout, self.prompts) == ("slots", "whole") else 24

    @property
    def config(self) -> dict[str, Any]:
        """The InferenceConfig."""
        on_device = {"on_device_sampling_config": {"global_topk": 32, "dynamic": True}}
        blocks = {"is_block_kv_layout": True, "pa_num_blocks": NUM_BLOCKS, "pa_block_size": BLOCK_TOKENS}
        prefixes = {"is_prefix_caching": True, "prefix_buckets": [16, 64]}
        return {
            "neuron_config": {
                "tp_degree": self.tp_degree,
                "seq_len": SEQ_LEN,
                "max_context_length": self.max_prompt_tokens,
                "max_new_tokens": SEQ_LEN - 1,
                "batch_size": NUM_SLOTS,
                "torch_dtype": "float32",
                "enable_bucketing": True,
                "context_encoding_buckets": list(self.context_buckets),
                "token_generation_buckets": list(self.token_buckets),
                "is_continuous_batching": True,
                "ctx_batch_size": 1,
                "output_logits": self.has_logits,
                "padding_side": self.padding_side,
                "fused_qkv": self.is_fused,
            }
            | (on_device if self.sampling == "device" else {})
            | (blocks if self.layout == "blocks" else {})
            | (prefixes if self.prompts == "cached" else {})
        }


#: Values that the compiler refuses beside each other: what is padded on the left begins at position 0 and in a slot.
REFUSED: Final = (
    ({"padding_side": "left"}, {"layout": "blocks"}),
    ({"padding_side": "left"}, {"prompts": "chunked"}),
    ({"padding_side": "left"}, {"prompts": "cached"}),
    ({"layout": "slots"}, {"prompts": "cached"}),
)

#: The rows of `make test`; at level 1 one bucket of each submodel is enough, since compiling is what costs.
SHORT_RUN: Final = (
    Case("gqa4-tied-llama3", 1, 1, 1, "right", "device", is_fused=True, layout="blocks", prompts="cached"),
    Case("mistral-window", 1, 0, 2, "right", "device", layout="blocks", prompts="chunked"),
    Case("qwen2-some-layers-slide", 4, 0, 2, "left", "host"),
    Case("qwen2-some-layers-slide", 1, 1, 1, "right", "host", is_fused=True, prompts="chunked"),
    Case("qwen3-head-dim-tied", 2, 0, 2, "left", "device"),
    Case("phi3-longrope", 2, 0, 2, "right", "host", is_fused=True, layout="blocks"),
)

#: More rows of `make test`: graphs with what those families do not have.
BESIDE_SHORT_RUN: Final[tuple[Case, ...]] = (
    Case("gemma2-capped", 1, 0, 1, prompts="chunked"),
    Case("bloom-slopes", 2, 0, 1, prompts="chunked"),
)

#: What cases differ in. A family stands for its geometries.
FACTORS: Final[dict[str, list[Any]]] = {
    "family": list(FAMILIES),
    "tp_degree": list(DEGREES),
    "level": [0, 1],
    "padding_side": ["right", "left"],
    "sampling": ["device", "host"],
    "is_fused": [False, True],
    "layout": ["slots", "blocks"],
    "prompts": ["whole", "chunked", "cached"],
}


def list_factors(case: Case) -> dict[str, Any]:
    """A case's values."""
    return {name: ARCHITECTURES[case.geometry] if name == "family" else getattr(case, name) for name in FACTORS}


def _list_long_run() -> Iterator[Case]:
    given = [list_factors(case) for case in (*SHORT_RUN, *BESIDE_SHORT_RUN)]
    for row in cover(FACTORS, refused=[one | other for one, other in REFUSED], given=given):
        *_, geometry = FAMILIES[row.pop("family")].parity
        # At level 1 compiling is what costs.
        yield Case(geometry, **row, num_buckets=1 if row["level"] else 2)


#: The other rows of the covering array.
LONG_RUN: Final = tuple(_list_long_run())


def matrix_cases() -> Iterator[Case]:
    """Every geometry at every degree and level, cheapest first."""
    for level in LEVELS:
        for geometry in GEOMETRIES:
            for degree in DEGREES:
                yield Case(geometry, degree, level)


def all_cases() -> tuple[Case, ...]:
    """The covering array and the matrix; a row that is in both has the buckets of the matrix."""
    cases = (*SHORT_RUN, *BESIDE_SHORT_RUN, *LONG_RUN, *matrix_cases())
    return tuple({case.name: case for case in cases}.values())


def parameters() -> list[Any]:
    """All cases as pytest parameters; what `make test` leaves out is marked slow."""
    return [pytest.param(case, id=case.name, marks=_marks(case)) for case in all_cases()]


def picking_parameters() -> list[Any]:
    """Bundles whose ranks pick tokens without gathering logits, each beside one of a single rank, as parameters."""
    chosen = (("padded-groups-bias", 2, 0), ("gqa4-tied-llama3", 4, 0), ("gqa4-tied-llama3", 2, 1))
    cases = [
        (Case(geometry, degree, level, 1, has_logits=False), Case(geometry, 1, level, 1, has_logits=False))
        for geometry, degree, level in chosen
    ]
    return [pytest.param(case, single, id=case.name, marks=_picking_marks(case)) for case, single in cases]


def _picking_marks(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow, *([pytest.mark.toolchain] if case.level else [])]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    # The first of a level waits for headers and common objects, too, and compiles run beside each other.
    marks = [pytest.mark.toolchain, pytest.mark.timeout(900)] if case.level else []
    return marks if case in (*SHORT_RUN, *BESIDE_SHORT_RUN) else [*marks, pytest.mark.slow]
