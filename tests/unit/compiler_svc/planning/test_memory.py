"""The memory of a rank, against numbers worked out by hand for `tiny` and Llama 3.1 8B."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundle.manifest import TargetKind
from compiler_svc.models.registry import describe_model
from compiler_svc.planning.memory import MemoryModel, PlannedModel, RankMemory
from compiler_svc.planning.weights import WEIGHT_GROUPS
from compiler_svc.weights.checkpoint import Checkpoint
from targets.registry import TARGETS
from tests.unit.compiler_svc.planning.planning import resolve

# 8b: 32 layers, hidden 4096, intermediate 14336, 32 and 8 heads of 128, vocabulary 128256; bfloat16.
MATRIX_PARAMETERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD_PARAMETERS = 128256 * 4096
NORM_PARAMETERS = 65 * 4096
POSITION_BYTES = 2 * 32 * 8 * 128 * 2


#: Measures the memory of a rank; the target is trn1, and what is given is of `neuron_config`.
Measure = Callable[..., RankMemory]


@pytest.fixture(scope="module")
def memory(models: Path) -> Measure:
    models_by_level: dict[tuple[str, int], MemoryModel] = {}
    checkpoint = Checkpoint.open(models / "8b")
    model = PlannedModel(checkpoint, describe_model(checkpoint.config))

    def measure(*, target: str = "trn1", optimization_level: int = 1, **options: Any) -> RankMemory:
        key = (target, optimization_level)
        if key not in models_by_level:
            models_by_level[key] = MemoryModel(model, None, TARGETS[target], optimization_level)
        return models_by_level[key].measure(resolve(target, **({"seq_len": 256} | options)))

    return measure


class TestWeights:
    def test_groups(self, memory: Measure) -> None:
        groups = memory().weight_groups
        assert tuple(groups) == WEIGHT_GROUPS
        assert groups["embedding"] == groups["lm_head"] == 2 * HEAD_PARAMETERS
        assert groups["attention"] == 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
        assert groups["mlp"] == 2 * 32 * 3 * 4096 * 14336
        assert groups["norm"] == 2 * NORM_PARAMETERS
        assert groups["derived"] == 64 * 4, "inverse frequencies"
        assert groups["draft"] == 0

    def test_query_heads_are_padded(self, memory: Measure) -> None:
        """On 24 ranks 32 query heads become 48, and each of 8 KV heads is held three times."""
        padded = memory(target="inf2", tp_degree=24)
        assert padded.weight_groups["attention"] * 24 == 2 * 32 * 4096 * 128 * (2 * 48 + 2 * 24)
        assert padded.kv_bytes == 257 * POSITION_BYTES // 8

    @pytest.mark.parametrize(
        ("kind", "num_scales"),
        [
            ("per_tensor_symmetric", 32 * 7 + 1),
            ("per_channel_symmetric", 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096) + 128256),
        ],
    )
    def test_quantized_weights_take_a_byte_and_have_scales(self, memory: Measure, kind: str, num_scales: int) -> None:
        quantized = memory(quantized=True, quantized_checkpoints_path="q", quantization_type=kind)
        expected = MATRIX_PARAMETERS + HEAD_PARAMETERS + 4 * num_scales + 2 * (HEAD_PARAMETERS + NORM_PARAMETERS) + 256
        assert quantized.weights_bytes == expected

    def test_what_is_kept_as_what(self, memory: Measure) -> None:
        """Matrices count with their scales, and the cache by itself."""
        plain, quantized = memory(), memory(quantized=True, quantization_type="per_channel_symmetric")
        num_scales = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096) + 128256
        assert quantized.kept_weights == {
            "int8, a scale for each output": MATRIX_PARAMETERS + HEAD_PARAMETERS + 4 * num_scales,
            "bfloat16": 2 * (HEAD_PARAMETERS + NORM_PARAMETERS),
            "float32": 256,
        }
        for measured in (plain, quantized):
            assert sum(measured.kept_weights.values()) == measured.weights_bytes
            assert measured.kept_kv == {"bfloat16": measured.kv_bytes}
        assert memory(kv_cache_quant=True).kept_kv == {"float8_e4m3fn": plain.kv_bytes // 2}

    def test_the_kernel_of_quantized_mlps_quantizes_them_alone(self, memory: Measure) -> None:
        groups = memory(mlp_kernel_enabled=True, quantized_mlp_kernel_enabled=True).weight_groups
        mlp = 32 * 3 * 4096 * 14336 + 4 * 32 * (2 * 14336 + 4096)
        assert groups == memory().weight_groups | {"mlp": mlp}


class TestKvCache:
    @pytest.mark.parametrize("target", TARGETS)
    def test_slots_have_a_spare_position_unless_idle_rows_are_skipped(
        self, memory: Measure, target: TargetKind
    ) -> None:
        for rows in (1, 4):
            positions = (rows + 1) * 256 if target == "cpu" else rows * 257
            assert memory(target=target, batch_size=rows).kv_bytes == positions * POSITION_BYTES

    def test_quantized_items(self, memory: Measure) -> None:
        assert memory(kv_cache_quant=True).kv_bytes == memory().kv_bytes / 2

    def test_layers_with_a_window_keep_rings_on_cpu(self, models: Path) -> None:
        """Of 2048 positions, windows of 128 and prompts of 512 tokens need 639: 640 in whole cache lines."""
        checkpoint = Checkpoint.open(models / "8b")
        mistral = dict(checkpoint.config) | {"architectures": ["MistralForCausalLM"], "sliding_window": 128}
        model = PlannedModel(checkpoint, describe_model(mistral))

        def measure(target: TargetKind, **options: Any) -> int:
            config = resolve(target, **({"seq_len": 2048, "max_context_length": 512} | options))
            return MemoryModel(model, None, TARGETS[target], 1).measure(config).kv_bytes

        assert measure("cpu", batch_size=4) == 5 * 640 * POSITION_BYTES
        assert measure("cpu", max_context_length=2048) == 2 * 2048 * POSITION_BYTES
        assert measure("cpu", is_block_kv_layout=True, pa_num_blocks=64, pa_block_size=32) == 65 * 32 * POSITION_BYTES
        assert measure("trn1") == 2049 * POSITION_BYTES

    def test_flash_decoding_divides_positions(self, memory: Measure) -> None:
        options = {"tp_degree": 32, "seq_len": 1024}
        divided = memory(flash_decoding_enabled=True, **options)
        assert divided.kv_bytes == (1024 // 4 + 128 + 1) * POSITION_BYTES / 8


class TestActivations:
    def test_prompts_are_what_takes_memory(self, memory: Measure) -> None:
        step = memory(seq_len=8192).activation_bytes
        tokens = 8192
        stream, mlp = 2 * tokens * 4096 * 2, 2 * tokens * 4096 * 2 + 2 * tokens * 14336 * 2
        assert step == stream + mlp

    def test_short_steps_are_all_logits(self, memory: Measure) -> None:
        step = memory(seq_len=16, ctx_batch_size=1, tkg_batch_size=1).activation_bytes
        logits = (4096 + 128256) * 2 + 8 * 128256
        assert step == max(2 * 16 * 4096 * 2 + 2 * 16 * (4096 + 14336) * 2, 2 * 16 * 4096 * 2 + logits)

    def test_scores_without_a_fused_kernel(self, memory: Measure) -> None:
        fused = memory(seq_len=8192).activation_bytes
        plain = memory(seq_len=8192, attn_kernel_enabled=False).activation_bytes
        assert plain > fused + 32 * 8192 * 8192 * 4

    def test_sequence_parallelism_divides_the_stream(self, memory: Measure) -> None:
        options = {"tp_degree": 8, "seq_len": 8192}
        whole = memory(**options).activation_bytes
        divided = memory(sequence_parallel_enabled=True, **options).activation_bytes
        assert whole - divided == 2 * 8192 * 4096 * 2 * 7 // 8

    def test_pages(self, memory: Measure) -> None:
        assert memory(scratchpad_page_size=512).activation_bytes == 512 << 20

    def test_a_functional_graph_returns_a_second_cache(self, memory: Measure) -> None:
        functional = memory(target="cpu", optimization_level=0)
        in_place = memory(target="cpu", optimization_level=1)
        assert functional.activation_bytes - in_place.activation_bytes == functional.kv_bytes


def test_code_grows_with_executables(memory: Measure) -> None:
    few = memory(seq_len=1024)
    many = memory(seq_len=1024, enable_bucketing=True)
    assert many.code_bytes == 4 * few.code_bytes, "128, 256, 512 and 1024 in place of 1024"


@pytest.mark.parametrize(
    ("prompts", "caches", "options", "num_files"),
    [
        ([1024], [64, 512, 1024], {}, 2),
        ([64, 512, 1024], [512, 1024], {}, 4),
        ([1024], [512, 1024], {"batch_size": 4, "token_generation_batches": [1, 4]}, 3),
    ],
)
def test_code_that_executables_share_counts_once(
    memory: Measure, prompts: list[int], caches: list[int], options: dict[str, Any], num_files: int
) -> None:
    """On cpu, graphs do not depend on how much of the cache a bucket reads."""
    buckets = {"context_encoding_buckets": prompts, "token_generation_buckets": caches}
    found = memory(target="cpu", seq_len=1024, enable_bucketing=True, **buckets, **options).code_bytes
    two = memory(target="cpu", seq_len=1024).code_bytes
    assert found * 2 == num_files * two
