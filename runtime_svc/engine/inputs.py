"""A step plan as the numbers that an executable takes, by `bundle.abi`."""

from __future__ import annotations

import hashlib
from typing import Final

from bundle.manifest import Manifest
from execution.step import Step, StepForm
from runtime_svc.engine.scheduler.plan import ScheduledRow, StepPlan

# float32 holds multiples of 2**-24 exactly, so that no number is rounded up to 1.
RESOLUTION_BITS: Final = 24


class StepBuilder:
    """Fills the inputs of steps, idle rows included."""

    def __init__(self, manifest: Manifest) -> None:
        """Takes the pad id and the forms of steps from the manifest."""
        self._pad_id = manifest.tokens.pad
        self._is_deterministic = manifest.sampling.deterministic
        self._forms = {executable.tag: StepForm(manifest, executable) for executable in manifest.executables}

    def build(self, plan: StepPlan) -> Step:
        """Inputs of one step, each row-major. Tokens that only the ranks know so far are the pad id."""
        form = self._forms[plan.executable.tag]
        inputs = form.make_idle()
        top_logprobs, wants_logits = None, False
        for row in plan.rows:
            request, sampling = row.request, row.request.sampling
            tokens = [self._pad_id] if plan.depends_on_previous else request.tokens_at(row.start, row.num_tokens)
            form.put_tokens(
                inputs,
                row.row,
                tokens,
                start=row.start,
                blocks=row.placement.blocks,
                num_moved=row.num_moved,
                num_prompt_tokens=len(row.request.prompt_token_ids),
            )
            params = (float(sampling.top_k), sampling.top_p, sampling.temperature)
            form.put_values(inputs, "sampling_params", row.row, params)
            if row.samples and not self._is_deterministic:
                form.put_values(inputs, "rand", row.row, (_draw(row),))
            if request.top_logprobs is not None:
                top_logprobs = max(top_logprobs or 0, request.top_logprobs)
            wants_logits = wants_logits or request.wants_logits
        return Step(
            plan.executable.tag,
            inputs,
            top_logprobs,
            return_logits=wants_logits,
            depends_on_previous=plan.depends_on_previous,
        )


def _draw(row: ScheduledRow) -> float:
    """The random number that picks the token after those that a row computes."""
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
