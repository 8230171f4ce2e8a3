"""The outputs of executables, in the order in which they are returned, and how to read a step's tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from bundle.abi.inputs import INPUTS, LEFT_PADDED
from bundle.abi.submodels import SubmodelName
from bundle.abi.tensor import AbiTensor

#: In the output `tokens`: no token. If a step gives several tokens per row, it fills a row behind the accepted ones.
NO_TOKEN: Final = -1
#: In the output `tokens`, first in a row: the row's numbers are invalid and it has no tokens.
INVALID_ROW: Final = -2

_ROWS: Final = (
    AbiTensor(name="tokens", dtype="int32", dims=("R", "K"), flag="tokens"),
    AbiTensor(name="logits", dtype="float32", dims=("R", "K", "V"), flag="logits"),
)

#: Every output, by name.
OUTPUTS: Final[Mapping[str, AbiTensor]] = {row.name: row for row in _ROWS}


def outputs_of(submodel: SubmodelName, flags: Collection[str]) -> tuple[AbiTensor, ...]:
    """Lists the outputs of a submodel's executables, in order.

    Args:
        flags: Flags of the executable.
    """
    return tuple(row for row in OUTPUTS.values() if row.belongs_to(submodel, flags))


def list_flags() -> frozenset[str]:
    """Lists all flags that change how to call an executable. A runtime refuses flags that it does not know."""
    flags = (row.flag for row in (*INPUTS.values(), *OUTPUTS.values()))
    return frozenset({LEFT_PADDED, *(flag for flag in flags if flag is not None)})


def split_tokens(values: Sequence[int], num_rows: int) -> tuple[list[list[int]], tuple[int, ...]]:
    """Reads the output `tokens`.

    Args:
        values: [num_rows] or [num_rows, K], row-major.

    Returns:
        The tokens of each row, without padding, and the rows whose numbers are invalid, which have no tokens.
    """
    if len(values) == num_rows and min(values) >= 0:
        return [[value] for value in values], ()
    width = len(values) // num_rows
    rows = [values[start : start + width] for start in range(0, len(values), width)]
    invalid = tuple(index for index, row in enumerate(rows) if row[0] == INVALID_ROW)
    tokens = [[] if index in invalid else [value for value in row if value >= 0] for index, row in enumerate(rows)]
    return tokens, invalid
