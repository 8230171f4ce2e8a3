"""Options of Transformers NeuronX, each an attribute of NeuronConfig under another name.

What becomes of them is `compiler_svc.config.transformers_neuronx`; that their names are these, a test checks.
"""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Attribute, ConfigTable
from compiler_svc.config.domains import AscendingLengths, Choice, Domain, Flag, Integer, Number, Table
from compiler_svc.config.tables.documents import TRANSFORMERS_NEURONX_GUIDE as GUIDE

_DTYPES: Final = Choice(("f32", "f16", "bf16"))


def _option(name: str, domain: Domain, becomes: str, section: str = "") -> Attribute:
    return Attribute(name=name, domain=domain, derivation=becomes, section=f"{GUIDE}{section}")


#: The derivation says what an option becomes.
TRANSFORMERS_NEURONX: Final = (
    ConfigTable(
        "TransformersNeuronxConfig",
        (
            _option("batch_size", Integer(1), "batch_size"),
            _option("tp_degree", Integer(1), "tp_degree"),
            _option(
                "n_positions",
                AscendingLengths(),
                "seq_len and token_generation_buckets; one length stands for powers of two from 128 and itself",
                ", Bucketing",
            ),
            _option(
                "context_length_estimate",
                AscendingLengths(),
                "context_encoding_buckets; unset: half of each token generation bucket",
                ", Bucketing",
            ),
            _option("prompt_batch_size", Integer(1), "ctx_batch_size", ", Parallel input prompt context encoding"),
            _option("amp", _DTYPES, "torch_dtype"),
            _option(
                "group_query_attention",
                Choice(("shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads")),
                "what tp_degree and the model's KV heads make of it anyway",
                ", Grouped-query attention (GQA) support",
            ),
            _option(
                "on_device_generation",
                Table("TransformersNeuronxGenerationConfig"),
                "on_device_sampling_config",
                ", Top-K on-device sampling support",
            ),
            _option(
                "quant",
                Table("TransformersNeuronxQuantizationConfig"),
                "quantized",
                ", int8 weight storage support",
            ),
            _option("fuse_qkv", Flag(), "fused_qkv", ", QKV weight fusion"),
        ),
    ),
    ConfigTable(
        "TransformersNeuronxGenerationConfig",
        (
            _option("max_length", Integer(1), "seq_len", ", Top-K on-device sampling support"),
            _option("do_sample", Flag(), "do_sample", ", Top-K on-device sampling support"),
            _option("top_k", Integer(-1), "top_k", ", Top-K on-device sampling support"),
            _option("top_p", Number(0, 1, positive=True), "top_p"),
            _option("temperature", Number(0), "temperature"),
            _option("dynamic", Flag(), "dynamic"),
            _option("global_top_k", Integer(0), "global_topk"),
        ),
    ),
    ConfigTable(
        "TransformersNeuronxQuantizationConfig",
        (
            _option("quant_dtype", Choice(("s8",)), "quantization_dtype", ", int8 weight storage support"),
            _option("dequant_dtype", _DTYPES, "torch_dtype", ", int8 weight storage support"),
        ),
    ),
)
