"""What a sequence cost."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_svc.engine.request import BucketKey, Request


@dataclass(frozen=True, slots=True)
class BucketUsage:
    """How often an executable ran for a sequence, and what its static shape wasted, in tokens."""

    key: BucketKey
    steps: int
    padding_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sequence cost, partial when it did not end by itself."""

    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    buckets: tuple[BucketUsage, ...]


def usage_of(request: Request) -> Usage:
    """Usage of a request that has ended: a stage that it did not reach took no time."""
    timeline = request.timeline
    assert timeline.ended_s is not None
    started_s = timeline.ended_s if timeline.started_s is None else timeline.started_s
    first_token_s = timeline.ended_s if timeline.first_token_s is None else timeline.first_token_s
    return Usage(
        prompt_tokens=len(request.prompt_token_ids),
        cached_prompt_tokens=0,
        generated_tokens=len(request.output_token_ids),
        queue_s=started_s - timeline.arrived_s,
        prefill_s=first_token_s - started_s,
        decode_s=timeline.ended_s - first_token_s,
        buckets=tuple(
            BucketUsage(key, steps, request.bucket_padding[key]) for key, steps in request.bucket_steps.items()
        ),
    )
