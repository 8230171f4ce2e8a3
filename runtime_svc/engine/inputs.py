"""A step plan as the numbers that an executable takes, named by `bundle.abi`."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import Final

from bundle.manifest import Executable, Manifest
from execution.step import Step, step_inputs
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan

# Idle rows sample greedily, whatever else is set.
IDLE_SAMPLING_PARAMS: Final = (1.0, 1.0, 1.0)

# Stands for a random number if the bundle asks for none.
DETERMINISTIC_RAND: Final = 0.5

# float32 holds multiples of 2**-24 exactly, so that no number is rounded up to 1.
RESOLUTION_BITS: Final = 24


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
        """Inputs of one step, each row-major. Tokens that only the ranks know so far are the pad id."""
        executable = plan.executable
        by_row: list[ScheduledRow | None] = [None] * executable.batch_size
        for row in plan.rows:
            by_row[row.row] = row
        if executable.submodel == "context_encoding":
            inputs = self._prompt_inputs(executable, by_row)
        else:
            inputs = self._token_inputs(by_row, is_known=not plan.depends_on_previous)
        names = self._input_names[executable.tag]
        if "sampling_params" in names:
            inputs["sampling_params"] = list(chain.from_iterable(map(_sampling_params, by_row)))
        if "rand" in names:
            inputs["rand"] = [self._rand(row) for row in by_row]
        top_logprobs = [row.request.top_logprobs for row in plan.rows if row.request.top_logprobs is not None]
        wants_logits = any(row.request.wants_logits for row in plan.rows)
        return Step(
            executable.tag,
            inputs,
            max(top_logprobs, default=None),
            return_logits=wants_logits,
            follows=plan.depends_on_previous,
        )

    def _prompt_inputs(
        self, executable: Executable, by_row: list[ScheduledRow | None]
    ) -> dict[str, list[int] | list[float]]:
        bucket = executable.bucket[0]
        is_left_padded = "left_padded" in executable.flags
        input_ids: list[int] = []
        position_ids: list[int] = []
        for row in by_row:
            start = 0 if row is None else row.start
            token_ids = [self._pad_id] if row is None else row.request.tokens_at(start, row.num_tokens)
            num_padding = bucket - len(token_ids)
            padding = [self._pad_id] * num_padding
            if is_left_padded:
                input_ids += padding + token_ids
                position_ids += [0] * num_padding
                position_ids += range(start, start + len(token_ids))
            else:
                input_ids += token_ids + padding
                position_ids += range(start, start + bucket)
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "seq_ids": self._seq_ids(by_row),
            "num_tokens": [1 if row is None else row.num_tokens for row in by_row],
        }

    def _token_inputs(self, by_row: list[ScheduledRow | None], *, is_known: bool) -> dict[str, list[int] | list[float]]:
        pad_id = self._pad_id
        return {
            "input_ids": [
                row.request.tokens_at(row.start, 1)[0] if row is not None and is_known else pad_id for row in by_row
            ],
            "position_ids": [0 if row is None else row.start for row in by_row],
            "seq_ids": self._seq_ids(by_row),
        }

    def _seq_ids(self, by_row: list[ScheduledRow | None]) -> list[int]:
        """Slots of the rows: the one block that each holds of the contiguous cache."""
        return [self._scratch_slot if row is None else row.placement.blocks[0] for row in by_row]

    def _rand(self, row: ScheduledRow | None) -> float:
        if row is None or self._is_deterministic or not row.samples:
            return DETERMINISTIC_RAND
        request = row.request
        return uniform(request.sampling.seed, row.start + row.num_tokens - len(request.prompt_token_ids))


def uniform(seed: int, index: int) -> float:
    """The random number at `index` of a seed's sequence: a multiple of 2**-24 in [0, 1).

    It belongs to a request, not to a batch: it is a function of seed and index alone, so a request's tokens depend
    neither on the other requests of its batch, nor on the order of steps, nor on a restart. It is the top 24 bits of
    BLAKE2b-64, keyed with the seed, of the index; both little-endian in 8 bytes.

    Args:
        seed: In [0, 2**64).
        index: Position of the generated token that it picks, from 0.
    """
    key = seed.to_bytes(8, "little")
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - RESOLUTION_BITS)) / (1 << RESOLUTION_BITS)


def _sampling_params(row: ScheduledRow | None) -> tuple[float, float, float]:
    if row is None:
        return IDLE_SAMPLING_PARAMS
    sampling = row.request.sampling
    return float(sampling.top_k), sampling.top_p, sampling.temperature
