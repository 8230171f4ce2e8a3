"""A step plan as the numbers that an executable takes, named by `bundle.abi`."""

from __future__ import annotations

from itertools import chain
from typing import Final

from bundle.manifest import Executable, Manifest
from execution.step import Step, step_inputs
from runtime_svc.engine.request import Request
from runtime_svc.engine.scheduler import ScheduledRow, StepPlan
from runtime_svc.engine.uniform import uniform

# What idle rows sample with: greedy, whatever else is set.
IDLE_SAMPLING_PARAMS: Final = (1.0, 1.0, 1.0)

# In place of a random number where the bundle asks for none.
DETERMINISTIC_RAND: Final = 0.5


class StepBuilder:
    """Fills the inputs of steps, idle rows included."""

    def __init__(self, manifest: Manifest) -> None:
        """Takes the pad id, the scratch slot and the names of inputs from the manifest."""
        self._pad_id = manifest.tokens.pad
        self._scratch_slot = manifest.state.num_slots
        self._is_deterministic = manifest.sampling.deterministic
        self._input_names = {
            executable.tag: {spec.name for spec in step_inputs(executable, manifest.sampling)}
            for executable in manifest.executables
        }

    def build(self, plan: StepPlan) -> Step:
        """Inputs of one step, every one row-major."""
        executable = plan.executable
        # Tokens of each row that the step before is about to give, and that this one takes from it.
        num_pending = int(plan.follows)
        by_row: list[ScheduledRow | None] = [None] * executable.batch_size
        for row in plan.rows:
            by_row[row.row] = row
        if executable.submodel == "context_encoding":
            inputs = self._prompt_inputs(executable, by_row)
        else:
            inputs = self._token_inputs(by_row, num_pending)
        names = self._input_names[executable.tag]
        if "sampling_params" in names:
            inputs["sampling_params"] = list(chain.from_iterable(map(_sampling_params, by_row)))
        if "rand" in names:
            inputs["rand"] = [self._rand(row, num_pending) for row in by_row]
        top_logprobs = [row.request.top_logprobs for row in plan.rows if row.request.top_logprobs is not None]
        wants_logits = any(row.request.wants_logits for row in plan.rows)
        return Step(
            executable.tag,
            inputs,
            max(top_logprobs, default=None),
            return_logits=wants_logits,
            follows=plan.follows,
        )

    def _prompt_inputs(
        self, executable: Executable, by_row: list[ScheduledRow | None]
    ) -> dict[str, list[int] | list[float]]:
        bucket = executable.bucket[0]
        is_left_padded = "left_padded" in executable.flags
        input_ids: list[int] = []
        position_ids: list[int] = []
        for row in by_row:
            token_ids = [self._pad_id] if row is None else _next_tokens(row.request, row.num_tokens)
            num_padding = bucket - len(token_ids)
            padding = [self._pad_id] * num_padding
            if is_left_padded:
                input_ids += padding + token_ids
                position_ids += [0] * num_padding
                position_ids += range(len(token_ids))
            else:
                input_ids += token_ids + padding
                position_ids += range(bucket)
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "seq_ids": self._seq_ids(by_row),
            "num_tokens": [1 if row is None else row.num_tokens for row in by_row],
        }

    def _token_inputs(self, by_row: list[ScheduledRow | None], num_pending: int) -> dict[str, list[int] | list[float]]:
        return {
            "input_ids": [
                self._pad_id if row is None or num_pending else _next_tokens(row.request, 1)[0] for row in by_row
            ],
            "position_ids": [0 if row is None else row.request.num_computed_tokens + num_pending for row in by_row],
            "seq_ids": self._seq_ids(by_row),
        }

    def _seq_ids(self, by_row: list[ScheduledRow | None]) -> list[int]:
        return [self._scratch_slot if row is None else row.slot for row in by_row]

    def _rand(self, row: ScheduledRow | None, num_pending: int) -> float:
        if row is None or self._is_deterministic:
            return DETERMINISTIC_RAND
        return uniform(row.request.sampling.seed, len(row.request.output_token_ids) + num_pending)


def _next_tokens(request: Request, count: int) -> list[int]:
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.num_computed_tokens >= num_prompt_tokens:
        start = request.num_computed_tokens - num_prompt_tokens
        return request.output_token_ids[start : start + count]
    return [*request.prompt_token_ids, *request.output_token_ids][request.num_computed_tokens :][:count]


def _sampling_params(row: ScheduledRow | None) -> tuple[float, float, float]:
    if row is None:
        return IDLE_SAMPLING_PARAMS
    sampling = row.request.sampling
    return float(sampling.top_k), sampling.top_p, sampling.temperature
