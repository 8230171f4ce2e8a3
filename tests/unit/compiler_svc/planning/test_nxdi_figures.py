"""Plans of files that NxD Inference saved and of AWS's configurations, against figures that were worked out by hand.

Llama 3.3 70B has the shapes of 3.1: 80 layers, hidden 8192, intermediate 28672, 64 and 8 heads of 128, vocabulary
128256. On 64 ranks each has one query head, and one KV head, which eight ranks share; 448 of the MLP's outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from compiler_svc.config import parse_document
from compiler_svc.models.registry import describe_model
from compiler_svc.planning.planner import Planner
from compiler_svc.planning.report import PlanReport
from compiler_svc.planning.weights import measure_draft_weights
from compiler_svc.weights.headers import TensorHeader
from tests.checkpoints.headers import LLAMA_1B
from tests.unit.compiler_svc.planning.planning import GIB, plan

FILES: Final = Path(__file__).parents[1] / "nxdi_configs"
#: Bytes of a rank's part of 70B in bfloat16, by group.
WEIGHTS_70B: Final = {
    "embedding": 32_833_536,  # 128256 * 8192 / 64 items
    "attention": 671_088_640,  # 80 * 4 * 8192 * 128 items: one head each of queries, keys, values and outputs
    "mlp": 1_761_607_680,  # 80 * 3 * 8192 * 448 items
    "norm": 2_637_824,  # 161 * 8192 items
    "lm_head": 32_833_536,
    "draft": 0,
    "derived": 260,  # 64 inverse frequencies and the rank, of four bytes each
}
#: The MLP in one byte for an item: 880803840, and 80 * (448 + 448 + 8192) scales of four bytes.
QUANTIZED_MLP_70B: Final = 880_803_840 + 2_908_160
#: Positions of a slot that Kiln's graphs have and NxD Inference's cache has not; the scratch block both have.
SPARE: Final = 1
#: Keys and values of a position: 80 layers * 2 * 128 items of two bytes.
POSITION_70B: Final = 40_960


def read_file(name: str) -> dict[str, Any]:
    return parse_document((FILES / f"{name}.json").read_text())


def plan_file(planner: Planner, name: str, model: str, **changes: Any) -> PlanReport:
    document = read_file(name)
    document["neuron_config"] |= changes
    return plan(planner, model, "trn2", document=document)


@pytest.mark.parametrize(
    ("name", "mlp", "kv_bytes"),
    [
        ("aws_llama_70b_card_1", WEIGHTS_70B["mlp"], (16384 + SPARE) * POSITION_70B),
        ("aws_llama_70b_fp8", QUANTIZED_MLP_70B, 4 * (5120 + SPARE) * POSITION_70B),
        ("aws_llama_70b_prefix_caching", WEIGHTS_70B["mlp"], (2048 + 1) * 32 * POSITION_70B),
    ],
)
def test_configurations_of_aws(planner: Planner, name: str, mlp: int, kv_bytes: int) -> None:
    planned = plan_file(planner, name, "70b")
    assert planned.memory.weight_groups == WEIGHTS_70B | {"mlp": mlp}
    assert planned.memory.kv_bytes == kv_bytes
    assert planned.limit_bytes == 24 * GIB
    assert planned.fits


def test_modules_that_the_fp8_tutorial_leaves_whole(planner: Planner) -> None:
    """It quantizes the MLP of all layers but the first and the last: 78 of them, and 2 in bfloat16."""
    skipped = ["lm_head", "layers.0.mlp", "layers.79.mlp", *(f"layers.{layer}.self_attn" for layer in range(80))]
    planned = plan_file(planner, "aws_llama_70b_fp8", "70b", modules_to_not_convert=skipped)
    mlp = 78 * (11_010_048 + 4 * (448 + 448 + 8192)) + 2 * 22_020_096
    assert planned.memory.weight_groups == WEIGHTS_70B | {"mlp": mlp}
    assert not [warning for warning in planned.warnings if "not_convert" in warning]


def test_the_speculation_tutorial(planner: Planner) -> None:
    """Llama 3.2 1B drafts for 70B: 16 layers, hidden 2048, intermediate 8192, 32 and 8 heads of 64, a tied head.

    On 64 ranks a rank has one query head, which is padding on every other rank, and one KV head.
    """
    sizes: dict[str, Any] = {"batch_size": 1, "tp_degree": 64, "seq_len": 12800, "max_context_length": 12288}
    target = sizes | {
        "torch_dtype": "bfloat16",
        "on_device_sampling_config": {"top_k": 1},
        "fused_qkv": True,
        "sequence_parallel_enabled": True,
        "qkv_kernel_enabled": True,
        "attn_kernel_enabled": True,
        "mlp_kernel_enabled": True,
        "cc_pipeline_tiling_factor": 1,
        "enable_fused_speculation": True,
        "speculation_length": 7,
        "trace_tokengen_model": False,
        "logical_neuron_cores": 2,
        "enable_bucketing": True,
    }
    fused = {"draft_model_path": "1b", "draft_config": {"neuron_config": sizes}}
    document = {"neuron_config": target, "fused_spec_config": fused, "pad_token_id": 2}
    planned = plan(planner, "70b", "trn2", document=document)
    draft = (
        2 * 8_208_384  # embedding and head: 128256 * 2048 / 64 items each
        + 16_777_216  # attention: 16 * 4 * 2048 * 64 items
        + 25_165_824  # mlp: 16 * 3 * 2048 * 128 items
        + 135_168  # norms: 33 * 2048 items
    )
    assert planned.memory.weight_groups == WEIGHTS_70B | {"draft": draft}
    assert planned.memory.kv_bytes == (12800 + SPARE) * (POSITION_70B + 16 * 2 * 64 * 2)
    assert [submodel.name for submodel in planned.submodels] == ["context_encoding", "fused_speculation"]
    assert planned.fits


def test_submodels_of_prefix_caching(planner: Planner) -> None:
    """Five lengths of prompts by three of prefixes and none; five lengths of decode."""
    planned = plan_file(planner, "aws_llama_70b_prefix_caching", "70b")
    assert [len(submodel.buckets) for submodel in planned.submodels] == [5 * 4, 5]


@pytest.mark.parametrize("release", ["2.23_dense", "2.28_dense", "2.29_dense", "2.29_moe"])
def test_saved_files(planner: Planner, release: str) -> None:
    """8B on 32 ranks: 32 layers, hidden 4096, intermediate 14336; a rank has one head and 448 of the MLP's outputs."""
    planned = plan_file(planner, f"saved_sdk_{release}", "8b")
    assert planned.memory.weight_groups == {
        "embedding": 32_833_536,  # 128256 * 4096 / 32 items
        "attention": 134_217_728,  # 32 * 4 * 4096 * 128 items
        "mlp": 352_321_536,  # 32 * 3 * 4096 * 448 items
        "norm": 532_480,  # 65 * 4096 items
        "lm_head": 32_833_536,
        "draft": 0,
        "derived": 260,
    }
    assert planned.memory.kv_bytes == (2048 + SPARE) * 32 * 2 * 128 * 2
    assert planned.fits


