"""One call of one executable, as plain data: what an engine asks for and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from bundle.manifest import Executable, Sampling, TensorSpec

#: Most alternatives that a step can return for each token.
MAX_TOP_LOGPROBS: Final = 20


class Step(msgspec.Struct, frozen=True):
    """One call of one executable. A struct, as its result is one: every token makes both.

    Attributes:
        tag: The executable.
        inputs: Values of every input that `step_inputs` names, row-major and as many as the manifest's shape holds.
        top_logprobs: None: no log probabilities. 0: those of the picked tokens. n: also the n most probable tokens.
            Needs an executable that outputs logits; at most MAX_TOP_LOGPROBS.
        return_logits: Return all logits; needs an executable that outputs them. For comparing models: they are large.
        follows: Its `input_ids` are the tokens of the step that was begun before it and may still run; what `inputs`
            has for them is not read. Needs executables that output tokens, as many as this one takes.
    """

    tag: str
    inputs: Mapping[str, Sequence[int] | Sequence[float]]
    top_logprobs: int | None = None
    return_logits: bool = False
    follows: bool = False


class StepResult(msgspec.Struct, frozen=True):
    """What a step returned; every list has one entry a row, idle rows included.

    Attributes:
        tokens: Picked token ids.
        logprobs: Natural log probability of each picked token under the model's own distribution: log-softmax of the
            logits, before temperature, top_k and top_p. None unless the step asked.
        top_ids: The most probable tokens, most probable first, as many as the step asked for. None unless it asked.
        top_logprobs: Their log probabilities.
        duration_s: Time in the rank process, from the doorbell to the answer.
        logits: f32 [rows, vocab_size], a copy. None unless the step asked.
    """

    tokens: list[int]
    logprobs: list[float] | None
    top_ids: list[list[int]] | None
    top_logprobs: list[list[float]] | None
    duration_s: float
    logits: memoryview[float] | None = None


def step_inputs(executable: Executable, sampling: Sampling) -> tuple[TensorSpec, ...]:
    """The inputs that a step of an executable takes.

    They are the executable's own. Where sampling is on the host, the rank samples after the executable and takes
    `sampling_params` and `rand` in its place, in the shapes that `bundle.abi` gives them on the device.
    """
    if sampling.mode == "on_device":
        return executable.inputs
    rows = executable.batch_size
    return (
        *executable.inputs,
        TensorSpec(name="sampling_params", dtype="float32", shape=(rows, 3)),
        TensorSpec(name="rand", dtype="float32", shape=(rows, 1)),
    )
