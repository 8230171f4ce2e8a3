"""Options of Transformers NeuronX, each an attribute of NeuronConfig under another name.

What becomes of them is `compiler_svc.config.transformers_neuronx`; that their names are these, a test checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler_svc.config.domains import AscendingLengths, Choice, Domain, Flag, Integer, Number, Table
from compiler_svc.config.tables.documents import TRANSFORMERS_NEURONX_GUIDE as GUIDE

_DTYPES: Final = Choice(("f32", "f16", "bf16"))


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        becomes: What it becomes in NeuronConfig.
        section: The section of the guide that describes it, empty if the guide has none.
    """

    name: str
    domain: Domain
    becomes: str
    section: str = ""

    @property
    def document(self) -> str:
        """Where the documents describe the option."""
        return f"{GUIDE}, {self.section}" if self.section else GUIDE


#: By the name of the class.
TRANSFORMERS_NEURONX: Final[Mapping[str, tuple[Option, ...]]] = {
    "TransformersNeuronxConfig": (
        Option("batch_size", Integer(1), "batch_size"),
        Option("tp_degree", Integer(1), "tp_degree"),
        Option(
            "n_positions",
            AscendingLengths(),
            "seq_len and token_generation_buckets; one length stands for powers of two from 128 and itself",
            "Bucketing",
        ),
        Option(
            "context_length_estimate",
            AscendingLengths(),
            "context_encoding_buckets; unset: half of each token generation bucket",
            "Bucketing",
        ),
        Option("prompt_batch_size", Integer(1), "ctx_batch_size", "Parallel input prompt context encoding"),
        Option("amp", _DTYPES, "torch_dtype"),
        Option(
            "group_query_attention",
            Choice(("shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads")),
            "what tp_degree and the model's KV heads make of it anyway",
            "Grouped-query attention (GQA) support",
        ),
        Option(
            "on_device_generation",
            Table("TransformersNeuronxGenerationConfig"),
            "on_device_sampling_config",
            "Top-K on-device sampling support",
        ),
        Option(
            "quant",
            Table("TransformersNeuronxQuantizationConfig"),
            "quantized",
            "int8 weight storage support",
        ),
        Option("fuse_qkv", Flag(), "fused_qkv", "QKV weight fusion"),
    ),
    "TransformersNeuronxGenerationConfig": (
        Option("max_length", Integer(1), "seq_len", "Top-K on-device sampling support"),
        Option("do_sample", Flag(), "do_sample", "Top-K on-device sampling support"),
        Option("top_k", Integer(-1), "top_k", "Top-K on-device sampling support"),
        Option("top_p", Number(0, 1, positive=True), "top_p"),
        Option("temperature", Number(0), "temperature"),
        Option("dynamic", Flag(), "dynamic"),
        Option("global_top_k", Integer(0), "global_topk"),
    ),
    "TransformersNeuronxQuantizationConfig": (
        Option("quant_dtype", Choice(("s8",)), "quantization_dtype", "int8 weight storage support"),
        Option("dequant_dtype", _DTYPES, "torch_dtype", "int8 weight storage support"),
    ),
}
