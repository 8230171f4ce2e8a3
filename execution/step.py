"""One call of one executable, as plain data: the engine's request and the ranks' result."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, Literal

import msgspec

from bundle.abi.inputs import INPUTS, LEFT_PADDED
from bundle.abi.tensor import Symbols
from bundle.manifest import Executable, Manifest, Sampling, TensorSpec

#: Most alternatives that a step can return for each token.
MAX_TOP_LOGPROBS: Final = 20

#: Type codes of `array.array` for the dtypes of inputs.
ITEM_FORMATS: Final[Mapping[str, Literal["i", "f"]]] = {"int32": "i", "float32": "f"}

#: Values of a step's inputs by name, row-major, in an array of the input's dtype.
StepInputs = dict[str, "array[Any]"]


class ProcessedRow(msgspec.Struct, frozen=True):
    """A row whose logits its rank changes before it picks the row's token, by what executables take; see `processors`.

    Attributes:
        pairs: The row's part of `pair_ids`, `pair_bias`, `pair_factor` and `pair_penalty`, without idle values, in the
            order of the machine's bytes; {} if no logit changes so.
        mask: Its part of `token_bitmask`; None if it excludes no token.
        cuts: Its part of `cuts`.
    """

    row: int
    pairs: Mapping[str, bytes] = {}
    mask: bytes | None = None
    cuts: tuple[float, ...] = (0.0, 1.0)


class Step(msgspec.Struct, frozen=True):
    """One call of one executable. It and its result are msgspec structs, which are cheap: every token makes both.

    Attributes:
        tag: The executable.
        inputs: Values of every input that `step_inputs` names, row-major, in the manifest's shape and dtype. They are
            copied when the step is begun.
        top_logprobs: None: no log probabilities. 0: those of the picked tokens. n: also those of the n most probable.
            Needs an executable that outputs logits; at most MAX_TOP_LOGPROBS.
        return_logits: Whether to return all logits, for comparing models: they are large. Needs an executable that
            outputs them.
        depends_on_previous: Its `input_ids` are the tokens of the step that was begun before it and may still run; the
            ranks ignore `input_ids` in `inputs`. Needs executables that output one token per row, in as many rows as
            this one takes.
        processed: Rows whose logits are changed before their tokens are picked. Their ranks pick these tokens, from the
            logits that the executable leaves, also if it has picked some.
        left: Rows that get no token in this step. A call of the ranks picks it before the next one, by a mask that is
            found while the step runs. As `processed`, it needs logits that the executable leaves.
        reported: Names of the outputs to return of those that say something of prompts; the executable has them.
        with_old: Compute with the weights that the last swap kept.
    """

    tag: str
    inputs: Mapping[str, array[Any]]
    top_logprobs: int | None = None
    return_logits: bool = False
    depends_on_previous: bool = False
    processed: tuple[ProcessedRow, ...] = ()
    left: tuple[int, ...] = ()
    reported: tuple[str, ...] = ()
    with_old: bool = False


class StepResult(msgspec.Struct, frozen=True):
    """The results of a step. Every list has one entry per row, idle rows included, and that one for each token.

    Attributes:
        tokens: Picked token ids: one per row, or as many as a speculative step accepted. Other lists may have entries
            behind those.
        logprobs: Natural log probability of each token under the model's own distribution: log-softmax of the logits,
            before temperature, top_k and top_p. None unless the step asked.
        top_ids: The most probable tokens, most probable first, as many as the step asked for. None unless it asked.
        top_logprobs: Their log probabilities.
        duration_s: Seconds in the rank process, from the call to the answer.
        logits: f32 [rows, vocab_size], or [rows, tokens, vocab_size], a copy. None unless the step asked.
        invalid_rows: Rows whose numbers the executable has marked as invalid. They have no tokens.
        internal: The internal outputs by name, f32 [ranks, *shape of the output], copies. Empty unless the ranks were
            started to return them.
        reported: The outputs that the step asked for by name, copies in the shape of the output: f32, or int32 ids.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None
    top_ids: list[list[list[int]]] | None
    top_logprobs: list[list[list[float]]] | None
    duration_s: float
    logits: memoryview[float] | None = None
    invalid_rows: tuple[int, ...] = ()
    internal: Mapping[str, memoryview[float]] = {}
    reported: Mapping[str, memoryview[float] | memoryview[int]] = {}


