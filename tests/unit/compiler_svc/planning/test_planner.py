from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from bundle.errors import KilnError
from bundle.manifest import Target
from bundle.store.layout import Layout
from compiler_svc.database import actuals, cache
from compiler_svc.database.actuals import BuildActual, BuildFacts
from compiler_svc.database.cache import CachedExecutable
from compiler_svc.database.engine import Database
from compiler_svc.planning.admission import admit_request, warn_of_unused_instructions
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.planning.digest import digest_plan
from compiler_svc.planning.planner import Planner
from compiler_svc.planning.report import PlanReport
from compiler_svc.weights.checkpoint import Checkpoint
from edge.memory import measure_memory
from targets.cpu import X86_64
from targets.registry import TARGETS
from tests.checkpoints.random_weights import write_checkpoint
from tests.unit.compiler_svc.planning.planning import GIB, compile_request, open_planner, plan, request

BLOCKS = {"is_block_kv_layout": True, "is_prefix_caching": True, "pa_block_size": 32}


class TestLimits:
    @pytest.mark.parametrize(
        ("target", "options", "limit_bytes"),
        [
            ("inf2", {}, 16 * GIB),
            ("trn1", {}, 16 * GIB),
            ("trn2", {}, 24 * GIB),
            ("trn2", {"logical_nc_config": 1}, 12 * GIB),
            ("trn3", {}, 36 * GIB),
            # The caller may say.
            *((target, {"core_memory_bytes": 5 << 20}, 5 << 20) for target in TARGETS),
        ],
    )
    def test_a_core_of_each_target(
        self, planner: Planner, target: str, options: dict[str, Any], limit_bytes: int
    ) -> None:
        assert plan(planner, "tiny", target, **options).limit_bytes == limit_bytes

    def test_ranks_share_the_memory_of_a_cpu(self, planner: Planner) -> None:
        assert plan(planner, "tiny", "cpu").limit_bytes == measure_memory()
        assert plan(planner, "tiny", "cpu", tp_degree=2).limit_bytes == measure_memory() // 2

    def test_what_no_document_says_of_trn3_is_marked(self, planner: Planner) -> None:
        assert [note for note in plan(planner, "tiny", "trn3").warnings if "unverified" in note]
        assert not [note for note in plan(planner, "tiny", "trn2").warnings if "unverified" in note]

    @pytest.mark.parametrize("target", list(TARGETS))
    def test_plans_for_neuron_say_once_that_no_graph_is_checked(self, planner: Planner, target: str) -> None:
        notes = [note for note in plan(planner, "tiny", target).warnings if "the check of graphs" in note]
        assert len(notes) == (target != "cpu")


