"""The inputs of executables, in calling order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec

from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import AbiTensor, Symbol, Symbols

#: Flag of executables whose rows have their valid tokens last.
LEFT_PADDED: Final = "left_padded"
#: Flag of executables whose KV cache is made of blocks.
BLOCK_KV: Final = "block_kv"
#: Flag of executables whose rows of several tokens continue sequences that the KV cache holds the start of.
COMPUTED_CONTEXT: Final = "computed_context"
#: Flag of executables whose keys depend on how long a prompt is, of which a step may compute a part.
PROMPT_LENGTHS: Final = "prompt_lens"
#: Flag of executables that compute only the first rows of a step.
LIVE_ROWS: Final = "live_rows"
#: Flag of executables that tell the log probability of each token of a prompt.
PROMPT_LOGPROBS: Final = "prompt_logprobs"
#: What a row of `sampling_params` has, by its names in `manifest.Sampling`.
SAMPLING_PARAMS: Final = ("top_k", "top_p", "temperature")
#: A top_k of rows whose tokens ranks pick: what an executable picks for them is not read.
UNPICKED_TOP_K: Final = -1.0
#: Tokens of a word of `token_bitmask`.
WORD_BITS: Final = 32
#: What a row of `cuts` has.
CUTS: Final = ("min_p", "typical_p")
#: Flag of executables whose rows may each have a LoRA adapter.
ADAPTERS: Final = "adapters"
#: Flag of executables that change logits before they pick tokens. Beside each there is one without the flag, which
#: serves steps of which no row asks for it.
PROCESSORS: Final = "processors"


class PromptLengths(msgspec.Struct, frozen=True, kw_only=True):
    """How keys depend on `prompt_lens`: the rotary embedding has other frequencies for long sequences."""

    #: Prompts of more tokens have other keys.
    limit: int
    #: Whether each length beyond has keys of its own.
    each: bool

    def classify(self, num_tokens: int) -> int:
        """Numbers the class of prompts of so many tokens, 0 for all up to the limit: one class has the same keys."""
        if num_tokens <= self.limit:
            return 0
        return num_tokens if self.each else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(AbiTensor):
    """One input of executables.

    Attributes:
        idle: Its values in an idle row, repeated to the row's end.
        accepted: Smallest and largest accepted value; None accepts any. Compiled code ends the process if an index is
            out of range.
        is_for_sampling: Whether it controls how a token is picked from logits. If an executable leaves picking to the
            host, the rank takes this input instead.
    """

    idle: tuple[Symbol | float, ...]
    accepted: tuple[int, Symbol | int] | None = None
    is_for_sampling: bool = False

    def idle_values(self, shape: Sequence[int], symbols: Symbols) -> list[float]:
        """Returns the values if all rows are idle, row-major, ints for int32. Only symbols in `idle` need values."""
        values = [value if not isinstance(value, str) else symbols[value] for value in self.idle]
        return values * (prod(shape) // len(values))

    def accepted_values(self, symbols: Symbols) -> range | None:
        """Returns the integers that it may hold; None if it may hold any value."""
        if self.accepted is None:
            return None
        smallest, largest = self.accepted
        return range(smallest, (largest if isinstance(largest, int) else symbols[largest]) + 1)


_SEVERAL_TOKENS: Final = tuple(name for name, submodel in SUBMODELS.items() if submodel.tokens != 1)
#: Submodels that compute prompts.
PROMPT_SUBMODELS: Final = tuple(name for name, submodel in SUBMODELS.items() if submodel.computes_prompts)

_ROWS: Final = (
    # Padding may have any token and any position.
    Input(
        name="input_ids",
        dtype="int32",
        dims=("R", "T"),
        idle=("pad_id",),
        accepted=(0, "last_token_id"),
    ),
    Input(
        name="position_ids",
        dtype="int32",
        dims=("R", "T"),
        idle=(0,),
        accepted=(0, "last_position"),
    ),
    # KV slot that the row reads and writes.
    Input(
        name="seq_ids",
        dtype="int32",
        dims=("R",),
        idle=("scratch_slot",),
        accepted=(0, "scratch_slot"),
        unless=BLOCK_KV,
    ),
    # Place of the KV cache that each token is written to: its block's number times the tokens of a block, plus its
    # place in the block. Padding, and tokens that the cache holds already, have a place of the scratch block.
    Input(
        name="slot_mapping",
        dtype="int32",
        dims=("R", "T"),
        idle=("scratch_place",),
        accepted=(0, "last_place"),
        flag=BLOCK_KV,
    ),
    # The KV blocks of the row's sequence in the order of positions, those that the step writes included.
    Input(
        name="active_block_table",
        dtype="int32",
        dims=("R", "N"),
        idle=("scratch_block",),
        accepted=(0, "scratch_block"),
        flag=BLOCK_KV,
    ),
    Input(
        name="num_tokens",
        dtype="int32",
        dims=("R",),
        idle=(1,),
        accepted=(1, "T"),
        submodels=_SEVERAL_TOKENS,
    ),
    # Tokens of the row's sequence before the first one of the step; the KV cache holds them.
    Input(
        name="computed_context_lens",
        dtype="int32",
        dims=("R",),
        idle=(0,),
        accepted=(0, "last_position"),
        flag=COMPUTED_CONTEXT,
        submodels=_SEVERAL_TOKENS,
    ),
    # Tokens of the prompt that the row's sequence began with: their keys are those of one step that computes them all,
    # though chunks and cached prefixes part them.
    Input(
        name="prompt_lens",
        dtype="int32",
        dims=("R",),
        idle=(0,),
        flag=PROMPT_LENGTHS,
    ),
    # The token behind each one, whose log probability the step tells. Of a part of a prompt, its own tokens do not say
    # what follows the last one. Where there is none, it may be any.
    Input(
        name="next_ids",
        dtype="int32",
        dims=("R", "T"),
        idle=("pad_id",),
        accepted=(0, "last_token_id"),
        flag=PROMPT_LOGPROBS,
        submodels=PROMPT_SUBMODELS,
    ),
    # How many rows the step computes: its first ones. Outputs of the others are unspecified, but for `IDLE_TOKEN`.
    # Executables may skip, too, what padding costs.
    Input(
        name="live_rows",
        dtype="int32",
        dims=(1,),
        idle=(0,),
        accepted=(0, "R"),
        flag=LIVE_ROWS,
    ),
    # Slot of the LoRA adapter that changes the row; -1: none does. Adapters are written to slots between steps.
    Input(
        name="adapter_ids",
        dtype="int32",
        dims=("R",),
        idle=(-1,),
        accepted=(-1, "last_adapter"),
        flag=ADAPTERS,
    ),
    # A top_k of 1 is greedy for any values of the others; `UNPICKED_TOP_K` leaves the row's token open.
    Input(
        name="sampling_params",
        dtype="float32",
        dims=("R", len(SAMPLING_PARAMS)),
        idle=(1.0, 1.0, 1.0),
        flag="sampling_params",
        is_for_sampling=True,
    ),
    # Of the row's noise, by which its token is drawn: a hash of seed and position, see `execution.noise`.
    Input(
        name="noise_keys",
        dtype="int32",
        dims=("R", 2),
        idle=(0,),
        flag="noise_keys",
        is_for_sampling=True,
    ),
    # Uniform in [0, 1): draws the tokens of bundles of earlier releases, which have no noise.
    Input(
        name="rand",
        dtype="float32",
        dims=("R", 1),
        idle=(0.5,),
        flag="rand",
        is_for_sampling=True,
    ),
    # The tokens that a row may pick: bit i of word w is token 32 w + i's. Bits behind the vocabulary mean nothing.
    Input(
        name="token_bitmask",
        dtype="int32",
        dims=("R", "W"),
        idle=(-1,),
        flag=PROCESSORS,
        is_for_sampling=True,
    ),
    # Tokens whose logits change, each once; -1: none.
    Input(
        name="pair_ids",
        dtype="int32",
        dims=("R", "B"),
        idle=(-1,),
        accepted=(-1, "last_token_id"),
        flag=PROCESSORS,
        is_for_sampling=True,
    ),
    # Added first.
    Input(
        name="pair_bias",
        dtype="float32",
        dims=("R", "B"),
        idle=(0.0,),
        flag=PROCESSORS,
        is_for_sampling=True,
    ),
    # Then multiplies what is negative, and divides the rest.
    Input(
        name="pair_factor",
        dtype="float32",
        dims=("R", "B"),
        idle=(1.0,),
        flag=PROCESSORS,
        is_for_sampling=True,
    ),
    # Added last.
    Input(
        name="pair_penalty",
        dtype="float32",
        dims=("R", "B"),
        idle=(0.0,),
        flag=PROCESSORS,
        is_for_sampling=True,
    ),
    # What leaves out tokens behind top_k and top_p, in executables with the flag `processors` that are not greedy.
    Input(
        name="cuts",
        dtype="float32",
        dims=("R", len(CUTS)),
        idle=(0.0, 1.0),
        flag="cuts",
        is_for_sampling=True,
    ),
)

#: Every input, by name.
INPUTS: Final[Mapping[str, Input]] = {row.name: row for row in _ROWS}


def read_sampling_params(source: object) -> tuple[float, ...]:
    """A row of `sampling_params` of an object that has such values."""
    return tuple(float(getattr(source, name)) for name in SAMPLING_PARAMS)


def read_cuts(source: object) -> tuple[float, ...]:
    """A row of `cuts` of an object that has such values."""
    return tuple(float(getattr(source, name)) for name in CUTS)


def inputs_of(submodel: SubmodelName, flags: Collection[str]) -> tuple[Input, ...]:
    """Lists the inputs of a submodel's executables, in calling order."""
    return tuple(row for row in INPUTS.values() if row.belongs_to(submodel, flags))
