"""Every attribute that is called planned on Neuron targets changes a plan."""

from __future__ import annotations

from typing import Any, Final

import pytest

from compiler_svc.config.tables import TABLES
from compiler_svc.planning.planner import Planner
from tests.unit.compiler_svc.planning.planning import plan

LENGTHS: Final = {"seq_len": 1024}
LISTED: Final = LENGTHS | {"enable_bucketing": True}
SAMPLED: Final = LENGTHS | {"on_device_sampling_config": {}}
BLOCKS: Final = LENGTHS | {"is_block_kv_layout": True, "pa_block_size": 32, "pa_num_blocks": 32}
PREFIXES: Final = BLOCKS | {"is_prefix_caching": True, "enable_bucketing": True}
QUANTIZED: Final = {"quantized": True, "quantized_checkpoints_path": "q"}
MEDUSA: Final = SAMPLED | {
    "is_medusa": True,
    "num_medusa_heads": 4,
    "medusa_speculation_length": 64,
    "medusa_tree": [[0], [0, 0]],
}

#: Attributes of NeuronConfig: what stands beside them, and two values with different plans. None leaves one out.
CASES: Final[dict[str, tuple[dict[str, Any], Any, Any]]] = {
    "batch_size": (LENGTHS, 1, 2),
    "seq_len": ({}, 128, 256),
    "max_context_length": (LENGTHS, 1024, 512),
    "max_length": (LENGTHS, 1024, 2048),
    "n_active_tokens": (LENGTHS, 1024, 512),
    "n_positions": (LENGTHS, 1024, 512),
    "torch_dtype": ({}, "bfloat16", "float32"),
    "cast_type": ({"torch_dtype": "float32"}, "config", "as-declared"),
    "logical_nc_config": ({}, 2, 1),
    "vocab_parallel": ({"tp_degree": 2}, False, True),
    "attention_dtype": ({"cast_type": "as-declared", "torch_dtype": "bfloat16"}, None, "float32"),
    "scratchpad_page_size": ({}, None, 512),
    "output_prompt_logprobs": (LENGTHS, False, True),
    "tp_degree": ({}, 1, 2),
    "enable_bucketing": (LENGTHS, False, True),
    "context_encoding_buckets": (LISTED, None, [512, 1024]),
    "token_generation_buckets": (LISTED, None, [512, 1024]),
    "prefix_buckets": (PREFIXES, None, [512]),
    "token_generation_batches": (LISTED | {"batch_size": 4}, None, [2]),
    "ctx_batch_size": (LENGTHS | {"batch_size": 4}, 4, 1),
    "tkg_batch_size": (LENGTHS | {"ctx_batch_size": 1}, 1, 4),
    "flash_decoding_enabled": (LENGTHS | {"tp_degree": 16}, False, True),
    "sequence_parallel_enabled": (LENGTHS | {"tp_degree": 2}, False, True),
    "kv_cache_quant": ({}, False, True),
    "is_block_kv_layout": (LENGTHS | {"pa_num_blocks": 32, "pa_block_size": 32}, False, True),
    "pa_num_blocks": (BLOCKS, 32, 64),
    "pa_block_size": (BLOCKS, 32, 64),
    "is_prefix_caching": (BLOCKS, False, True),
    "attn_kernel_enabled": (LENGTHS, None, False),
    "quantized_mlp_kernel_enabled": ({"mlp_kernel_enabled": True}, False, True),
    "quantized": ({"quantized_checkpoints_path": "q"}, False, True),
    "quantization_type": (QUANTIZED, "per_tensor_symmetric", "per_channel_symmetric"),
    "modules_to_not_convert": (QUANTIZED, None, ["lm_head"]),
    "speculation_length": (SAMPLED, 0, 4),
    "is_medusa": (MEDUSA, False, True),
    "medusa_speculation_length": (MEDUSA | {"max_context_length": 16}, 64, 16),
    "num_medusa_heads": (MEDUSA, 4, 3),
}
#: Other models than `8b`: ranks that divide the vocabulary store a tied head once.
MODELS: Final = {"vocab_parallel": "1b"}
#: Attributes of LoraServingConfig, and two values with different plans.
LORA_CASES: Final[dict[str, tuple[Any, Any]]] = {
    "max_loras": (1, 2),
    "max_lora_rank": (16, 32),
    "lora_ckpt_paths": (None, {"a": "adapters/r64"}),
    "lora_ckpt_paths_cpu": (None, {"a": "adapters/r64"}),
    "lora_ckpt_json": (None, "adapters/listing.json"),
    "lora_shard_linear_layer": (True, False),
    "target_modules": (None, ["q_proj"]),
}
#: A rule bounds it from below by tkg_batch_size.
BY_A_RULE: Final = {"max_batch_size"}
#: Those that only say something beside a draft model: other tests plan with one.
OF_DRAFTS: Final = {
    "draft_model_modules_to_not_convert",
    "enable_eagle_speculation",
    "enable_fused_speculation",
    "is_eagle_draft",
    "draft_model_path",
}


