"""Rules on sampling in the executable."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.rules.rule import Note, Rule
from compiler_svc.config.tables.documents import SAMPLING

#: Rules on the values of an OnDeviceSamplingConfig.
ON_DEVICE_SAMPLING_RULES: Final = (
    Rule(
        ("top_k", "global_topk"),
        lambda v: v["global_topk"] == 0 or v["top_k"] <= v["global_topk"],
        "at most global_topk, which is {global_topk}",
        SAMPLING,
    ),
)

ON_DEVICE_SAMPLING_NOTES: Final = (
    Note(
        lambda v: not v["do_sample"] and not v["dynamic"] and (v["top_k"], v["top_p"], v["temperature"]) != (1, 1, 1),
        "neuron_config.on_device_sampling_config: top_k, top_p and temperature are ignored because neither do_sample "
        "nor dynamic is true: every token is the most likely one",
    ),
)

SAMPLING_NOTES: Final = (
    Note(
        lambda v: v["output_logits"] and v["on_device_sampling_config"] is None,
        "neuron_config.output_logits: logits are the output anyway because on_device_sampling_config is unset",
    ),
)
