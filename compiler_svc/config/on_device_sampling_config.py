"""How the executable picks tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OnDeviceSamplingConfig:
    """How the executable picks tokens.

    Attributes:
        do_sample: Whether a request that does not choose is sampled; otherwise it is greedy.
        top_k: Candidates kept; 0 keeps all that `global_topk` considers.
        top_p: Probability mass kept, in (0, 1].
        temperature: Divides the logits; 0 is greedy.
        dynamic: Whether requests choose top_k, top_p and temperature; otherwise they are baked in.
        deterministic: Whether 0.5 replaces the uniform random number.
        global_topk: Candidates considered; 0 considers the whole vocabulary.
    """

    do_sample: bool
    top_k: int
    top_p: float
    temperature: float
    dynamic: bool
    deterministic: bool
    global_topk: int

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, as NxD Inference has it without `do_sample` and `dynamic`."""
        return not (self.do_sample or self.dynamic)
