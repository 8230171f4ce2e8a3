"""OnDeviceSamplingConfig, and the attribute of NeuronConfig that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compiler_svc.config.attribute import Values, attribute
from compiler_svc.config.domains import integer, number
from compiler_svc.config.rule import KILN, Note, Rule
from compiler_svc.config.tables.documents import FEATURE_SAMPLING, SAMPLING, UNDOCUMENTED
from compiler_svc.config.tables.general import NO_SIZE
from targets.cpu import CPU
from targets.neuron import RECORDED_TOP_K


@dataclass(frozen=True, kw_only=True)
class OnDeviceSamplingConfig:
    """How the executable picks tokens.

    Attributes:
        do_sample: Whether a request that does not choose is sampled; otherwise it is greedy.
        top_k: Candidates kept; 0 keeps all that `global_topk` considers.
        top_p: Probability mass kept, in (0, 1].
        temperature: Divides the logits; 0 is greedy.
        dynamic: Whether requests choose top_k, top_p and temperature; otherwise they are baked in.
        deterministic: Whether 0.5 replaces what seeds decide, as a uniform number.
        global_topk: Candidates considered; 0 considers the whole vocabulary.
    """

    do_sample: bool = attribute(
        SAMPLING, default=False, neuron=NO_SIZE, note="true by default in the API reference 0.1"
    )
    top_k: int = attribute(
        SAMPLING,
        integer(-1),
        default=1,
        neuron=NO_SIZE,
        note="0 and -1 keep all candidates with their probabilities; NxD Inference makes them equally likely. Greedy "
        "unless do_sample or dynamic is true, although the feature guide's example of sampling sets top_k alone",
    )
    top_p: float = attribute(
        FEATURE_SAMPLING,
        number(0, 1, positive=True),
        default=1.0,
        neuron=NO_SIZE,
        note="keeps the token that reaches it, as transformers does; NxD Inference drops it",
    )
    temperature: float = attribute(
        FEATURE_SAMPLING,
        number(0),
        default=1.0,
        neuron=NO_SIZE,
        note="0 is greedy whatever top_k is; NxD Inference refuses it beside a top_k of 0 or -1",
    )
    dynamic: bool = attribute(SAMPLING, default=False, neuron=NO_SIZE)
    deterministic: bool = attribute(SAMPLING, default=False, neuron=NO_SIZE)
    global_topk: int = attribute(SAMPLING, integer(0), default=256, neuron=NO_SIZE)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, as NxD Inference has it without `do_sample` and `dynamic`."""
        return not (self.do_sample or self.dynamic)


@dataclass(frozen=True, kw_only=True)
class SamplingAttributes:
    """Sampling in the executable; None leaves it to the runtime."""

    on_device_sampling_config: OnDeviceSamplingConfig | None = attribute(SAMPLING)
    logit_processors: bool | None = attribute(
        UNDOCUMENTED,
        neuron=NO_SIZE,
        note="Kiln's own: executables that pick tokens serve penalties, biases and excluded tokens, too; each is "
        "compiled a second time, for steps of which a request asks for them. Without it ranks serve them, on Neuron "
        "with output_logits",
    )

    @property
    def processes_logits(self) -> bool:
        """Whether executables change logits before they pick tokens."""
        return self.on_device_sampling_config is not None and bool(self.logit_processors)


#: Rules on the values of an OnDeviceSamplingConfig.
ON_DEVICE_SAMPLING_RULES: Final = (
    Rule(
        ("top_k", "global_topk"),
        lambda v: v["global_topk"] == 0 or v["top_k"] <= v["global_topk"],
        "at most global_topk, which is {global_topk}",
        SAMPLING,
        breaks={"top_k": 65, "global_topk": 64},
        keeps={"top_k": 64, "global_topk": 64},
    ),
)

SAMPLING_RULES: Final = (
    Rule(
        ("logit_processors",),
        lambda v: (
            not (
                v["logit_processors"]
                and v["on_device_sampling_config"]
                and v["on_device_sampling_config"]["deterministic"]
            )
        ),
        "unset or false with on_device_sampling_config.deterministic, which draws by the order of candidates",
        KILN,
        breaks={"logit_processors": True, "on_device_sampling_config": {"dynamic": True, "deterministic": True}},
        keeps={"logit_processors": True, "on_device_sampling_config": {"dynamic": True}},
    ),
)

ON_DEVICE_SAMPLING_NOTES: Final = (
    Note(
        lambda v: not v["do_sample"] and not v["dynamic"] and (v["top_k"], v["top_p"], v["temperature"]) != (1, 1, 1),
        "neuron_config.on_device_sampling_config: top_k, top_p and temperature are ignored because neither do_sample "
        "nor dynamic is true: every token is the most likely one",
        doubtful={"top_k": 5},
        plain={"top_k": 5, "dynamic": True},
    ),
)


def _is_beyond_record(values: Values) -> bool:
    sampling = values["on_device_sampling_config"]
    return (
        values["target"] != CPU.kind
        and sampling is not None
        and (sampling["do_sample"] or sampling["dynamic"])
        and sampling["global_topk"] > RECORDED_TOP_K[0].candidates
    )


SAMPLING_NOTES: Final = (
    Note(
        _is_beyond_record,
        "neuron_config.on_device_sampling_config.global_topk: neuronx-cc is on record with at most "
        f"{RECORDED_TOP_K[0].candidates} candidates; more of them may fail to compile, unless the compiler takes them "
        "by several calls (--neuron-top-k recorded)",
        doubtful={"on_device_sampling_config": {"dynamic": True}},
        plain={"on_device_sampling_config": {"dynamic": True, "global_topk": RECORDED_TOP_K[0].candidates}},
    ),
    Note(
        lambda v: v["logit_processors"] and v["on_device_sampling_config"] is None,
        "neuron_config.logit_processors: the runtime changes logits anyway because on_device_sampling_config is unset",
        doubtful={"logit_processors": True},
        plain={"logit_processors": True, "on_device_sampling_config": {}},
    ),
    Note(
        lambda v: v["output_logits"] and v["on_device_sampling_config"] is None,
        "neuron_config.output_logits: logits are the output anyway because on_device_sampling_config is unset",
        doubtful={"output_logits": True},
        plain={"output_logits": True, "on_device_sampling_config": {}},
    ),
)
