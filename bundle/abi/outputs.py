"""The outputs of executables, in the order in which they are returned, and how to read a step's tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bundle.abi.inputs import INPUTS, LEFT_PADDED, PROMPT_LOGPROBS, PROMPT_SUBMODELS
from bundle.abi.submodels import SubmodelName
from bundle.abi.tensor import AbiTensor

#: Flag of executables that tell of a prompt what embeddings are made of.
EMBEDDINGS: Final = "embeddings"
#: Likeliest tokens that are told of each token of a prompt, or all if the vocabulary has fewer.
MAX_PROMPT_CANDIDATES: Final = 20

#: In the output `tokens`: no token. If a step gives several tokens per row, it fills a row behind the accepted ones.
NO_TOKEN: Final = -1
#: In the output `tokens`, first in a row: the row's numbers are invalid and it has no tokens.
INVALID_ROW: Final = -2
#: In the output `tokens`: a row that the step did not compute. What other outputs say of such a row is unspecified.
IDLE_TOKEN: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(AbiTensor):
    """One output of executables.

    Attributes:
        is_internal: Whether it stays in its rank, but for the golden check. Where the executable left it, a rank reads
            it to pick tokens of rows with processors, or drops it: it costs neither a copy nor room in the memory of
            steps, and no deployment offers it. It may differ from rank to rank; other outputs are the same on all.
        is_reported: Whether it says something of a prompt. Ranks copy it for steps that name it, and drop it otherwise.
    """

    is_internal: bool = False
    is_reported: bool = False


_reported: Final = partial(Output, submodels=PROMPT_SUBMODELS, is_reported=True)

_ROWS: Final = (
    Output(name="tokens", dtype="int32", dims=("R", "K"), flag="tokens"),
    Output(name="logits", dtype="float32", dims=("R", "K", "V"), flag="logits"),
    # The logits from which an executable picks tokens, before ranks exchange any. The last ranks' may end in padding.
    Output(name="rank_logits", dtype="computed", dims=("R", "K", "rank_V"), flag="rank_logits", is_internal=True),
    # Of each token of a row, what the model says of the one behind it: the natural log probability of that in
    # `next_ids`, and the likeliest ones, likeliest first. Of padding, unspecified.
    _reported(name="prompt_logprobs", dtype="float32", dims=("R", "T"), flag=PROMPT_LOGPROBS),
    _reported(name="prompt_top_ids", dtype="int32", dims=("R", "T", "L"), flag=PROMPT_LOGPROBS),
    _reported(name="prompt_top_logprobs", dtype="float32", dims=("R", "T", "L"), flag=PROMPT_LOGPROBS),
    # What the head takes, which is normalized: of a row's last token, and the sum of those of all its tokens.
    _reported(name="last_hidden", dtype="float32", dims=("R", "H"), flag=EMBEDDINGS),
    _reported(name="hidden_sum", dtype="float32", dims=("R", "H"), flag=EMBEDDINGS),
)

#: Outputs that have the logits of a step, whole or the rank's part, and their flags: ranks can pick tokens from either.
LOGITS: Final = frozenset({"logits", "rank_logits"})

#: Every output, by name.
OUTPUTS: Final[Mapping[str, Output]] = {row.name: row for row in _ROWS}


def outputs_of(submodel: SubmodelName, flags: Collection[str]) -> tuple[Output, ...]:
    """Lists the outputs of a submodel's executables, in order."""
    return tuple(row for row in OUTPUTS.values() if row.belongs_to(submodel, flags))


def list_flags() -> frozenset[str]:
    """Lists all flags that change how to call an executable. A runtime refuses flags that it does not know."""
    flags = (row.flag for row in (*INPUTS.values(), *OUTPUTS.values()))
    return frozenset({LEFT_PADDED, *(flag for flag in flags if flag is not None)})


def split_tokens(values: Sequence[int], num_rows: int) -> tuple[list[list[int]], tuple[int, ...]]:
    """Reads the output `tokens`, [num_rows] or [num_rows, K], row-major.

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
