"""Options of Transformers NeuronX: what each takes, and what becomes of it in NeuronConfig's words.

The names are those of its developer guide, and those that only its code has, of the classes of all families: GPT-2,
OPT, BLOOM, GPT-NeoX, GPT-J, Llama and Mistral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from compiler_svc.config.domains import (
    ANYTHING,
    FLAG,
    LENGTH,
    TEXTS,
    Domain,
    choice,
    integer,
    is_ascending,
    show,
    table,
)
from compiler_svc.config.tables.documents import TRANSFORMERS_NEURONX_GUIDE

GUIDE: Final = "Transformers NeuronX developer guide"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. One of `becomes`, `hint` and `serves` says what becomes of it.

    Attributes:
        section: The section of the guide that describes it, empty if none does; None if the guide does not name it.
        domain: What it takes; None: what the attribute that it becomes takes, which validation finds out later.
        becomes: The attribute of NeuronConfig; one of an object inside behind a dot.
        means: The attribute's value by the option's, if they differ; values that are not there change nothing.
        contradicted: What is accepted if `other` has given the attribute another value, `said` in its own words.
        hint: Why it is ignored, which the result of the compile or the plan says.
        serves: The values that are served, and `because` why no others are; None stands for unset.
        inside: The options of an object; `whole` is what the attribute is then, beside what they say.
        unset: What counts if it is unset in an object.
        note: What becomes of it, for the reference, if `becomes` does not say.
    """

    name: str
    section: str | None = None
    domain: Domain | None = None
    becomes: str = ""
    means: Mapping[Any, Any] | None = None
    contradicted: str = ""
    hint: str = ""
    serves: tuple[Any, ...] = ()
    because: str = ""
    inside: tuple[Option, ...] = ()
    whole: Any = True
    unset: Any = None
    is_required: bool = False
    note: str = ""

    @property
    def document(self) -> str:
        """Where the documents describe it; empty if they do not."""
        if self.section is None:
            return ""
        return f"{TRANSFORMERS_NEURONX_GUIDE}, {self.section}" if self.section else TRANSFORMERS_NEURONX_GUIDE

    @property
    def served(self) -> str:
        """The values that are served, in words."""
        values = ", ".join("unset" if one is None else show(one) for one in self.serves)
        return f"{values}: {self.because}" if self.because else f"{values}, all that this version serves"

    def find_word(self, value: object) -> Any:
        """The option's value that means a value of the attribute."""
        return next((word for word, meant in (self.means or {}).items() if meant == value), value)


SHARD_OVER_HEADS: Final = "shard-over-heads"
REPLICATED_HEADS: Final = "replicated-heads"

_BUCKETING: Final = "Bucketing"
_QUANTIZATION: Final = "int8 weight storage support"
_SAMPLING: Final = "Top-K on-device sampling support"
_KERNELS: Final = "the compiler chooses the target's kernels and layouts, which change no result"
_STEERS: Final = "it steers that library's compiles"
_EAGLE: Final = "neuron_config.enable_eagle_speculation and the draft model's configuration say so"
_ALL_LOGITS: Final = "executables give the logits of each row's last token"
_CODE_DTYPES: Final = choice(("float32", "bfloat16", "float16"))
_LAYOUTS: Final = choice(("HSB", "BSH", "SBH"))

#: One length, or several.
_LENGTHS: Final = Domain(
    f"{LENGTH.accepted}, or a list of them, each larger than the one before",
    lambda value: LENGTH.accepts(value) or (isinstance(value, list) and value != [] and is_ascending(value)),
    lambda value: value if isinstance(value, list) else [value],
)

_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
#: The dtype of computation, which all options that say one have in common.
_DTYPE: Final = Option(
    name="amp",
    section="",
    domain=choice(tuple(_DTYPES)),
    becomes="torch_dtype",
    means=_DTYPES,
    contradicted=f"{{other}}, which is {{said}} ({GUIDE}, int8 weight storage)",
)


def _sampling(name: str, attribute: str = "", **columns: Any) -> Option:
    return Option(name=name, becomes=f"on_device_sampling_config.{attribute or name}", **columns)


def _ignored(reason: str, **domains: Domain) -> tuple[Option, ...]:
    return tuple(Option(name=name, domain=domain, hint=reason) for name, domain in domains.items())


def _refused(name: str, domain: Domain, only: object, because: str) -> Option:
    return Option(name=name, domain=domain, serves=(only,), because=because)


_GENERATION: Final = (
    _sampling("do_sample", section=_SAMPLING),
    _sampling("top_k", section=_SAMPLING),
    _sampling("top_p", section=""),
    _sampling("temperature", section=""),
    _sampling("dynamic", section=""),
    _sampling("global_top_k", "global_topk", section=""),
    Option(
        name="max_length",
        section=_SAMPLING,
        becomes="seq_len",
        contradicted="the longest of n_positions, which is {said}",
    ),
    # AWS's guide for migrating to NxD Inference lists what the code has beside, also of `quant`.
    _sampling("deterministic", domain=FLAG),
    _refused("top_p_min_tokens", integer(1), 1, "top_p keeps one candidate at least, as in transformers"),
    _refused("eos_token_id", ANYTHING, None, "the checkpoint says which tokens end a sequence, or a request does"),
    *_ignored(
        "with `dynamic`, each request has values of its own; otherwise, all have those of the configuration",
        per_batch_line=FLAG,
    ),
)

