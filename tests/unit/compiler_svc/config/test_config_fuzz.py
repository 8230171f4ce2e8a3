"""Every configuration resolves or is refused with a named error."""

import json
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st

from bundle.digest import canonical_json
from compiler_svc.config import TARGET_KINDS, InferenceConfig, TargetKind, parse_document, resolve_config
from compiler_svc.errors import ConfigInvalid, FeatureNotServed
from tests.fuzzing import broken, fuzz, mutated
from tests.unit.compiler_svc.config.interchange.documents import draw_document
from tests.unit.compiler_svc.config.resolving import resolve

CONFIG: Final = {
    "neuron_config": {
        "seq_len": 256,
        "max_context_length": 128,
        "batch_size": 4,
        "max_batch_size": 4,
        "ctx_batch_size": 1,
        "tkg_batch_size": 4,
        "tp_degree": 2,
        "torch_dtype": "bfloat16",
        "padding_side": "right",
        "enable_bucketing": True,
        "context_encoding_buckets": [64, 128],
        "token_generation_buckets": [128, 256],
        "max_new_tokens": 64,
        "output_logits": False,
        "save_sharded_checkpoint": True,
        "on_device_sampling_config": {"dynamic": True, "do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 1.0},
    }
}
#: Every class inside of another one, for a target that plans with all of them.
NESTED: Final = {
    "neuron_config": {
        "tp_degree": 2,
        "seq_len": 256,
        "speculation_length": 4,
        "enable_fused_speculation": True,
        "on_device_sampling_config": {"global_topk": 64},
        "lora_config": {"max_loras": 2, "lora_ckpt_paths": {"a": "/a"}},
        "router_config": {"act_fn": "sigmoid", "dtype": "float32"},
        "routed_experts_mlp_ops_config": {"num_experts": 8, "top_k": 2, "gate_clamp_upper_limit": 7.0},
        "blockwise_matmul_config": {"block_size": 256},
        "moe_fused_tkg_config": {"moe_fused_kernel_enabled": True},
        "hybrid_sharding_config": {"moe_cte_tp_degree": 2, "moe_tkg_ep_degree": 2},
        "logical_neuron_cores": 1,
    },
    "fused_spec_config": {
        "worker_cls": {"__module__": "a", "__name__": "B"},
        "draft_model_path": "draft",
        "draft_config": {"neuron_config": {"tp_degree": 2, "seq_len": 256}, "rope_theta": 1e4},
    },
    "attribute_map": {"num_heads": "num_attention_heads"},
    "hidden_size": 64,
}


@fuzz()
@given(
    data=mutated(CONFIG) | broken(json.dumps(CONFIG).encode()) | st.binary() | st.text().map(str.encode),
    checkpoint_dtype=st.sampled_from([None, "float32", "bfloat16", "?"]),
)
def test_configurations(data: bytes, checkpoint_dtype: str | None) -> None:
    assert_named_or_resolved(data.decode(errors="replace"), checkpoint_dtype, "cpu")


@fuzz(500)
@given(data=mutated(NESTED), target=st.sampled_from(TARGET_KINDS))
def test_nested_configurations(data: bytes, target: TargetKind) -> None:
    assert_named_or_resolved(data.decode(errors="replace"), None, target)


@fuzz(300)
@given(document=draw_document(), target=st.sampled_from(TARGET_KINDS))
def test_every_table(document: dict[str, Any], target: TargetKind) -> None:
    assert_validated(document, None, target)


def assert_named_or_resolved(text: str, checkpoint_dtype: str | None, target: TargetKind) -> None:
    try:
        document = parse_document(text)
    except ConfigInvalid:
        return
    assert_validated(document, checkpoint_dtype, target)


def assert_validated(document: dict[str, Any], checkpoint_dtype: str | None, target: TargetKind) -> None:
    try:
        resolution = resolve_config(document, checkpoint_dtype=checkpoint_dtype, target=target)
    except (ConfigInvalid, FeatureNotServed) as error:
        # protobuf can carry the answer to any document.
        violations = error.violations
    else:
        assert isinstance(resolution.config, InferenceConfig)
        canonical_json(resolution.config.to_json())
        # A resolved configuration states every value, and resolves to itself.
        again = resolve_config(resolution.config.to_json(), checkpoint_dtype=checkpoint_dtype, target=target)
        assert again.config == resolution.config
        return
    assert violations
    assert all(str(violation).isascii() for violation in violations)


@given(
    st.dictionaries(
        st.sampled_from(
            ["seq_len", "max_context_length", "max_length", "max_new_tokens", "batch_size", "tkg_batch_size"]
        ),
        st.integers(1, 600),
    ),
    st.booleans(),
)
def test_what_resolves_is_consistent(lengths: dict[str, int], enable_bucketing: bool) -> None:
    try:
        config = resolve(**lengths, enable_bucketing=enable_bucketing).config.neuron_config
    except ConfigInvalid:
        return
    assert config.max_context_length <= config.seq_len <= config.max_length
    assert config.context_encoding_buckets[-1] == config.max_context_length
    assert config.token_generation_buckets[-1] == config.max_length
    assert config.max_batch_size >= max(config.tkg_batch_size, config.ctx_batch_size)
    assert config.max_new_tokens is None or 1 <= config.max_new_tokens <= config.seq_len