def figures(planner: Planner, model: str, **options: Any) -> tuple[Any, ...]:
    planned = plan(planner, model, "trn2", **options)
    return planned.memory, planned.limit_bytes, planned.submodels, [one.tag for one in planned.executables]


def test_every_planned_attribute_has_a_case() -> None:
    planned = {
        row.name
        for name, table in TABLES.items()
        for row in table.rows
        if name != "InferenceConfig"
        and row.support_on("trn2").level == "planned"
        and not (row.domain.table or row.deprecated)
    }
    assert planned == CASES.keys() | LORA_CASES.keys() | BY_A_RULE | OF_DRAFTS


def _without_unset(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@pytest.mark.parametrize("name", CASES)
def test_a_value_changes_the_plan(planner: Planner, name: str) -> None:
    beside, *values = CASES[name]
    one, other = (
        figures(planner, MODELS.get(name, "8b"), **_without_unset(beside | {name: value})) for value in values
    )
    assert one != other


@pytest.mark.parametrize("name", LORA_CASES)
@pytest.mark.usefixtures("adapters")
def test_a_value_of_adapters_changes_the_plan(planner: Planner, name: str) -> None:
    one, other = (
        figures(planner, "8b", tp_degree=32, lora_config=_without_unset({name: value})) for value in LORA_CASES[name]
    )
    assert one != other


class TestNamesThatMatchNothing:
    def warnings(self, planner: Planner, model: str = "8b", **options: Any) -> list[str]:
        planned = plan(planner, model, "trn2", **options)
        return [one for one in planned.warnings if "target_modules" in one or "not_convert" in one]

    def test_targets_of_adapters(self, planner: Planner) -> None:
        (warning,) = self.warnings(planner, lora_config={"target_modules": ["q_projj", "lm_head", "v_proj"]})
        assert warning == (
            "neuron_config.lora_config.target_modules: 'q_projj', 'lm_head' match no linear layer that adapters may "
            "change, which are 'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj', or "
            "all-linear"
        )

    def test_adapters_of_no_bytes(self, planner: Planner) -> None:
        (warning,) = self.warnings(planner, lora_config={"target_modules": [".*proj"]})
        assert warning.endswith("; so adapters take no memory in this plan")

    def test_all_linear_layers(self, planner: Planner) -> None:
        sizes = [
            plan(planner, "8b", "trn2", lora_config={"target_modules": targets}).memory.lora_bytes
            for targets in ([], ["all-linear"])
        ]
        assert sizes[0] == sizes[1] > 0
        assert not self.warnings(planner, lora_config={"target_modules": ["all-linear"]})

    def test_exclusions(self, planner: Planner) -> None:
        (warning,) = self.warnings(planner, **QUANTIZED, modules_to_not_convert=["lm_head", "self_atn", "layers.31"])
        assert warning == (
            "neuron_config.modules_to_not_convert: 'self_atn' are in no name of a module that would be quantized"
        )

    def test_exclusions_of_the_quantized_mlp_kernel(self, planner: Planner) -> None:
        options = {"mlp_kernel_enabled": True, "quantized_mlp_kernel_enabled": True}
        assert not self.warnings(planner, modules_to_not_convert=["lm_head", "self_attn"], **options)
