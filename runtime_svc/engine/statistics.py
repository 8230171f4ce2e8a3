"""What an engine counts for metrics: integers and histograms, which a scrape reads."""

from __future__ import annotations

from collections import Counter
from typing import Final

from edge.histogram import Histogram
from runtime_svc.engine.request import BucketKey, FinishReason

#: Upper bounds in seconds. Those of vLLM for the same metrics, so that its boards and rules fit.
FIRST_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
SWAP_PAUSE_BOUNDS_S: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


class EngineStatistics:
    """Counts of one engine since it started. Scheduler, requests and engine write them."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.swap_pause_s = Histogram(SWAP_PAUSE_BOUNDS_S)
        self.prompt_tokens = 0
        #: Tokens of prompts that were looked up in the KV cache when their requests started.
        self.looked_up_tokens = 0
        #: Of those, tokens that the KV cache held.
        self.cached_prompt_tokens = 0
        #: Of the latter, tokens of requests that continue sessions.
        self.session_tokens = 0
        self.generated_tokens = 0
        #: How often a request gave back its part of the KV cache to make room.
        self.preemptions = 0
        #: Requests that have ended, by reason.
        self.finished: Counter[FinishReason] = Counter()
        #: Steps of each executable.
        self.steps: Counter[BucketKey] = Counter()
        #: Tokens that rows of each executable computed, and those that its static shape wasted on them.
        self.computed_tokens: Counter[BucketKey] = Counter()
        self.padding_tokens: Counter[BucketKey] = Counter()
        #: How often ranks were ended because they hung.
        self.rank_hangs = 0
        #: Requests whose logits were NaN or infinite.
        self.invalid_requests = 0
        #: Requests that were refused because ranks had been lost over their prompts.
        self.quarantined_requests = 0
        #: How often dead ranks were replaced.
        self.rank_restarts = 0
