"""How engines keep a model: the dtype of activations, the format of weights, and that of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench.peers import ADAPTER_RANK, LORA, PEERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to keep a model.

    Attributes:
        title: What pages call it.
        config: The attributes of `neuron_config` that ask Kiln for it.
        dtype: Of activations; None: the workload's.
        peers: The peers that have something comparable, and their own word for it.
        scales_cache: Whether the checkpoint must have scales of keys and values.
        num_adapters: Adapters that the rows of a step have in turns.
    """

    title: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    scales_cache: bool = False
    num_adapters: int = 0


def _quantize(dtype: str) -> dict[str, Any]:
    return {"quantized": True, "quantization_dtype": dtype, "quantization_type": "per_channel_symmetric"}


#: Weights of the dtype of activations, which every engine has.
PLAIN: Final = "plain"
_NUM_ADAPTERS: Final = 4
_ROOM: Final = {"lora_config": {"max_loras": _NUM_ADAPTERS, "max_lora_rank": ADAPTER_RANK}}
#: By name. Comparable is what takes about as many bits: of int8, 8 and a scale for each output, or 8.5 in blocks of 32
#: (Q8_0); of int4, 4.5 in groups of 128, 4.25 (OpenVINO's), or 4.9 in blocks of 32 and with some layers of 6 (Q4_K_M).
FORMATS: Final[Mapping[str, Format]] = {
    PLAIN: Format(title="weights as activations", peers=dict.fromkeys(PEERS, "")),
    "bfloat16": Format(title="bfloat16", dtype="bfloat16"),
    "float16": Format(title="float16", dtype="float16"),
    "int8": Format(
        title="int8 weights, a scale for each output",
        config=_quantize("int8"),
        peers={"openvino": "int8", "llama_cpp": "Q8_0"},
    ),
    "int4": Format(
        title="int4 weights in groups of 128",
        config=_quantize("int4"),
        peers={"openvino": "int4", "llama_cpp": "Q4_K_M"},
    ),
    # As fine as llama.cpp's blocks, but with 6 bits for a weight.
    "int4-by-32": Format(title="int4 weights in groups of 32", config=_quantize("int4_by_32")),
    "int8-cache": Format(
        title="int8 keys and values, a scale for each layer",
        config={"kv_quant_config": {"direct_cast": False, "quant_dtype": "int8"}},
        scales_cache=True,
    ),
    "adapters": Format(
        title=f"{_NUM_ADAPTERS} adapters of rank {ADAPTER_RANK} in turns",
        config=_ROOM,
        peers={"llama_cpp": LORA, "vllm": LORA},
        num_adapters=_NUM_ADAPTERS,
    ),
    "adapters-idle": Format(title=f"room for {_NUM_ADAPTERS} adapters that no row has", config=_ROOM),
    "processors": Format(title="executables that change logits", config={"logit_processors": True}),
    "host": Format(title="tokens picked by the host", config={"on_device_sampling_config": None}),
    "prompt-logprobs": Format(
        title="executables that tell log probabilities of prompts", config={"output_prompt_logprobs": True}
    ),
}
