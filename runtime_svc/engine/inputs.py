"""A step plan as the numbers that an executable takes, by `bundle.abi`."""

from __future__ import annotations

from bundle.manifest import Manifest
from execution.step import Step, StepForm
from runtime_svc.engine.request import Request
from runtime_svc.engine.scheduler import StepPlan
from runtime_svc.engine.uniform import uniform


class StepBuilder:
    """Fills the inputs of steps, idle rows included."""

    def __init__(self, manifest: Manifest) -> None:
        """Takes the pad id and the forms of steps from the manifest."""
        self._pad_id = manifest.tokens.pad
        self._is_deterministic = manifest.sampling.deterministic
        self._forms = {executable.tag: StepForm(manifest, executable) for executable in manifest.executables}

    def build(self, plan: StepPlan) -> Step:
        """Inputs of one step, every one row-major."""
        form = self._forms[plan.executable.tag]
        inputs = form.make_idle()
        # Tokens of each row that the previous step is about to give. This step takes them from it.
        num_pending = int(plan.follows)
        for row in plan.rows:
            request, sampling = row.request, row.request.sampling
            tokens = [self._pad_id] if num_pending else _next_tokens(request, row.num_tokens)
            form.put_tokens(inputs, row.row, tokens, start=request.num_computed_tokens + num_pending, slot=row.slot)
            params = (float(sampling.top_k), sampling.top_p, sampling.temperature)
            form.put_values(inputs, "sampling_params", row.row, params)
            if not self._is_deterministic:
                number = uniform(sampling.seed, len(request.output_token_ids) + num_pending)
                form.put_values(inputs, "rand", row.row, (number,))
        top_logprobs = [row.request.top_logprobs for row in plan.rows if row.request.top_logprobs is not None]
        wants_logits = any(row.request.wants_logits for row in plan.rows)
        return Step(
            plan.executable.tag,
            inputs,
            max(top_logprobs, default=None),
            return_logits=wants_logits,
            depends_on_previous=plan.follows,
        )


def _next_tokens(request: Request, count: int) -> list[int]:
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.num_computed_tokens >= num_prompt_tokens:
        start = request.num_computed_tokens - num_prompt_tokens
        return request.output_token_ids[start : start + count]
    return [*request.prompt_token_ids, *request.output_token_ids][request.num_computed_tokens :][:count]
