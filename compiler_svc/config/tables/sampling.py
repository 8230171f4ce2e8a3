"""OnDeviceSamplingConfig, and the attribute of NeuronConfig that holds it."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_svc.config.attribute import attribute
from compiler_svc.config.domains import Integer, Number
from compiler_svc.config.tables.documents import FEATURE_SAMPLING, SAMPLING
from compiler_svc.config.tables.general import NO_SIZE


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

    do_sample: bool = attribute(SAMPLING, default=False, neuron=NO_SIZE)
    top_k: int = attribute(SAMPLING, Integer(-1), default=1, neuron=NO_SIZE)
    top_p: float = attribute(FEATURE_SAMPLING, Number(0, 1, positive=True), default=1.0, neuron=NO_SIZE)
    temperature: float = attribute(FEATURE_SAMPLING, Number(0), default=1.0, neuron=NO_SIZE)
    dynamic: bool = attribute(SAMPLING, default=False, neuron=NO_SIZE)
    deterministic: bool = attribute(SAMPLING, default=False, neuron=NO_SIZE)
    global_topk: int = attribute(SAMPLING, Integer(0), default=256, neuron=NO_SIZE)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, as NxD Inference has it without `do_sample` and `dynamic`."""
        return not (self.do_sample or self.dynamic)


@dataclass(frozen=True, kw_only=True)
class SamplingAttributes:
    """Sampling in the executable; None leaves it to the runtime."""

    on_device_sampling_config: OnDeviceSamplingConfig | None = attribute(SAMPLING)
