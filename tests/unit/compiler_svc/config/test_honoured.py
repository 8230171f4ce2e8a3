"""Every attribute that the cpu target honours has a test that shows what it does."""

import ast
from typing import Final

import pytest

from compiler_svc.config.tables import TABLES
from tests.repository import ROOT
from tests.unit.compiler_svc.builds.honoured_cases import GRAPH_CASES, PLAN_CASES, SAMPLING_VALUES

#: Attributes that change the plan of a build, or a graph.
IN_CASES: Final = {
    "InferenceConfig.neuron_config",
    *(f"NeuronConfig.{name}" for case in (*PLAN_CASES, *GRAPH_CASES) for name in case.values),
    *(f"OnDeviceSamplingConfig.{name}" for name in SAMPLING_VALUES),
}
_WEIGHTS: Final = "tests/service/compiler_svc/builds/test_weights.py::test_executables_and_weights_apart"

#: The tests of the others.
ELSEWHERE: Final = {
    "InferenceConfig.attribute_map": (
        "tests/unit/compiler_svc/weights/test_overrides.py::test_an_alias_in_the_checkpoint"
    ),
    **{
        f"KVQuantizationConfig.{name}": (
            "tests/unit/compiler_svc/builds/test_plan.py::test_caches_keep_what_kv_quant_config_says"
        )
        for name in ("direct_cast", "quant_dtype", "k_quant_method", "v_quant_method")
    },
    **{
        f"LoraServingConfig.{name}": f"tests/unit/compiler_svc/planning/test_adapters.py::{test}"
        for test, names in {
            "test_room_is_what_the_configuration_says": ("max_loras", "max_lora_rank", "target_modules"),
            "test_what_runtimes_are_told": ("max_cpu_loras", "eviction_policy"),
            "test_listings": ("lora_ckpt_paths", "lora_ckpt_paths_cpu"),
            "test_a_file_lists_them": ("lora_ckpt_json",),
            "test_biases_of_adapters_are_refused": ("lora_bias",),
        }.items()
        for name in names
    },
    "LoraServingConfig.base_model_quantized": (
        "tests/unit/compiler_svc/config/test_rules.py::test_what_does_not_count_is_said"
    ),
    "NeuronConfig.cast_type": (
        "tests/unit/compiler_svc/models/test_dtypes.py::test_as_declared_weights_keep_their_dtypes"
    ),
    "NeuronConfig.lora_config": (
        "tests/unit/compiler_svc/planning/test_adapters.py::test_room_is_what_the_configuration_says"
    ),
    "NeuronConfig.quantized_checkpoints_path": (
        "tests/unit/compiler_svc/planning/test_quantized_paths.py::test_weights_of_the_path_are_compiled"
    ),
    "NeuronConfig.save_sharded_checkpoint": _WEIGHTS,
    "NeuronConfig.skip_sharding": _WEIGHTS,
}


def test_every_honoured_attribute_has_a_test() -> None:
    honoured = {
        f"{table.class_name}.{attribute.name}"
        for table in TABLES.values()
        for attribute in table.rows
        if attribute.support_on("cpu").level == "honoured" and not attribute.deprecated
    }
    assert honoured == IN_CASES | ELSEWHERE.keys()
    assert not IN_CASES & ELSEWHERE.keys()


@pytest.mark.parametrize("node", sorted(set(ELSEWHERE.values())))
def test_the_test_exists(node: str) -> None:
    """Read off the source: collecting them would load torch."""
    path, _, test = node.partition("::")
    body = ast.parse((ROOT / path).read_text()).body
    assert test in {one.name for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
