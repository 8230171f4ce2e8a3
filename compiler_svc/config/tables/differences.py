"""Differences among the documents, and between them and NxD Inference's code, and what Kiln does.

The newest document wins: the API guide, then the feature guide. Kiln does not copy mistakes of the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compiler_svc.config.tables.documents import (
    API_GUIDE,
    API_REFERENCE,
    FEATURE_GUIDE,
    TRANSFORMERS_NEURONX_GUIDE,
)

NXDI_CODE: Final = "NxD Inference's code"


@dataclass(frozen=True)
class Difference:
    """One attribute, or matter, on which sources differ.

    Attributes:
        attribute: With its class, unless that is NeuronConfig.
        sayings: Source and what it says.
        kiln: What Kiln does.
    """

    attribute: str
    sayings: tuple[tuple[str, str], ...]
    kiln: str


DIFFERENCES: Final = (
    Difference(
        "max_context_length",
        ((NXDI_CODE, "checked against `max_length` only, so that it may exceed `seq_len`"),),
        "At most `seq_len`: a sequence begins with its prompt.",
    ),
    Difference(
        "max_new_tokens",
        (
            (API_GUIDE, "`seq_len - max_context_length`, or none if that is 0"),
            (NXDI_CODE, "becomes negative if `max_context_length` exceeds `seq_len`"),
        ),
        "As the guide says; negative values are refused.",
    ),
    Difference(
        "torch_dtype",
        (
            (API_GUIDE, "bfloat16 by default"),
            (NXDI_CODE, "the checkpoint's dtype if it is unset, bfloat16 without one"),
        ),
        "The checkpoint's dtype if it is unset: casting a float32 checkpoint to bfloat16 loses digits.",
    ),
    Difference(
        "rpl_reduce_dtype",
        ((API_GUIDE, "the dtype of the input"), (API_REFERENCE, "`torch_dtype`")),
        "The dtype of the input.",
    ),
    Difference(
        "save_sharded_checkpoint",
        ((API_GUIDE, "true"), (FEATURE_GUIDE, "not by default"), (NXDI_CODE, "false")),
        "True.",
    ),
    Difference(
        "logical_nc_config",
        (
            (API_GUIDE, "1 on trn1 and inf2, 2 on trn2; `NEURON_LOGICAL_NC_CONFIG` overrides it"),
            (API_REFERENCE, "named `logical_neuron_cores`, 1 by default, to be set to 2 on trn2"),
            (NXDI_CODE, "2 on trn3, too; the environment variable wins over the attribute"),
        ),
        "The guide's defaults, and 2 on trn3 (unverified). A service reads no variable of its environment here: the "
        "same request has to compile to the same bundle everywhere.",
    ),
    Difference(
        "weights_to_skip_layout_optimization",
        (
            (API_GUIDE, "a list of names"),
            (NXDI_CODE, "ignores what it is given up to SDK 2.27, and reads it from 2.28 on"),
        ),
        "Kept in the configuration; a hint, because no target loads Neuron's layouts yet.",
    ),
    Difference(
        "scratchpad_page_size",
        ((API_GUIDE, "no default stated"), (NXDI_CODE, "1024 from a `max_context_length` of 32768 on")),
        "Unset: the compiler's own.",
    ),
    Difference(
        "tp_degree",
        (
            (API_GUIDE, "trn1: 1, 2, 8, 16 and 32; attention heads must be divisible by it"),
            (TRANSFORMERS_NEURONX_GUIDE, "trn1 has no 16"),
            (NXDI_CODE, "pads query heads and replicates KV heads if they are not divisible"),
        ),
        "The API guide's degrees; heads are padded and replicated. trn3 has trn2's degrees (unverified).",
    ),
    Difference(
        "context_encoding_buckets, token_generation_buckets",
        (
            (API_GUIDE, "powers of two between 128 and the longest length"),
            (NXDI_CODE, "leaves out the last power of two if the longest length is nearer to it; sorts user lists"),
        ),
        "Generated as the code does; a user's list must ascend.",
    ),
    Difference(
        "n_active_tokens, n_positions",
        ((NXDI_CODE, "notes of its submodels, which limit neither buckets nor requests"),),
        "They limit generated buckets, prompts and sequences.",
    ),
    Difference(
        "prefix_buckets",
        (
            (FEATURE_GUIDE, "a list beside `context_encoding_buckets`; 0 is added"),
            (NXDI_CODE, "neither sorted nor checked; with prefill buckets and without prefix buckets it fails"),
        ),
        "Must ascend; if one of the two lists is unset, it is generated.",
    ),
    Difference(
        "choice of a bucket",
        (
            (API_GUIDE, "the smallest bucket that fits"),
            (NXDI_CODE, "a prompt as long as a bucket takes the next larger one"),
        ),
        "The smallest that fits, equal length included, for prompts; a decode step needs room for its own token.",
    ),
    Difference(
        "is_continuous_batching",
        ((API_GUIDE, "false by default"), (NXDI_CODE, "a full batch must come in at once without it")),
        "Requests always join and leave the running batch; false is a hint.",
    ),
    Difference(
        "max_batch_size",
        (
            (API_GUIDE, "the largest batch of continuous batching"),
            (NXDI_CODE, "`batch_size` by default, also if `tkg_batch_size`, which users are told to set, is larger"),
        ),
        "The larger one of `batch_size` and `tkg_batch_size` by default.",
    ),
    Difference(
        "rows of the KV cache",
        ((NXDI_CODE, "`kv_cache_batch_size` rows; idle rows of a step write into rows that have no sequence"),),
        "`max_batch_size` rows, and on cpu one more, into which idle rows write. Plans for Neuron count the code's.",
    ),
    Difference(
        "pa_num_blocks, pa_block_size",
        (
            (FEATURE_GUIDE, "at least `batch_size * max_model_len / pa_block_size` blocks; blocks of 32 recommended"),
            (NXDI_CODE, "`batch_size` blocks of `seq_len` tokens by default; no minimum is checked"),
        ),
        "The code's defaults, which are just enough; fewer blocks than the guide's minimum are refused.",
    ),
    Difference(
        "attn_kernel_enabled",
        (
            (API_GUIDE, "false by default, and yet on by itself if it pays"),
            (NXDI_CODE, "unset by default, which lets the code choose; only false turns it off"),
        ),
        "Unset by default: on if it pays.",
    ),
    Difference(
        "attn_block_cte_nki_kernel_enabled",
        ((NXDI_CODE, "true alone always fails, because it needs flags that are false by default"),),
        "No document names it: a hint, true or false.",
    ),
    Difference(
        "activation_quantization_type",
        ((NXDI_CODE, "setting it turns `fused_qkv` off by itself, and its own check is never reached"),),
        "No document names it: accepted unset only.",
    ),
    Difference(
        "quantize_clamp_bound and clamp limits",
        ((NXDI_CODE, "infinite by default, which is written as a number that JSON does not have"),),
        "Infinite limits are accepted, also as text, and mean no limit: null in what is written.",
    ),
    Difference(
        "quantized_mlp_kernel_enabled",
        ((NXDI_CODE, "quantizes the MLP even if `quantized` is false, as AWS's configurations have it"),),
        "Quantizes the MLP alone if `quantized` is false.",
    ),
    Difference(
        "n_positions and context_length_estimate of Transformers NeuronX",
        (
            (
                TRANSFORMERS_NEURONX_GUIDE,
                "prompts alone have lengths in its examples; sequences get the model's positions",
            ),
        ),
        "Sequences get twice the longest prompt if `n_positions` is unset, with a warning.",
    ),
    Difference(
        "quant of Transformers NeuronX",
        ((TRANSFORMERS_NEURONX_GUIDE, "weights are quantized when a checkpoint is loaded"),),
        "No `quantized_checkpoints_path` is asked for beside it.",
    ),
    Difference(
        "qk_layernorm",
        (
            (API_GUIDE, "enables normalization of queries and keys"),
            (NXDI_CODE, "adds norms that checkpoints have no weights for, unless the model has its own"),
        ),
        "A hint for models that normalize queries and keys; refused for others.",
    ),
    Difference(
        "attention_dtype",
        (
            (API_GUIDE, "the dtype of all operations in attention; by default that of its input"),
            (NXDI_CODE, "also that of the KV cache; by default `torch_dtype`; another one needs `as-declared`"),
        ),
        "As the code: attention and the KV cache. Weights keep the checkpoint's dtypes, as `as-declared` says.",
    ),
    Difference(
        "vocab_parallel",
        ((NXDI_CODE, "divides the embedding along the vocabulary, not along the hidden state"),),
        "The same. A tied head shares its part of the table.",
    ),
    Difference(
        "kv_cache_quant",
        (
            (API_GUIDE, "quantizes the KV cache to float8_e4m3fn"),
            (NXDI_CODE, "only adds compiler flags; `kv_quant_config` is the switch"),
        ),
        "The guide's meaning, for later on cpu.",
    ),
    Difference(
        "enable_fused_speculation",
        (
            (API_GUIDE, "true by default with `enable_eagle_speculation`"),
            (NXDI_CODE, "forced to true with it"),
            (FEATURE_GUIDE, "set to false in the configuration of an EAGLE draft, which has the flag, too"),
        ),
        "The guide's default, and false if `is_eagle_draft`.",
    ),
    Difference(
        "trace_tokengen_model",
        (
            (API_REFERENCE, "true by default"),
            (FEATURE_GUIDE, "to be set to false for speculation"),
            (API_GUIDE, "no longer there"),
            (NXDI_CODE, "derived, with a warning; its condition is true in nearly every case"),
        ),
        "Derived: true without speculation. A value is ignored with a warning.",
    ),
    Difference(
        "OnDeviceSamplingConfig.do_sample",
        ((API_GUIDE, "false"), (API_REFERENCE, "true"), (NXDI_CODE, "false")),
        "False.",
    ),
    Difference(
        "OnDeviceSamplingConfig.top_k",
        (
            (FEATURE_GUIDE, "`OnDeviceSamplingConfig(top_k=5)` is the example of multinomial sampling"),
            (NXDI_CODE, "greedy unless `do_sample` or `dynamic`"),
        ),
        "Greedy unless `do_sample` or `dynamic`, and a warning says so.",
    ),
    Difference(
        "OnDeviceSamplingConfig.top_k 0 and -1",
        ((NXDI_CODE, "masks every logit alike: any of the `global_topk` candidates, with equal probability"),),
        "No limit, as in transformers: all candidates keep their probabilities.",
    ),
    Difference(
        "OnDeviceSamplingConfig.top_p: the token that reaches it",
        ((NXDI_CODE, "drops the token with which the sum of probabilities exceeds `top_p`, unless it is the first"),),
        "Keeps it, as transformers does.",
    ),
    Difference(
        "OnDeviceSamplingConfig.temperature 0",
        ((NXDI_CODE, "greedy; a mistake if `top_k` is 0 or -1"),),
        "Greedy, whatever `top_k` is.",
    ),
    Difference(
        "OnDeviceSamplingConfig.top_p, temperature",
        ((FEATURE_GUIDE, "in an example"), (API_GUIDE, "not listed"), (NXDI_CODE, "1.0 each")),
        "Accepted, 1.0 each by default.",
    ),
    Difference(
        "LoraServingConfig.enable_dynamic_multi_lora",
        ((API_GUIDE, "`enable-dynamic-multi-lora`"), (NXDI_CODE, "`dynamic_multi_lora`")),
        "All three spellings.",
    ),
    Difference(
        "LoraServingConfig.max_cpu_loras, max_lora_rank",
        ((API_GUIDE, "no default stated, and no rank"), (NXDI_CODE, "100 and 16; raised to fit the adapters")),
        "100 and 16. Plans raise the second to the ranks of the adapters' files.",
    ),
    Difference(
        "MoENeuronConfig.glu_mlp",
        ((API_GUIDE, "false"), (API_REFERENCE, "false"), (NXDI_CODE, "true, which its model families insist on")),
        "True, against the documents: every family with experts has gated units. False is refused for a dense model "
        "whose MLP has gates, and otherwise a hint.",
    ),
    Difference(
        "MoENeuronConfig.normalize_top_k_affinities",
        (
            (API_GUIDE, "true by default"),
            (NXDI_CODE, "takes `disable_normalize_top_k_affinities` only and loses the value that it wrote itself"),
        ),
        "Both names; the value survives.",
    ),
    Difference(
        "MoENeuronConfig.router_config",
        ((API_GUIDE, "a dictionary or keyword arguments"), (NXDI_CODE, "an object is replaced by the defaults")),
        "What is given counts: an object, or the keywords `router_act_fn` and `router_dtype`.",
    ),
    Difference(
        "RouterConfig.act_fn",
        (
            (API_GUIDE, "the activations of transformers' `ACT2FN`"),
            (NXDI_CODE, "fails with any but softmax and sigmoid"),
        ),
        "Softmax and sigmoid.",
    ),
    Difference(
        "RoutedExpertsMLPOpsConfig.use_index_calc_kernel",
        ((API_GUIDE, "false"), (NXDI_CODE, "true")),
        "False.",
    ),
    Difference(
        "RoutedExpertsMLPOpsConfig.normalize_top_k_affinities",
        ((f"{API_GUIDE}, RoutedExpertsMLPOpsConfig", "false"), (f"{API_GUIDE}, MoENeuronConfig", "true")),
        "False in the class that says false.",
    ),
    Difference(
        "BlockwiseMatmulConfig",
        (
            (API_GUIDE, "most defaults are not stated"),
            (
                NXDI_CODE,
                "blocks of 512 tokens; flags off, except the two of `block_to_token_mapping`",
            ),
        ),
        "The code's defaults.",
    ),
    Difference(
        "unknown names",
        ((NXDI_CODE, "a warning in a log"),),
        "A mistake, with a suggestion; a note in a file that NxD Inference saved. Names that only its code of SDK 2.23 "
        "to 2.29 has are accepted at their defaults, and as hints if they choose kernels, layouts or flags.",
    ),
)