def test_a_long_context_fits_trn1_2xlarge(planner: Planner) -> None:
    """8B on two cores with 65536 tokens: weights 8.03 GB and one row of keys and values, 4.29 GB, of 17.18 GB."""
    sizes: dict[str, Any] = {"tp_degree": 2, "seq_len": 65536, "max_context_length": 8192}
    row_bytes = 65536 * 32 * 2 * 4 * 128 * 2
    assert row_bytes == 4_294_967_296
    slots = plan(planner, "8b", "trn1", **sizes)
    assert slots.memory.kv_bytes == row_bytes * 65537 // 65536
    assert slots.memory.weights_bytes == pytest.approx(8.03e9, rel=0.001)
    assert slots.memory.total_bytes == pytest.approx(12.9e9, rel=0.01)
    assert slots.fits
    blocks = plan(
        planner,
        "8b",
        "trn1",
        **sizes,
        is_block_kv_layout=True,
        is_prefix_caching=True,
        pa_num_blocks=2048,
        pa_block_size=32,
    )
    assert blocks.memory.kv_bytes == row_bytes * 2049 // 2048
    assert blocks.fits
    assert blocks.cores_needed == 2


def plan_eagle(planner: Planner, draft_path: str) -> PlanReport:
    """The feature guide's example of EAGLE."""
    target: dict[str, Any] = {"batch_size": 1, "seq_len": 1024, "max_context_length": 1024, "tp_degree": 32}
    target |= {"speculation_length": 5, "enable_eagle_speculation": True, "enable_fused_speculation": True}
    target |= {"on_device_sampling_config": {"temperature": 0.7, "top_k": 50, "top_p": 1.0}}
    draft = target | {"enable_fused_speculation": False, "is_eagle_draft": True}
    fused = {"draft_model_path": draft_path, "draft_config": {"neuron_config": draft}}
    return plan(planner, "70b", "trn2", document={"neuron_config": target, "fused_spec_config": fused})


def test_an_eagle_draft_is_divided_as_its_target_is(planner: Planner) -> None:
    """196 MB in each of 32 ranks, which have two query heads and one KV head each, and 896 of the MLP's outputs."""
    planned = plan_eagle(planner, "eagle")
    assert planned.memory.weight_groups["draft"] == (
        2 * 65_667_072  # embedding and head: 128256 * 8192 / 32 items each
        + 8_388_608  # fc: 256 * 16384 items
        + 12_582_912  # attention: 2 * 8192 * 256 + 2 * 8192 * 128 items
        + 44_040_192  # mlp: 3 * 8192 * 896 items
        + 16_384  # one norm
    )
    # Keys and values of 81 layers, and the ring of hidden states: two rows of ten.
    assert planned.memory.kv_bytes == (1024 + SPARE) * 81 * 2 * 128 * 2 + 2 * 2 * 10 * 8192 * 2


