"""Options of Transformers NeuronX, each an attribute of NeuronConfig under another name.

What becomes of them is `compiler_svc.config.transformers_neuronx`; that their names are these, a test checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.config.domains import (
    Anything,
    AscendingLengths,
    Choice,
    Domain,
    Flag,
    Integer,
    Number,
    Table,
    TextList,
)
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


@dataclass(frozen=True, kw_only=True)
class CodeOption:
    """An option that the library's code has and its guide does not name.

    One of `becomes`, `hint` and `refused` says what becomes of it.

    Attributes:
        becomes: The attribute of NeuronConfig, or of the object inside it, that it becomes.
        means: The attribute's value by the option's, if they differ; values that are not there change nothing.
        hint: Why it is ignored, which the result of the compile or the plan says.
        refused: Why no other value than `only` is served.
        only: The value that is served.
    """

    name: str
    domain: Domain
    becomes: str = ""
    means: Mapping[Any, Any] | None = None
    hint: str = ""
    refused: str = ""
    only: Any = False


_KERNELS: Final = "the compiler chooses the target's kernels and layouts, which change no result"
_STEERS: Final = "it steers that library's compiles"
_CODE_DTYPES: Final = Choice(("float32", "bfloat16", "float16"))
_EAGLE: Final = "neuron_config.enable_eagle_speculation and the draft model's configuration say so"


def _ignored(reason: str, **domains: Domain) -> tuple[CodeOption, ...]:
    return tuple(CodeOption(name=name, domain=domain, hint=reason) for name, domain in domains.items())


#: Of the classes of all families: GPT-2, OPT, BLOOM, GPT-NeoX, GPT-J, Llama and Mistral.
CODE_OPTIONS: Final = (
    CodeOption(name="all_reduce_dtype", domain=_CODE_DTYPES, becomes="rpl_reduce_dtype"),
    CodeOption(name="padding_side", domain=Choice(("left", "right")), becomes="padding_side"),
    *_ignored(
        _KERNELS,
        attention_layout=Choice(("HSB", "BSH", "SBH")),
        collectives_layout=Choice(("HSB", "BSH", "SBH")),
        cache_layout=Choice(("SBH", "BSH", "HSB")),
        attn_output_transposed=Flag(),
        mlp_out_weight_transpose=Flag(),
        weight_tiling=Flag(),
        qkv_tiling=Flag(),
        fused_rmsnorm_qkv=Flag(),
        fused_rmsnorm_mlp=Flag(),
        on_device_embedding=Flag(),
        use_2d_cache_ids=Flag(),
        sequence_parallel_norm=Flag(),
        sequence_parallel_norm_threshold=Integer(0),
        shard_over_sequence=Flag(),
        duplicate_q_weight_sos=Flag(),
        fuse_mlp=Flag(),
        lhs_aligned=Flag(),
        mlp_in_weight_tiling_permute_order=Anything(),
        mlp_out_weight_tiling_permute_order=Anything(),
    ),
    *_ignored(
        _STEERS, unroll=Integer(0), context_unroll=Integer(0), compilation_worker_count=Integer(1), on_cpu=Flag()
    ),
    CodeOption(
        name="cast_logits_dtype", domain=_CODE_DTYPES, refused="executables give float32 logits", only="float32"
    ),
    CodeOption(
        name="bf16_rms_norm",
        domain=Flag(),
        refused="norms compute in float32, and round as the model's class of transformers does",
    ),
    *(
        CodeOption(name=name, domain=Flag(), refused="executables give the logits of each row's last token")
        for name in ("output_all_logits", "return_all_logits")
    ),
    CodeOption(
        name="log_softmax_scores",
        domain=Flag(),
        refused="requests ask for log-probabilities: `output.logprobs` of Generate",
    ),
    CodeOption(
        name="continuous_batching",
        domain=Anything(),
        refused="neuron_config.max_batch_size says how many sequences share the cache",
        only=None,
    ),
    CodeOption(name="is_eagle_target", domain=Flag(), refused=_EAGLE),
    CodeOption(name="is_eagle_draft", domain=Flag(), refused=_EAGLE),
    CodeOption(
        name="has_pre_attention_norm",
        domain=Flag(),
        refused="the model's class of transformers says which norms a layer has",
        only=True,
    ),
    CodeOption(
        name="sparse_attn", domain=Anything(), refused="attention is to every position, or a model's window", only=None
    ),
)

#: By an option that is an object, those inside it, as AWS's guide for migrating to NxD Inference lists them. The
#: developer guide does not name `kv_cache_quant`, whose object turns the quantization on.
CODE_SUBOPTIONS: Final[Mapping[str, tuple[CodeOption, ...]]] = {
    "on_device_generation": (
        CodeOption(name="deterministic", domain=Flag(), becomes="deterministic"),
        CodeOption(
            name="top_p_min_tokens",
            domain=Integer(1),
            refused="top_p keeps one candidate at least, as in transformers",
            only=1,
        ),
        CodeOption(
            name="eos_token_id",
            domain=Anything(),
            refused="the checkpoint says which tokens end a sequence, or a request does",
            only=None,
        ),
        CodeOption(
            name="per_batch_line",
            domain=Flag(),
            hint="with `dynamic`, each request has values of its own; otherwise, all have those of the configuration",
        ),
    ),
    "quant": (
        CodeOption(
            name="quantize_method",
            domain=Choice(("vector_dynamic",)),
            becomes="quantization_type",
            # A scale for each output.
            means={"vector_dynamic": "per_channel_symmetric"},
        ),
        CodeOption(
            name="quantize_attn",
            domain=Flag(),
            becomes="modules_to_not_convert",
            means={False: ["self_attn"]},
        ),
        CodeOption(
            name="no_quantize_list",
            domain=TextList(),
            refused="neuron_config.modules_to_not_convert names the modules that stay whole",
            only=[],
        ),
    ),
    "kv_cache_quant": (
        CodeOption(
            name="quant_dtype",
            domain=Choice(("s8", "f16", "bf16", "f8e4m3fn")),
            refused="the KV cache is quantized to float8_e4m3fn; the library takes 's8' if it is unset",
            only="f8e4m3fn",
        ),
        CodeOption(
            name="quantize_method",
            domain=Choice(("direct_cast",)),
            refused="the library has no other",
            only="direct_cast",
        ),
        CodeOption(name="dequant_dtype", domain=_DTYPES, becomes="torch_dtype"),
    ),
}
