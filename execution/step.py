"""One call of one executable, as plain data: what an engine asks for and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from bundle.abi.inputs import INPUTS, LEFT_PADDED
from bundle.abi.tensor import Symbols
from bundle.manifest import Executable, Manifest, Sampling, TensorSpec

#: Most alternatives that a step can return for each token.
MAX_TOP_LOGPROBS: Final = 20

#: Values of a step's inputs by name, row-major: ints for int32.
StepInputs = dict[str, list[float]]


class Step(msgspec.Struct, frozen=True):
    """One call of one executable. A struct, as its result is one: every token makes both.

    Attributes:
        tag: The executable.
        inputs: Values of every input that `step_inputs` names, row-major and as many as the manifest's shape holds.
        top_logprobs: None: no log probabilities. 0: those of the picked tokens. n: also the n most probable tokens.
            Needs an executable that outputs logits; at most MAX_TOP_LOGPROBS.
        return_logits: Return all logits; needs an executable that outputs them. For comparing models: they are large.
        depends_on_previous: Its `input_ids` are the tokens of the step that was begun before it and may still run; the
            ranks do not read what `inputs` has for them. Needs executables that output one token a row, in as many
            rows as this one takes.
    """

    tag: str
    inputs: Mapping[str, Sequence[int] | Sequence[float]]
    top_logprobs: int | None = None
    return_logits: bool = False
    depends_on_previous: bool = False


class StepResult(msgspec.Struct, frozen=True):
    """What a step returned; every list has one entry a row, idle rows included.

    Attributes:
        tokens: Picked token ids: one a row, or as many as a speculative step accepted.
        logprobs: Natural log probability of each row's first token under the model's own distribution: log-softmax of
            the logits, before temperature, top_k and top_p. None unless the step asked.
        top_ids: The most probable tokens, most probable first, as many as the step asked for. None unless it asked.
        top_logprobs: Their log probabilities.
        duration_s: Time in the rank process, from the doorbell to the answer.
        logits: f32 [rows, vocab_size], a copy. None unless the step asked.
        invalid_rows: Rows whose numbers the executable calls invalid. They have no tokens.
    """

    tokens: list[list[int]]
    logprobs: list[float] | None
    top_ids: list[list[int]] | None
    top_logprobs: list[list[float]] | None
    duration_s: float
    logits: memoryview[float] | None = None
    invalid_rows: tuple[int, ...] = ()


def step_inputs(executable: Executable, sampling: Sampling) -> tuple[TensorSpec, ...]:
    """The inputs that a step of an executable takes.

    They are the executable's own. If sampling is on the host, the rank samples after the executable and takes the
    inputs for sampling in its place, in the shapes that they have on the device.
    """
    if sampling.mode == "on_device":
        return executable.inputs
    rows: Symbols = {"R": executable.batch_size}
    return (*executable.inputs, *(TensorSpec.of(one, rows) for one in INPUTS.values() if one.is_for_sampling))


class StepForm:
    """Fills the inputs of an executable's steps by the ABI: every row is idle until a request's tokens are put in it.

    Attributes:
        specs: The inputs of a step; see `step_inputs`.
    """

    def __init__(self, manifest: Manifest, executable: Executable) -> None:
        """Takes sizes and special values from the manifest."""
        symbols = manifest.symbols_of(executable)
        self.specs = step_inputs(executable, manifest.sampling)
        self._num_row_tokens = executable.num_row_tokens
        self._is_left_padded = LEFT_PADDED in executable.flags
        self._idle = {spec.name: INPUTS[spec.name].idle_values(spec.shape, symbols) for spec in self.specs}

    def make_idle(self) -> StepInputs:
        """Inputs of a step in which all rows are idle."""
        return {name: values.copy() for name, values in self._idle.items()}

    def put_tokens(self, inputs: StepInputs, row: int, tokens: Sequence[int], *, start: int, slot: int) -> None:
        """Puts tokens of a sequence into a row.

        Args:
            inputs: From `make_idle`.
            tokens: At least one, and at most as many as the row has.
            start: Position of the first.
            slot: KV slot of the sequence.
        """
        inputs["seq_ids"][row] = slot
        count, width = len(tokens), self._num_row_tokens
        assert 0 < count <= width, f"{count} tokens in a row of {width}"
        if width == 1:
            # Most steps are of this kind, and slices cost three times as much.
            inputs["input_ids"][row] = tokens[0]
            inputs["position_ids"][row] = start
        else:
            first = row * width + (width - count if self._is_left_padded else 0)
            inputs["input_ids"][first : first + count] = tokens
            inputs["position_ids"][first : first + count] = range(start, start + count)
        if "num_tokens" in inputs:
            inputs["num_tokens"][row] = count

    def put_values(self, inputs: StepInputs, name: str, row: int, values: Sequence[float]) -> None:
        """Replaces a row of one input; does nothing for an input that the step does not take.

        Args:
            inputs: From `make_idle`.
            values: All values of the row.
        """
        if name in inputs:
            first = row * len(values)
            inputs[name][first : first + len(values)] = values