def measure_1b(tp_degree: int, *, tied: bool) -> int:
    description = describe_model(LLAMA_1B | {"tie_word_embeddings": tied})
    tensors = {
        name: TensorHeader(name, "bfloat16", shape, Path("model.safetensors"))
        for name, shape in description.checkpoint_tensors().items()
    }
    return measure_draft_weights(tensors, description, item_bytes=2, tp_degree=tp_degree)


def test_the_head_of_a_tied_draft_counts_if_ranks_divide_it() -> None:
    """128256 * 2048 items are the embedding's and the head's; ranks divide them along different axes."""
    assert measure_1b(1, tied=False) - measure_1b(1, tied=True) == 525_336_576
    assert measure_1b(64, tied=True) == measure_1b(64, tied=False)
    assert measure_1b(64, tied=True) > 2 * 8_208_384


class TestAdapters:
    """A and B of an adapter of rank 1 on q_proj of 8B, on 32 ranks: 4096 / 32 inputs and 128 outputs a layer."""

    def plan(self, planner: Planner, **lora: Any) -> tuple[int, list[str]]:
        lora |= {"target_modules": ["q_proj"]}
        planned = plan(planner, "8b", "trn2", tp_degree=32, lora_config=lora)
        return planned.memory.lora_bytes, [note for note in planned.warnings if "lora_config" in note]

    @pytest.mark.parametrize(
        ("paths", "rank"),
        [({}, 16), ({"a": "adapters/r8"}, 16), ({"a": "adapters/r64"}, 64), ({"a": "adapters/by_module"}, 32)],
    )
    @pytest.mark.usefixtures("adapters")
    def test_the_largest_rank_counts(self, planner: Planner, paths: dict[str, str], rank: int) -> None:
        size_bytes, notes = self.plan(planner, lora_ckpt_paths=paths)
        assert size_bytes == 32 * (4096 // 32 + 128) * rank * 2
        raised = "neuron_config.lora_config.max_lora_rank: 16 is raised to"
        assert [note.startswith(raised) for note in notes] == [True] * (rank > 16)

    @pytest.mark.usefixtures("adapters")
    def test_adapters_of_a_listing(self, planner: Planner) -> None:
        size_bytes, notes = self.plan(planner, lora_ckpt_json="adapters/listing.json", enable_dynamic_multi_lora=True)
        assert size_bytes == 2 * 32 * (4096 // 32 + 128) * 64 * 2
        assert notes[0].endswith("the rank of neuron_config.lora_config.lora_ckpt_json, b")
        assert notes[1] == "neuron_config.lora_config.max_loras: 1 is raised to 2, the number of adapters"

    @pytest.mark.usefixtures("adapters")
    def test_many_adapters_that_cannot_be_read_are_counted(self, planner: Planner) -> None:
        paths = {f"a{number}": "nowhere" for number in range(20)}
        _, notes = self.plan(planner, lora_ckpt_paths=paths, max_loras=20)
        assert len(notes) == 17
        assert notes[-1] == "neuron_config.lora_config: 4 other adapters cannot be read either"

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("nowhere", "no such directory"),
            ("../..", "--model-root DIR"),
            ("adapters/broken", "r: got 'many'; accepted: an integer from 1 to 65536"),
        ],
    )
    @pytest.mark.usefixtures("adapters")
    def test_an_adapter_that_cannot_be_read_is_noted(self, planner: Planner, path: str, said: str) -> None:
        size_bytes, (note,) = self.plan(planner, lora_ckpt_paths={"a": path})
        assert size_bytes == 32 * (4096 // 32 + 128) * 16 * 2
        assert note.startswith("neuron_config.lora_config.lora_ckpt_paths.a: its rank is taken to be at most")
        assert said in note

    def test_a_link_out_of_the_model_roots_is_not_followed(
        self, planner: Planner, adapters: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "secret.json").write_text('{"r": 64}')
        (adapters / "linked").mkdir(exist_ok=True)
        (adapters / "linked" / "adapter_model.safetensors").touch()
        link = adapters / "linked" / "adapter_config.json"
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "secret.json")
        _, (note,) = self.plan(planner, lora_ckpt_paths={"a": "adapters/linked"})
        assert "a link out of the model roots" in note
        link.unlink()
        link.symlink_to(link)
        _, (note,) = self.plan(planner, lora_ckpt_paths={"a": "adapters/linked"})
        assert "has no adapter_config.json" in note