def step_inputs(executable: Executable, sampling: Sampling) -> tuple[TensorSpec, ...]:
    """Lists the inputs of an executable's steps.

    They are the executable's inputs. If sampling is on the host, the rank samples after the executable, so the step
    also has the inputs for sampling, in the shapes that they have on the device.
    """
    if sampling.mode == "on_device":
        return executable.inputs
    rows: Symbols = {"R": executable.batch_size}
    names = ("sampling_params", sampling.chance)
    return (*executable.inputs, *(TensorSpec.of(INPUTS[name], rows) for name in names))


class StepForm:
    """Fills the inputs of an executable's steps by the ABI. Every row is idle until tokens are put in it."""

    def __init__(self, manifest: Manifest, executable: Executable) -> None:
        symbols = manifest.symbols_of(executable)
        self.specs = step_inputs(executable, manifest.sampling)
        self._num_row_tokens = executable.num_row_tokens
        self._num_row_blocks = executable.num_row_blocks
        self._block_tokens = manifest.state.block_tokens
        self._is_left_padded = LEFT_PADDED in executable.flags
        self._idle = {
            spec.name: array(ITEM_FORMATS[spec.dtype], INPUTS[spec.name].idle_values(spec.shape, symbols))
            for spec in self.specs
        }
        self._widths = {spec.name: prod(spec.shape[1:]) for spec in self.specs}

    def make_idle(self) -> StepInputs:
        """Makes the inputs of a step in which all rows are idle."""
        return {name: values[:] for name, values in self._idle.items()}

    def put_tokens(
        self,
        inputs: StepInputs,
        row: int,
        tokens: Sequence[int],
        *,
        start: int,
        blocks: Sequence[int],
        num_moved: int = 0,
        num_prompt_tokens: int = 0,
        next_id: int | None = None,
    ) -> None:
        """Puts tokens of a sequence into a row: at least one, at most as many as the row has.

        Args:
            start: Position of the first token.
            blocks: KV blocks of the sequence, in order of the positions that they hold, as far as its last token here
                at least. In the contiguous cache it is one, the sequence's slot.
            num_moved: Of the tokens, the first ones that the KV blocks hold already: they are not written again.
            num_prompt_tokens: Tokens of the sequence's prompt; 0 if it ends with the tokens here.
            next_id: The sequence's token behind these, if it is known.
        """
        count, width = len(tokens), self._num_row_tokens
        assert 0 < count <= width, f"{count} tokens in a row of {width}"
        first = row * width + (width - count if self._is_left_padded else 0)
        size = self._block_tokens
        if width == 1:
            # Most steps put one token per row, and slices cost six times as much.
            inputs["input_ids"][row] = tokens[0]
            inputs["position_ids"][row] = start
            if size and not num_moved:
                inputs["slot_mapping"][row] = blocks[start // size] * size + start % size
        else:
            positions = range(start, start + count)
            inputs["input_ids"][first : first + count] = array("i", tokens)
            inputs["position_ids"][first : first + count] = array("i", positions)
            if size:
                places = [blocks[at // size] * size + at % size for at in positions[num_moved:]]
                inputs["slot_mapping"][first + num_moved : first + count] = array("i", places)
        if size:
            width = self._num_row_blocks
            # A sequence may hold more than the bucket reads.
            table = array("i", blocks[:width])
            inputs["active_block_table"][row * width : row * width + len(table)] = table
        else:
            inputs["seq_ids"][row] = blocks[0]
        if "next_ids" in inputs:
            behind = [*tokens[1:], *([] if next_id is None else [next_id])]
            inputs["next_ids"][first : first + len(behind)] = array("i", behind)
        if "num_tokens" in inputs:
            inputs["num_tokens"][row] = count
        if "computed_context_lens" in inputs:
            inputs["computed_context_lens"][row] = start
        if "prompt_lens" in inputs:
            inputs["prompt_lens"][row] = num_prompt_tokens or start + count
        if "live_rows" in inputs:
            inputs["live_rows"][0] = max(inputs["live_rows"][0], row + 1)

    def put_values(self, inputs: StepInputs, name: str, row: int, values: Sequence[float]) -> None:
        """Replaces the first values of a row of one input. Has no effect if the step does not take this input."""
        if name not in inputs:
            return
        own, width = inputs[name], self._widths[name]
        if width == 1:
            own[row] = values[0]
        else:
            assert len(values) <= width, f"{len(values)} values of {name} in a row of {width}"
            own[row * width : row * width + len(values)] = array(own.typecode, values)