_QUANT: Final = (
    Option(
        name="quant_dtype",
        section=_QUANTIZATION,
        domain=replace(choice(("s8",)), accepted=f"'s8' ({GUIDE}, int8 weight storage)"),
        becomes="quantization_dtype",
        means={"s8": "int8"},
        is_required=True,
    ),
    replace(_DTYPE, name="dequant_dtype", section=_QUANTIZATION),
    Option(
        name="quantize_method",
        domain=choice(("vector_dynamic",)),
        becomes="quantization_type",
        # A scale for each output.
        means={"vector_dynamic": "per_channel_symmetric"},
    ),
    Option(name="quantize_attn", domain=FLAG, becomes="modules_to_not_convert", means={False: ["self_attn"]}),
    _refused("no_quantize_list", TEXTS, [], "neuron_config.modules_to_not_convert names the modules that stay whole"),
)

#: The guide does not name the object, which turns the quantization on.
_KV_CACHE_QUANT: Final = (
    replace(
        _refused(
            "quant_dtype",
            choice(("s8", "f16", "bf16", "f8e4m3fn")),
            "f8e4m3fn",
            "the KV cache is quantized to float8_e4m3fn; the library takes 's8' if it is unset",
        ),
        unset="s8",
    ),
    _refused("quantize_method", choice(("direct_cast",)), "direct_cast", "the library has no other"),
    replace(_DTYPE, name="dequant_dtype", section=None),
)

#: In the order in which messages list them.
OPTIONS: Final = (
    Option(name="batch_size", section="", becomes="batch_size"),
    Option(name="tp_degree", section="", becomes="tp_degree"),
    Option(name="prompt_batch_size", section="Parallel input prompt context encoding", becomes="ctx_batch_size"),
    Option(name="fuse_qkv", section="QKV weight fusion", becomes="fused_qkv"),
    Option(
        name="n_positions",
        section=_BUCKETING,
        domain=_LENGTHS,
        becomes="token_generation_buckets",
        note="seq_len and token_generation_buckets; one length stands for powers of two from 128 and itself; "
        "unset: twice the longest of context_length_estimate, and not the model's positions",
    ),
    Option(
        name="context_length_estimate",
        section=_BUCKETING,
        domain=_LENGTHS,
        becomes="context_encoding_buckets",
        note="context_encoding_buckets; unset: half of each token generation bucket",
    ),
    _DTYPE,
    Option(
        name="group_query_attention",
        section="Grouped-query attention (GQA) support",
        domain=choice((SHARD_OVER_HEADS, "shard-over-batch", REPLICATED_HEADS, "all-gather-heads")),
        serves=(SHARD_OVER_HEADS, REPLICATED_HEADS),
        note="what tp_degree and the model's KV heads make of it anyway",
    ),
    Option(
        name="on_device_generation",
        section=_SAMPLING,
        domain=table("TransformersNeuronxGenerationConfig"),
        becomes="on_device_sampling_config",
        inside=_GENERATION,
        whole={},
    ),
    Option(
        name="quant",
        section=_QUANTIZATION,
        domain=table("TransformersNeuronxQuantizationConfig"),
        becomes="quantized",
        inside=_QUANT,
        note="quantized, when the checkpoint is loaded: no quantized_checkpoints_path is asked for",
    ),
    Option(name="kv_cache_quant", domain=table(""), becomes="kv_cache_quant", inside=_KV_CACHE_QUANT),
    Option(name="all_reduce_dtype", domain=_CODE_DTYPES, becomes="rpl_reduce_dtype"),
    Option(name="padding_side", domain=choice(("left", "right")), becomes="padding_side"),
    *_ignored(
        _KERNELS,
        attention_layout=_LAYOUTS,
        collectives_layout=_LAYOUTS,
        cache_layout=choice(("SBH", "BSH", "HSB")),
        attn_output_transposed=FLAG,
        mlp_out_weight_transpose=FLAG,
        weight_tiling=FLAG,
        qkv_tiling=FLAG,
        fused_rmsnorm_qkv=FLAG,
        fused_rmsnorm_mlp=FLAG,
        on_device_embedding=FLAG,
        use_2d_cache_ids=FLAG,
        sequence_parallel_norm=FLAG,
        sequence_parallel_norm_threshold=integer(0),
        shard_over_sequence=FLAG,
        duplicate_q_weight_sos=FLAG,
        fuse_mlp=FLAG,
        lhs_aligned=FLAG,
        mlp_in_weight_tiling_permute_order=ANYTHING,
        mlp_out_weight_tiling_permute_order=ANYTHING,
    ),
    *_ignored(_STEERS, unroll=integer(0), context_unroll=integer(0), compilation_worker_count=integer(1), on_cpu=FLAG),
    _refused("cast_logits_dtype", _CODE_DTYPES, "float32", "executables give float32 logits"),
    _refused(
        "bf16_rms_norm",
        FLAG,
        False,
        "norms compute in float32, and round as the model's class of transformers does",
    ),
    _refused("output_all_logits", FLAG, False, _ALL_LOGITS),
    _refused("return_all_logits", FLAG, False, _ALL_LOGITS),
    _refused("log_softmax_scores", FLAG, False, "requests ask for log-probabilities: `output.logprobs` of Generate"),
    _refused(
        "continuous_batching",
        ANYTHING,
        None,
        "neuron_config.max_batch_size says how many sequences share the cache",
    ),
    _refused("is_eagle_target", FLAG, False, _EAGLE),
    _refused("is_eagle_draft", FLAG, False, _EAGLE),
    _refused(
        "has_pre_attention_norm",
        FLAG,
        True,
        "the model's class of transformers says which norms a layer has",
    ),
    _refused("sparse_attn", ANYTHING, None, "attention is to every position, or a model's window"),
)
