"""Files that NxD Inference of SDK 2.23 to 2.29 saved, and AWS's configurations for Llama 3.3 70B."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from compiler_svc.config import Resolution, parse_document, resolve_config
from tests.unit.compiler_svc.config.resolving import mistakes_in_document

FILES: Final = Path(__file__).parents[2] / "nxdi_configs"
SAVED: Final = sorted(FILES.glob("saved_*.json"))
AWS: Final = sorted(FILES.glob("aws_*.json"))
NAMES: Final = "because the releases of NxD Inference that are known here have no such names"


def read(path: Path) -> dict[str, Any]:
    return parse_document(path.read_text())


def resolve(document: dict[str, Any], target: Any = "trn2") -> Resolution:
    return resolve_config(document, checkpoint_dtype=None, target=target)


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
@pytest.mark.parametrize("target", ["trn2", "cpu"])
def test_a_saved_file_reads_and_every_name_is_known(path: Path, target: str) -> None:
    resolution = resolve(read(path), target)
    config: Any = resolution.config.neuron_config
    assert (config.tp_degree, config.seq_len) == (32, 2048)
    assert (config.max_context_length, config.max_new_tokens) == (1024, 1024)
    assert (config.fused_qkv, config.sequence_parallel_enabled, config.enable_bucketing) == (True, True, True)
    assert config.on_device_sampling_config.global_topk == 256
    assert resolution.config.model_attributes["vocab_size"] == 128256
    assert not any(NAMES in warning for warning in resolution.warnings)


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_what_a_release_has_at_its_default_is_no_hint(path: Path) -> None:
    fields = {hint.field.rpartition(".")[2] for hint in resolve(read(path)).hints}
    chosen = {"fused_qkv"} | ({"rpl_reduce_dtype", "skip_warmup"} if "2.23" in path.stem else set())
    # The documents' default of the first is another one; SDK 2.29 turns the second on by itself.
    assert fields - {"save_sharded_checkpoint", "top_k_kernel_enabled"} == chosen


def test_experts_of_a_saved_file() -> None:
    config: Any = resolve(read(FILES / "saved_sdk_2.29_moe.json")).config.neuron_config
    assert config.blockwise_matmul_config.optimized_block_to_token_mapping is True
    assert config.blockwise_matmul_config.block_sharding_strategy == "HI_LO"
    assert config.router_config.act_fn == "softmax"


def test_names_of_a_later_release_are_noted_with_their_values() -> None:
    document = read(FILES / "saved_sdk_2.29_moe.json")
    document["neuron_config"] |= {"later_kernel_enabled": False, "later_order": None}
    document["neuron_config"]["blockwise_matmul_config"]["later_blocks"] = 3
    later = resolve(document)
    assert later.config == resolve(read(FILES / "saved_sdk_2.29_moe.json")).config
    noted = [warning for warning in later.warnings if NAMES in warning]
    assert noted == [
        f"neuron_config: ignored, {NAMES}: 'later_kernel_enabled' = False, 'later_order' = None",
        f"neuron_config.blockwise_matmul_config: ignored, {NAMES}: 'later_blocks' = 3",
    ]


def test_names_of_a_draft_model_are_noted_likewise() -> None:
    document, draft = read(FILES / "saved_sdk_2.29_dense.json"), read(FILES / "saved_sdk_2.29_dense.json")
    document["neuron_config"] |= {"enable_fused_speculation": True, "speculation_length": 4}
    draft["neuron_config"]["later_order"] = None
    document["fused_spec_config"] = {"draft_config": draft, "draft_model_path": "draft", "later_draft": 1}
    noted = [warning.partition(":")[0] for warning in resolve(document).warnings if NAMES in warning]
    assert noted == ["fused_spec_config.draft_config.neuron_config", "fused_spec_config"]


HINTS: Final = {"k_cache_transposed", "attn_block_tkg_nki_kernel_enabled", "attn_block_tkg_nki_kernel_cache_update"}


@pytest.mark.parametrize("path", AWS, ids=lambda path: path.stem)
def test_kernels_and_layouts_of_the_tutorials_are_hints(path: Path) -> None:
    resolution = resolve(read(path))
    undocumented = {hint.field.rpartition(".")[2] for hint in resolution.hints if "on which no size" in hint.reason}
    assert undocumented == (set() if "prefix_caching" in path.stem else HINTS)
    assert resolution.config.neuron_config.tp_degree == 64


def test_a_hint_has_a_domain_and_degrees_that_change_the_arithmetic_are_no_hints() -> None:
    document = read(FILES / "aws_llama_70b_card_1.json")
    document["neuron_config"] |= {"k_cache_transposed": "yes", "cp_degree": 8}
    found = mistakes_in_document(document, "trn2")
    assert found["neuron_config.k_cache_transposed"].accepted == "true or false"
    assert found["neuron_config.cp_degree"].accepted == "1, all that this version serves"
