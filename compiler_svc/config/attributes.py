"""The table of attributes: name, domain, default, and what becomes of the value.

An attribute is served; or a hint, which this version accepts, ignores and says so; or restricted to the values that
this version serves, and refused by name at others. Defaults are those of the newest API reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.config.domains import Anything, AscendingLengths, Choice, Domain, Flag, Integer, Number, Table

#: Computes a default from the attributes that stand before in the table.
Derivation = Callable[[Mapping[str, Any]], Any]

DTYPES: Final = Choice(("float32", "bfloat16", "float16"), prefix="torch.")


@dataclass(frozen=True)
class Attribute:
    """One row of the table.

    Attributes:
        default: Value, or its derivation; None stands for an attribute that stays unset, or is set by the resolver.
        served: Values that this version serves; empty for all of the domain.
        hint: Why a value other than the default is ignored; empty for an attribute that counts.
    """

    name: str
    domain: Domain
    default: Any = None
    served: tuple[Any, ...] = ()
    hint: str = ""

    def default_from(self, values: Mapping[str, Any]) -> Any:
        """The default, given the values of the rows before."""
        return self.default(values) if callable(self.default) else self.default

    def serves(self, value: object) -> bool:
        """Whether this version serves `value`; `False` and `0` are different values."""
        return not self.served or any(value == one and type(value) is type(one) for one in self.served)


def _same_as(name: str) -> Derivation:
    return lambda values: values[name]


def _new_tokens_left(values: Mapping[str, Any]) -> int | None:
    left: int = values["seq_len"] - values["max_context_length"]
    return left if left > 0 else None


_BY_SUBMODEL: Final = "the compiler sets it for each submodel"
_NEURON_ONLY: Final = "it concerns NeuronCores only"

#: Attributes of NeuronConfig, in an order that lets defaults be derived.
NEURON_CONFIG: Final = (
    Attribute("batch_size", Integer(1), 1),
    Attribute("padding_side", Choice(("right", "left")), "right", served=("right",)),
    Attribute("seq_len", Integer(1), 128),
    Attribute("max_context_length", Integer(1), _same_as("seq_len")),
    Attribute("max_new_tokens", Integer(1), _new_tokens_left),
    Attribute("max_length", Integer(1), _same_as("seq_len")),
    Attribute("n_active_tokens", Integer(1), _same_as("seq_len"), hint=_BY_SUBMODEL),
    Attribute("n_positions", Integer(1), _same_as("seq_len"), hint=_BY_SUBMODEL),
    Attribute("torch_dtype", DTYPES, served=("float32", "bfloat16")),
    Attribute("rpl_reduce_dtype", DTYPES, served=("float32", "bfloat16")),
    Attribute("cast_type", Choice(("config", "as-declared")), "config", served=("config",)),
    Attribute("async_mode", Flag(), False, served=(False,)),
    Attribute("save_sharded_checkpoint", Flag(), True),
    Attribute("skip_sharding", Flag(), False),
    Attribute("logical_nc_config", Integer(1, 2), 1, hint=_NEURON_ONLY),
    Attribute("skip_warmup", Flag(), False, hint="the runtime runs every executable once after a load"),
    # 64 is the largest degree that the documents describe; collectives serve more.
    Attribute("tp_degree", Integer(1, 64), 1),
    Attribute("fused_qkv", Flag(), False, served=(False,)),
    Attribute("on_device_sampling_config", Table()),
    Attribute("output_logits", Flag(), False),
    Attribute("enable_bucketing", Flag(), False),
    Attribute("context_encoding_buckets", AscendingLengths(), ()),
    Attribute("token_generation_buckets", AscendingLengths(), ()),
    Attribute("is_continuous_batching", Flag(), False),
    Attribute("max_batch_size", Integer(1), _same_as("batch_size")),
    Attribute("ctx_batch_size", Integer(1), _same_as("batch_size")),
    Attribute("tkg_batch_size", Integer(1), _same_as("batch_size")),
)

ON_DEVICE_SAMPLING_CONFIG: Final = (
    Attribute("do_sample", Flag(), False),
    Attribute("top_k", Integer(-1), 1),
    Attribute("top_p", Number(0, 1, positive=True), 1.0),
    Attribute("temperature", Number(0), 1.0),
    Attribute("dynamic", Flag(), False),
    Attribute("deterministic", Flag(), False),
    Attribute("global_topk", Integer(0), 256),
)


def _hint(name: str, domain: Domain, default: object = None) -> Attribute:
    return Attribute(name, domain, default, hint=_NEURON_ONLY)


def _unserved(**defaults: object) -> tuple[Attribute, ...]:
    return tuple(Attribute(name, Anything(), value, served=(value,)) for name, value in defaults.items())


#: Attributes that NxD Inference has and the message does not: judged, never recorded.
FOREIGN_TO_NEURON_CONFIG: Final = (
    _hint("sequence_parallel_enabled", Flag(), False),
    _hint("attn_kernel_enabled", Flag(), False),
    _hint("qkv_kernel_enabled", Flag(), False),
    _hint("mlp_kernel_enabled", Flag(), False),
    _hint("cc_pipeline_tiling_factor", Integer(1), 2),
    _hint("scratchpad_page_size", Integer(1)),
    _hint("weights_to_skip_layout_optimization", Anything()),
    _hint("logical_neuron_cores", Integer(1, 2), 1),
    *_unserved(
        # Attention and KV cache
        flash_decoding_enabled=False,
        qk_layernorm=False,
        attention_dtype=None,
        kv_cache_quant=False,
        kv_quant_config=None,
        kv_cache_padding_size=0,
        is_block_kv_layout=False,
        is_prefix_caching=False,
        prefix_buckets=None,
        chunked_prefill_config=None,
        token_generation_batches=None,
        bucket_n_active_tokens=False,
        allow_input_truncation=False,
        # Quantization
        quantized=False,
        quantized_checkpoints_path=None,
        quantization_dtype="int8",
        quantization_type="per_tensor_symmetric",
        activation_quantization_type=None,
        modules_to_not_convert=None,
        draft_model_modules_to_not_convert=None,
        quantized_mlp_kernel_enabled=False,
        rmsnorm_quantize_kernel_enabled=False,
        # Speculation
        speculation_length=0,
        enable_fused_speculation=False,
        enable_eagle_speculation=False,
        enable_eagle_draft_input_norm=False,
        is_eagle3=False,
        is_eagle_draft=False,
        is_medusa=False,
        medusa_speculation_length=0,
        num_medusa_heads=0,
        medusa_tree=None,
        # Adapters
        lora_config=None,
        # Distribution
        cp_degree=1,
        mlp_cp_degree=1,
        attention_dp_degree=1,
        pp_degree=1,
        ep_degree=1,
        world_size=1,
        start_rank_id=0,
        vocab_parallel=False,
    ),
)

FOREIGN_TO_ON_DEVICE_SAMPLING_CONFIG: Final = (_hint("top_k_kernel_enabled", Flag(), False),)

FOREIGN_TO_INFERENCE_CONFIG: Final = _unserved(fused_spec_config=None)
