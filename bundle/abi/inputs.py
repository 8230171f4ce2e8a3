"""The inputs of executables, in calling order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import AbiTensor, Symbol, Symbols

#: Flag of executables whose rows have their valid tokens last.
LEFT_PADDED: Final = "left_padded"


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
        """Returns the values of a step in which all rows are idle, row-major: ints for int32.

        Args:
            shape: Shape of the input.
            symbols: Values of at least the symbols in `idle`.
        """
        values = [value if not isinstance(value, str) else symbols[value] for value in self.idle]
        return values * (prod(shape) // len(values))

    def accepted_values(self, symbols: Symbols) -> range | None:
        """Returns the integers that it may hold; None if it may hold any value."""
        if self.accepted is None:
            return None
        smallest, largest = self.accepted
        return range(smallest, (largest if isinstance(largest, int) else symbols[largest]) + 1)


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
    # KV slot that the row writes. In submodels that read the cache, row r reads slot r: this is r or the scratch slot.
    Input(
        name="seq_ids",
        dtype="int32",
        dims=("R",),
        idle=("scratch_slot",),
        accepted=(0, "scratch_slot"),
    ),
    Input(
        name="num_tokens",
        dtype="int32",
        dims=("R",),
        idle=(1,),
        accepted=(1, "T"),
        submodels=tuple(name for name, submodel in SUBMODELS.items() if submodel.tokens != 1),
    ),
    # top_k, top_p, temperature; top_k 1 is greedy for any values of the others.
    Input(
        name="sampling_params",
        dtype="float32",
        dims=("R", 3),
        idle=(1.0, 1.0, 1.0),
        flag="sampling_params",
        is_for_sampling=True,
    ),
    # Uniform in [0, 1).
    Input(
        name="rand",
        dtype="float32",
        dims=("R", 1),
        idle=(0.5,),
        flag="rand",
        is_for_sampling=True,
    ),
)

#: Every input, by name.
INPUTS: Final[Mapping[str, Input]] = {row.name: row for row in _ROWS}


def inputs_of(submodel: SubmodelName, flags: Collection[str]) -> tuple[Input, ...]:
    """Lists the inputs of a submodel's executables, in calling order.

    Args:
        flags: Flags of the executable.
    """
    return tuple(row for row in INPUTS.values() if row.belongs_to(submodel, flags))