class TestLargest:
    """The largest size fits, and one more does not."""

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("batch_size", {"seq_len": 2048, "batch_size": 2}),
            ("seq_len", {"seq_len": 2048, "batch_size": 2}),
            ("pa_num_blocks", BLOCKS | {"seq_len": 1024, "pa_num_blocks": 64}),
        ],
    )
    def test_sizes(self, planner: Planner, name: str, options: dict[str, Any]) -> None:
        largest = getattr(plan(planner, "8b", tp_degree=2, **options).largest, name)
        assert largest > options[name]
        sizes = (options | {name: size} for size in (largest, largest + 1))
        assert [plan(planner, "8b", tp_degree=2, **one).fits for one in sizes] == [True, False]

    def test_from_a_size_that_is_too_large(self, planner: Planner) -> None:
        options = {"tp_degree": 2, "seq_len": 2048}
        large, small = (plan(planner, "8b", batch_size=size, **options) for size in (1000, 1))
        assert (large.fits, small.fits) == (False, True)
        assert large.largest.batch_size == small.largest.batch_size

    def test_rows_of_the_cache_are_what_counts(self, planner: Planner) -> None:
        options = {"tp_degree": 2, "seq_len": 2048, "is_continuous_batching": True}

        def fits(rows: int) -> bool:
            return plan(planner, "8b", max_batch_size=rows, tkg_batch_size=rows, **options).fits

        rows = plan(planner, "8b", max_batch_size=4, tkg_batch_size=4, **options).largest.batch_size
        assert (fits(rows), fits(rows + 1)) == (True, False)

    def test_what_is_given_stays(self, planner: Planner) -> None:
        options = {"tp_degree": 2, "seq_len": 2048, "batch_size": 2}
        assert (
            plan(planner, "8b", ctx_batch_size=1, is_continuous_batching=True, **options).largest.batch_size
            > plan(planner, "8b", **options).largest.batch_size
        ), "prompts of one row take less"

    def test_sequence_parallelism_keeps_lengths_even(self, planner: Planner) -> None:
        largest = plan(planner, "8b", tp_degree=8, seq_len=2048, sequence_parallel_enabled=True).largest
        assert largest.seq_len % 8 == 0
        assert largest.seq_len > 2048

    @pytest.mark.parametrize(("seq_len", "largest"), [(64, 128), (128, 128), (200, 200)])
    def test_lengths_stay_within_what_the_model_was_trained_for(
        self, planner: Planner, seq_len: int, largest: int
    ) -> None:
        """Unless the configuration goes beyond it: the model has 128 positions."""
        assert plan(planner, "tiny", "cpu", seq_len=seq_len).largest.seq_len == largest

    def test_options_of_transformers_neuronx(self, planner: Planner) -> None:
        section = {"transformers_neuronx": {"batch_size": 2, "tp_degree": 2, "n_positions": 2048, "amp": "bf16"}}
        own = {"batch_size": 2, "tp_degree": 2, "seq_len": 2048}
        given = plan(planner, "8b", document=section)
        assert given.config.neuron_config.seq_len == 2048
        assert given.largest.batch_size == plan(planner, "8b", **own | {
            name: list(getattr(given.config.neuron_config, name))
            for name in ("context_encoding_buckets", "token_generation_buckets")
        } | {"enable_bucketing": True}).largest.batch_size  # fmt: skip


class TestCores:
    @pytest.mark.parametrize(
        ("model", "target", "seq_len", "cores"),
        [
            # 16.1 GB of weights and 0.5 GB for a row of 4096 tokens leave 0.6 GB of a core for the rest.
            ("8b", "trn1", 2048, 1),
            ("8b", "trn1", 4096, 1),
            ("8b", "trn1", 8192, 2),
            ("70b", "trn1", 4096, 16),
            ("70b", "trn2", 4096, 8),
            ("70b", "inf2", 4096, 24),
            ("tiny", "trn1", 4096, 1),
        ],
    )
    def test_the_smallest_degree_that_fits(
        self, planner: Planner, model: str, target: str, seq_len: int, cores: int
    ) -> None:
        assert plan(planner, model, target, seq_len=seq_len).cores_needed == cores

    def test_none_does(self, planner: Planner) -> None:
        assert plan(planner, "70b", core_memory_bytes=GIB).cores_needed == 0


class TestDrafts:
    def plan(self, planner: Planner, draft_model: str, **draft: Any) -> PlanReport:
        options = {"seq_len": 256, "on_device_sampling_config": {}}
        document = {
            "neuron_config": options | {"speculation_length": 4, "enable_fused_speculation": True},
            "fused_spec_config": {"draft_model_path": draft_model, "draft_config": {"neuron_config": options | draft}},
        }
        return plan(planner, "8b", "trn2", document=document)

    def test_the_draft_has_attributes_of_its_own(self, planner: Planner) -> None:
        target = plan(planner, "8b", "trn2", seq_len=256, on_device_sampling_config={}).memory.kv_bytes
        whole, quantized = self.plan(planner, "tiny").memory, self.plan(planner, "tiny", kv_cache_quant=True).memory
        assert quantized.weight_groups == whole.weight_groups
        assert quantized.kv_bytes - target == (whole.kv_bytes - target) // 2

    def test_a_draft_that_is_not_there(self, planner: Planner) -> None:
        with pytest.raises(KilnError) as caught:
            self.plan(planner, "nowhere")
        assert caught.value.reason == "CHECKPOINT_NOT_FOUND"

    def test_medusa_heads(self, planner: Planner) -> None:
        options = {"is_medusa": True, "num_medusa_heads": 4, "medusa_speculation_length": 64}
        options |= {"medusa_tree": [[0], [0, 0]], "on_device_sampling_config": {}, "tp_degree": 8}
        planned = plan(planner, "8b", **options)
        head = 4096 * 4096 + 4096 + 128256 // 8 * 4096
        assert planned.memory.weight_groups["draft"] == 4 * head * 2


