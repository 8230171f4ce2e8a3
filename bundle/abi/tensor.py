"""What the rows of inputs and outputs have in common: a tensor whose dimensions are symbols."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from bundle.abi.submodels import SUBMODELS, SubmodelName

#: A number that differs from executable to executable.
#:
#: R                 rows of a step
#: T                 tokens of a row
#: K                 tokens of a row that give outputs: 1, or as many as a speculative step verifies
#: V                 vocabulary size
#: pad_id            token id of padding
#: scratch_slot      KV slot that idle rows write; the last one
#: last_token_id     largest token id
#: last_position     largest position that a token may have
Symbol = Literal["R", "T", "K", "V", "pad_id", "scratch_slot", "last_token_id", "last_position"]
Symbols = Mapping[Symbol, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbiTensor:
    """One input or output.

    Attributes:
        dims: Its dimensions. K is left out in executables in which it is 1.
        flag: Executables that have the tensor bear this flag; None: all executables of its submodels have it.
        submodels: Submodels that can have it.
    """

    name: str
    dtype: Literal["int32", "float32"]
    dims: tuple[Symbol | int, ...]
    flag: str | None = None
    submodels: tuple[SubmodelName, ...] = tuple(SUBMODELS)

    def shape(self, symbols: Symbols) -> tuple[int, ...]:
        """The static shape in one executable.

        Args:
            symbols: Values of at least the symbols in `dims`.
        """
        return tuple(
            dim if isinstance(dim, int) else symbols[dim] for dim in self.dims if dim != "K" or symbols["K"] > 1
        )

    def belongs_to(self, submodel: SubmodelName, flags: Collection[str]) -> bool:
        """Whether executables of a submodel have it.

        Args:
            flags: The flags that are set; flags of other submodels do no harm.
        """
        return submodel in self.submodels and (self.flag is None or self.flag in flags)
