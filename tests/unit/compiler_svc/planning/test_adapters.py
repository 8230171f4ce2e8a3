"""What a configuration's adapters make of it: room in every rank, and where their files are."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from bundle.errors import KilnError
from bundle.store.layout import Layout
from compiler_svc.adapters.errors import AdapterInvalid, AdapterNotFound
from compiler_svc.bundles.store import BundleStore
from compiler_svc.compiles.cache import BundleCache
from compiler_svc.config import LoraServingConfig, resolve_config
from compiler_svc.database.engine import Database
from compiler_svc.errors import ConfigInvalid, PathOutsideModelRoots
from compiler_svc.planning.adapters import list_adapters, read_adapters
from compiler_svc.planning.admission import admit_request
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.planning.job_spec import read_spec, write_spec
from compiler_svc.planning.planner import Planner
from compiler_svc.weights.checkpoint import Checkpoint
from tests.unit.compiler_svc.planning.planning import compile_request, plan

#: Shapes of a layer of `tiny`: hidden 32, intermediate 64, 4 and 2 heads of 8.
SHAPES: Final = {
    "q_proj": (32, 32),
    "k_proj": (32, 16),
    "v_proj": (32, 16),
    "o_proj": (32, 32),
    "gate_proj": (32, 64),
    "up_proj": (32, 64),
    "down_proj": (64, 32),
}


def plan_tiny(models: Path, **lora: Any) -> BuildPlan:
    document = {"neuron_config": {"seq_len": 64, "lora_config": lora}}
    config = resolve_config(document, checkpoint_dtype="float32").config.neuron_config
    return plan_build(Checkpoint.open(models / "tiny"), config, target="cpu")


def configure(**values: Any) -> LoraServingConfig:
    document = {"neuron_config": {"lora_config": values}}
    lora = resolve_config(document, checkpoint_dtype="float32").config.neuron_config.lora_config
    assert lora is not None
    return lora


@pytest.mark.parametrize(
    ("lora", "slots", "rank", "modules"),
    [
        ({}, 1, 16, SHAPES),
        ({"max_loras": 3}, 3, 16, SHAPES),
        ({"max_lora_rank": 8}, 1, 8, SHAPES),
        ({"target_modules": ["all-linear"]}, 1, 16, SHAPES),
        ({"target_modules": ["q_proj", "self_attn.v_proj"]}, 1, 16, ("q_proj", "v_proj")),
        ({"target_modules": ["down_proj", "lm_head"], "max_loras": 2}, 2, 16, ("down_proj",)),
    ],
)
def test_room_is_what_the_configuration_says(models: Path, lora: Any, slots: int, rank: int, modules: Any) -> None:
    found = {one.name: one.shape for one in plan_tiny(models, **lora).model.description.adapter_parameters()}
    expected = {}
    for layer in range(2):
        for module in modules:
            inputs, outputs = SHAPES[module]
            place = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            name = f"model.layers.{layer}.{place}.{module}"
            expected |= {f"{name}.lora_A": (slots, rank, inputs), f"{name}.lora_B": (slots, outputs, rank)}
    assert found == expected


def test_what_runtimes_are_told(models: Path) -> None:
    plain, told = plan_tiny(models).serving, plan_tiny(models, max_cpu_loras=7, eviction_policy="lfu").serving
    assert (plain.adapter_eviction, plain.max_host_adapters) == ("lru", 100)
    assert (told.adapter_eviction, told.max_host_adapters) == ("lfu", 7)


def test_targets_that_name_nothing_are_refused(models: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        plan_tiny(models, target_modules=["lm_head", "c_attn"])
    (violation,) = caught.value.violations
    assert violation.field == "neuron_config.lora_config.target_modules"
    assert violation.value == "lm_head, c_attn"
    assert violation.accepted.startswith("some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or")


@pytest.mark.parametrize("tp_degree", [1, 2, 4])
def test_plans_for_cpu_count_what_ranks_have(planner: Planner, models: Path, tp_degree: int) -> None:
    lora = {"max_loras": 3, "max_lora_rank": 8}
    planned = plan(planner, "tiny", "cpu", seq_len=64, tp_degree=tp_degree, lora_config=lora)
    # Ranks divide B of layers whose outputs they divide, and A of the others; keys and values have two heads.
    items = 0
    for module, (inputs, outputs) in SHAPES.items():
        divides = min(tp_degree, 2) if module in ("k_proj", "v_proj") else tp_degree
        items += inputs // divides + outputs if module in ("o_proj", "down_proj") else inputs + outputs // divides
    assert planned.memory.lora_bytes == 2 * 3 * 8 * items * 4


PATHS: Final = {"a": "adapters/r8", "b": "adapters/r64"}


@pytest.mark.usefixtures("adapters")
def test_listings(models: Path) -> None:
    lora = configure(lora_ckpt_paths={"a": "adapters/r8"}, lora_ckpt_paths_cpu=PATHS)
    listed = list_adapters(lora, (models,))
    assert [(one.name, one.path, one.is_on_device) for one in listed] == [
        ("a", models / "adapters" / "r8", True),
        ("b", models / "adapters" / "r64", False),
    ]
    assert list_adapters(None, (models,)) == ()


@pytest.mark.usefixtures("adapters")
def test_a_file_lists_them(models: Path) -> None:
    listed = list_adapters(configure(lora_ckpt_json="adapters/listing.json"), (models,))
    assert {one.name: (one.path.name, one.is_on_device) for one in listed} == {
        "a": ("r8", True),
        "c": ("r8", True),
        "b": ("r64", False),
    }


class TestListings:
    @pytest.mark.parametrize(
        ("lora", "error", "field"),
        [
            ({"lora_ckpt_paths": {"a": "nowhere"}}, AdapterNotFound, "lora_ckpt_paths.a"),
            ({"lora_ckpt_paths": {"a": "../.."}}, PathOutsideModelRoots, "lora_ckpt_paths.a"),
            ({"lora_ckpt_paths": {"a": "adapters/broken"}}, AdapterInvalid, ""),
            ({"lora_ckpt_paths": {"a": "tiny"}}, AdapterNotFound, "lora_ckpt_paths.a"),
            ({"lora_ckpt_json": "nowhere.json"}, AdapterNotFound, "lora_ckpt_json"),
            ({"lora_ckpt_json": "adapters/r8/adapter_config.json/x"}, AdapterNotFound, "lora_ckpt_json"),
            ({"lora_ckpt_paths": {"a b": "adapters/r8"}}, ConfigInvalid, "lora_ckpt_paths.a b"),
            (
                {"lora_ckpt_paths": {"a": "adapters/r8"}, "lora_ckpt_paths_cpu": {"a": "adapters/r64"}},
                ConfigInvalid,
                "lora_ckpt_paths_cpu.a",
            ),
        ],
    )
    @pytest.mark.usefixtures("adapters")
    def test_compiles_refuse_what_plans_note(self, models: Path, lora: Any, error: type[KilnError], field: str) -> None:
        with pytest.raises(error) as caught:
            read_adapters(configure(**lora), (models,), is_strict=True)
        if field:
            assert caught.value.violations[0].field == f"neuron_config.lora_config.{field}"
        (note,) = read_adapters(configure(**lora), (models,), is_strict=False).notes
        assert str(caught.value) in note

    @pytest.mark.parametrize(
        ("configs", "targets"),
        [
            ([["q_proj"]], ("q_proj",)),
            ([["v_proj", "q_proj"], ["down_proj"]], ("down_proj", "q_proj", "v_proj")),
            ([["q_proj"], "all-linear"], ()),
            ([["q_proj"], None], ()),
            ([r".*\.q_proj"], ()),
            ([[3]], ()),
        ],
    )
    def test_modules_are_those_of_the_files(self, tmp_path: Path, configs: list[Any], targets: Any) -> None:
        paths = {}
        for number, modules in enumerate(configs):
            paths[f"a{number}"] = str(number)
            (tmp_path / str(number)).mkdir()
            config = {"r": 4, "target_modules": modules}
            (tmp_path / str(number) / "adapter_config.json").write_text(json.dumps(config))
            (tmp_path / str(number) / "adapter_model.safetensors").touch()
        assert read_adapters(configure(lora_ckpt_paths=paths), (tmp_path,), is_strict=True).targets == targets

    def test_builds_open_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "one.pt").write_bytes(b"never opened")
        read = read_adapters(configure(lora_ckpt_paths={"one": "one.pt"}), (tmp_path,), is_strict=True)
        assert (read.targets, read.largest_rank, len(read.listed)) == ((), 0, 1)
        assert "it is a pickle, which only a build opens" in read.notes[0]

    @pytest.mark.usefixtures("adapters")
    def test_compiles_have_room_for_them(self, models: Path) -> None:
        lora = {"lora_ckpt_paths": PATHS, "lora_ckpt_paths_cpu": PATHS, "max_cpu_loras": 1}
        document = {"neuron_config": {"seq_len": 64, "lora_config": lora}}
        spec = admit_request(compile_request(document=document), (models,))
        widened = spec.config.neuron_config.lora_config
        assert widened is not None
        assert (widened.max_loras, widened.max_lora_rank, widened.max_cpu_loras) == (2, 64, 1)
        assert [one.name for one in spec.adapters] == ["a", "b"]
        assert spec.adapter_roots == (models,)
        assert read_spec(write_spec(spec)) == spec
        assert sum("is raised to" in warning for warning in spec.warnings) == 2


def test_biases_of_adapters_are_refused() -> None:
    assert configure(lora_bias="none").lora_bias == "none"
    with pytest.raises(KilnError, match="lora_bias: got 'all'; accepted: 'none'"):
        configure(lora_bias="all")


class TestCacheKeys:
    async def identify(self, database: Database, models: Path, **lora: Any) -> str:
        document = {"neuron_config": {"seq_len": 64, "lora_config": lora}}
        cache = BundleCache(database, BundleStore(database, Layout.create(models.parent / "store")))
        request = compile_request(document=document, optimization_level=0)
        identity = await cache.identify(admit_request(request, (models,)))
        return identity.action_digest

    async def test_room(self, database: Database, models: Path) -> None:
        rooms: list[dict[str, Any]] = [{}, {"max_loras": 2}, {"max_lora_rank": 8}, {"target_modules": ["q_proj"]}]
        assert len({await self.identify(database, models, **room) for room in rooms}) == len(rooms)
        assert await self.identify(database, models, max_loras=1) == await self.identify(database, models)

    @pytest.mark.usefixtures("adapters")
    async def test_files(self, database: Database, models: Path) -> None:
        first, other = (models / "adapters" / name / "adapter_model.safetensors" for name in ("r8", "r64"))
        other.write_bytes(b"")
        listed = {"lora_ckpt_json": "adapters/listing.json"}
        keys = []
        for content in (b"one", b"another", b"one"):
            first.write_bytes(content)
            keys.append(await self.identify(database, models, **listed))
        for file in (first, other):
            file.unlink()
        assert keys[0] != keys[1]
        assert keys[0] == keys[2]