@pytest.mark.parametrize(
    ("options", "is_float8"),
    [
        ({"quantized": True, "quantization_dtype": "f8e4m3"}, True),
        ({"kv_cache_quant": True}, True),
        ({"quantized": True, "quantization_dtype": "int8"}, False),
    ],
)
def test_float8_is_storage_on_cpu(planner: Planner, options: dict[str, Any], is_float8: bool) -> None:
    for target, is_noted in (("cpu", is_float8), ("trn2", False)):
        warnings = plan(planner, "tiny", target, **options).warnings
        assert any("float8 saves memory" in one for one in warnings) == is_noted


def test_buckets_of_two_lengths(planner: Planner) -> None:
    planned = plan(planner, "tiny", "trn1", seq_len=1024, enable_bucketing=True, pa_num_blocks=32, **BLOCKS)
    assert (planned.executables[0].tag, planned.executables[0].bucket) == ("context_encoding_512x0", (512, 0))


class TestCache:
    """What the cache says of a plan. An end-to-end test shows that builds record what plans look up."""

    @pytest.fixture
    def planner(self, tmp_path: Path, models: Path) -> Iterator[Planner]:
        """One whose cache is `database`."""
        with open_planner(tmp_path, models) as planner:
            yield planner

    def test_an_executable_counts_as_long_as_the_store_has_it(
        self, tmp_path: Path, models: Path, planner: Planner, database: Database
    ) -> None:
        layout = Layout(tmp_path / "store")
        build = plan_build(
            Checkpoint.open(models / "tiny"), plan(planner, "tiny", "cpu").config.neuron_config, target="cpu"
        )
        digests = digest_plan(build, target=Target(kind="cpu", isa="x86-64-v3"), optimization_level=0, salt="")
        tag = build.submodels[0].tag
        stored = layout.put_blob(b"an executable")
        executable = CachedExecutable(
            blob=stored.digest, size_bytes=13, format="exported_program", state_convention="functional", constants=()
        )
        facts = BuildFacts(
            target_kind="cpu",
            optimization_level=0,
            action_digests={digests[tag]: "sha256:a"},
            lowerings={},
            build=BuildActual(num_layers=2, num_executables=2, weights_bytes=1, trace_s=1.0, rest_s=1.0),
        )

        def remember(session: Session) -> None:
            cache.remember_executables(session, {"sha256:a": executable})
            actuals.remember_facts(session, "sha256:b", facts)

        def list_cached(**options: Any) -> list[str]:
            return [one.tag for one in plan(planner, "tiny", "cpu", **options).executables if one.is_cached]

        assert list_cached() == []
        database.run_and_wait(remember)
        assert list_cached() == [tag]
        for changed in ({"salt": "s"}, {"isa": "x86-64-v4"}, {"batch_size": 2}, {"seq_len": 64}):
            assert list_cached(**changed) == []
        layout.delete_blob(stored.digest)
        assert list_cached() == []


