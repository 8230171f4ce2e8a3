from pathlib import Path
from typing import Any

import msgspec
import pytest

from bundle.manifest import Target
from compiler_svc.config import MoENeuronConfig, resolve_config
from compiler_svc.planning.job_spec import AdapterJobSpec, CompileJobSpec, ShardJobSpec, read_spec, write_spec

SPEC = CompileJobSpec(
    name="tiny",
    model=Path("/models/tiny"),
    model_roots=(Path("/models"),),
    config=resolve_config({}, checkpoint_dtype="float32").config,
    target=Target(kind="cpu", isa="x86-64-v3"),
    optimization_level=1,
    skip_cache_lookup=False,
    salt="",
    warnings=(),
)
COMMON_FIELDS = ("name", "model", "model_roots", "config", "skip_cache_lookup", "warnings")
OWN_FIELDS = ("name", "model", "model_roots", "warnings")
BUNDLE: dict[str, Any] = {"checkpoint_digest": "a", "toolchain": {"torch": "2"}, "code_digest": "b"}
EXECUTABLE: dict[str, Any] = {"graph_digest": "a", "toolchain": {"torch": "2"}, "code_digest": "b"}

WIDER = resolve_config({"neuron_config": {"seq_len": 256}}, checkpoint_dtype="float32").config


@pytest.mark.parametrize(
    ("changes", "of_bundle", "of_executable"),
    [
        ({"salt": "x"}, True, True),
        ({"optimization_level": 2}, True, True),
        ({"target": Target(kind="cpu", isa="x86-64-v4")}, True, True),
        # It reaches an executable through its graph.
        ({"config": WIDER}, True, False),
        ({"name": "other"}, False, False),
        ({"model": Path("/copy")}, False, False),
        ({"skip_cache_lookup": True}, False, False),
        ({"warnings": ("w",)}, False, False),
    ],
)
def test_what_changes_which_digest(changes: dict[str, Any], of_bundle: bool, of_executable: bool) -> None:
    changed = msgspec.structs.replace(SPEC, **changes)
    assert (changed.bundle_action_digest(**BUNDLE) != SPEC.bundle_action_digest(**BUNDLE)) == of_bundle
    differs = changed.executable_action_digest(**EXECUTABLE) != SPEC.executable_action_digest(**EXECUTABLE)
    assert differs == of_executable


@pytest.mark.parametrize("name", ["checkpoint_digest", "graph_digest", "toolchain", "code_digest"])
def test_every_input_counts(name: str) -> None:
    for digest, given in ((SPEC.bundle_action_digest, BUNDLE), (SPEC.executable_action_digest, EXECUTABLE)):
        assert name not in given or digest(**given | {name: {"x": "y"}}) != digest(**given)


EXPERTS = {
    "moe_tp_degree": 2,
    "tp_degree": 2,
    "normalize_top_k_affinities": False,
    "router_config": {"act_fn": "sigmoid"},
}
FUSED = {"speculation_length": 4, "enable_fused_speculation": True, "on_device_sampling_config": {}}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"neuron_config": {"on_device_sampling_config": {"do_sample": True}, "modules_to_not_convert": ["lm_head"]}},
        {"neuron_config": EXPERTS, "hidden_size": 64, "attribute_map": {"num_heads": "num_attention_heads"}},
        {
            "neuron_config": EXPERTS | FUSED,
            "fused_spec_config": {"draft_model_path": "draft", "draft_config": {"neuron_config": EXPERTS}},
        },
    ],
)
def test_job_specs_travel_whole(document: dict[str, Any]) -> None:
    config = resolve_config(document, checkpoint_dtype="float32", target="trn2").config
    spec = msgspec.structs.replace(SPEC, config=config)
    travelled = read_spec(write_spec(spec))
    assert travelled == spec
    assert type(travelled.config.neuron_config) is type(config.neuron_config)
    assert isinstance(config.neuron_config, MoENeuronConfig) == ("moe_tp_degree" in document.get("neuron_config", {}))


def test_stored_job_specs_keep_their_tags() -> None:
    # Databases hold records that earlier versions wrote under these names.
    shard = ShardJobSpec(**{name: getattr(SPEC, name) for name in COMMON_FIELDS}, executables="sha256:0")
    adapter = AdapterJobSpec(**{name: getattr(SPEC, name) for name in OWN_FIELDS}, executables="sha256:0")
    tags = [msgspec.json.decode(write_spec(spec))["type"] for spec in (SPEC, shard, adapter)]
    assert tags == ["CompileSpec", "ShardSpec", "AdapterSpec"]
    assert [read_spec(write_spec(spec)) for spec in (shard, adapter)] == [shard, adapter]


def test_the_name_of_an_adapter_is_in_its_bundle() -> None:
    spec = AdapterJobSpec(**{name: getattr(SPEC, name) for name in OWN_FIELDS}, executables="sha256:0")
    for changes in ({"name": "other"}, {"executables": "sha256:1"}):
        changed = msgspec.structs.replace(spec, **changes)
        assert changed.bundle_action_digest(**BUNDLE) != spec.bundle_action_digest(**BUNDLE)