class TestRefusals:
    """What a compile refuses, its plan refuses; other targets are for plans only."""

    def refuse(self, planner: Planner, model: str = "tiny", target: str = "cpu", **options: Any) -> KilnError:
        with pytest.raises(KilnError) as caught:
            planner.plan(request(model, target, **options))
        return caught.value

    def test_more_ranks_than_the_model_has_parts(self, planner: Planner) -> None:
        assert self.refuse(planner, tp_degree=64).reason == "FEATURE_NOT_SERVED"

    def test_what_the_model_cannot_give(self, planner: Planner) -> None:
        refused = self.refuse(planner, "8b", "trn2", tp_degree=4, flash_decoding_enabled=True)
        assert [violation.field for violation in refused.violations] == ["neuron_config.flash_decoding_enabled"]
        assert plan(planner, "8b", "trn2", tp_degree=8, flash_decoding_enabled=True).submodels

    def test_a_missing_compiler(self, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        assert self.refuse(planner, optimization_level=1).reason == "TOOLCHAIN_MISSING"
        assert plan(planner, "tiny", "cpu", optimization_level=0).fits
        assert plan(planner, "tiny", "trn1", optimization_level=1).fits, "no C++ compiler is needed for it"

    def test_half_a_tokenizer(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path / "models/original")
        (path / "tokenizer.json").unlink(missing_ok=True)
        (path / "vocab.json").write_text("{}")
        with open_planner(tmp_path, tmp_path / "models") as planner:
            (warning,) = plan(planner, "original", "cpu", seq_len=64).warnings
            assert (
                "of vocab.json and merges.txt it has one, and no tokenizer.json, so the bundle takes token" in warning
            )
            for name in ("merges.txt", "tokenizer.model", "tokenizer.json"):
                (path / name).write_text("{}")
                assert plan(planner, "original", "cpu", seq_len=64).warnings == (), "a build converts it"


def test_generation_defaults_that_are_not_served_are_named(planner: Planner, models: Path) -> None:
    directory = write_checkpoint(models / "penalized")
    values = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05, "num_beams": 4, "min_p": None}
    (directory / "generation_config.json").write_text(json.dumps(values))
    warning = "generation_config.num_beams: 4 is no default of requests here"
    assert plan(planner, "penalized", "cpu", optimization_level=0).warnings == (warning,)


def test_token_ids_that_the_model_does_not_have_are_named(planner: Planner, models: Path) -> None:
    directory = write_checkpoint(models / "added-tokens")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 96], "pad_token_id": 128}))
    for warnings in (
        plan(planner, "added-tokens", "cpu", optimization_level=0).warnings,
        admit_request(compile_request("added-tokens", optimization_level=0), (models,)).warnings,
    ):
        named = [one.partition(" left out")[0] for one in warnings if "left out" in one]
        assert named == ["generation_config.eos_token_id: 96", "generation_config.pad_token_id: 128"]


def test_pickles_stay_closed(planner: Planner, pickled: str) -> None:
    opened, headers = plan(planner, pickled, tp_degree=2), plan(planner, "1b", tp_degree=2)
    assert opened.memory == headers.memory
    assert [note for note in opened.warnings if "pickles" in note]


FLAGS = " ".join(flag for level in X86_64.levels for flag in level.added_flags)


@pytest.mark.parametrize(
    ("isa", "level", "warns"),
    [("x86-64-v3", 1, True), ("x86-64-v3", 2, True), ("x86-64-v3", 0, False), (X86_64.names[-1], 1, False)],
)
def test_executables_that_travel_say_what_they_cost(tmp_path: Path, isa: str, level: int, warns: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {FLAGS}\n")
    wanted = request("tiny", "cpu", optimization_level=level)
    warnings = warn_of_unused_instructions(wanted, Target(kind="cpu", isa=isa), cpuinfo)
    assert len(warnings) == warns
    for warning in warnings:
        assert warning.startswith("target.isa: x86-64-v3 runs on more hosts than native, and leaves some of this host")
        assert all(one.gain in warning for one in X86_64.levels[1:])


def test_a_compiler_has_its_own_default(models: Path) -> None:
    native = X86_64.resolve("native")
    assert admit_request(compile_request(), (models,)).target.isa == "x86-64-v3"
    assert admit_request(compile_request(), (models,), default_isa="native").target.isa == native
    asked = admit_request(compile_request(isa="x86-64-v3"), (models,), default_isa="native")
    assert asked.target.isa == "x86-64-v3"
