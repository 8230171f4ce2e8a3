"""NxD Inference's files and Transformers NeuronX's names, from the command line to bundles."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.servers.stack import KILN, Stack
from tests.system.conftest import CONFIG, PIRATE, TINY

CONFIGS = Path(__file__).with_name("configs")
#: As NxD Inference 0.9 writes it, with the options of `CONFIG`.
SAVED = CONFIGS / "neuron_config.json"
#: What Kiln writes of the same.
EXPORTED = CONFIGS / "exported_neuron_config.json"


@pytest.fixture(scope="module")
def plain(stack: Stack) -> dict[str, Any]:
    """The bundle of a document that a user wrote."""
    return stack.compile("tiny", TINY, CONFIG)


def compile_file(stack: Stack, path: Path, name: str, *options: str, check: bool = True) -> dict[str, Any]:
    arguments = ("compile", path, "--model", TINY, "--name", name, "-O", "0", *options)
    return stack.kiln(*arguments, check=check).last


def test_a_saved_file_makes_the_same_bundle(stack: Stack, plain: dict[str, Any]) -> None:
    compiled = compile_file(stack, SAVED, "saved")
    assert (compiled["bundle"], compiled["cache"]) == (plain["bundle"], "hit")
    warnings = compiled["warnings"]
    assert "metadata: it is for NxD Inference only, and kept nowhere" in warnings
    assert any(warning.endswith("of these names: 'output_router_aux_weight'") for warning in warnings)
    # Equal values, and those of the other transformers, change nothing.
    (ignored,) = [warning for warning in warnings if warning.endswith("because the model does not depend on it")]
    assert ignored.startswith("_name_or_path, ")
    assert not {"hidden_size", "rope_theta", "rope_scaling"} & set(ignored.partition(":")[0].split(", "))


def test_the_file_of_a_bundle(stack: Stack, plain: dict[str, Any], tmp_path: Path) -> None:
    environment = os.environ | {"KILN_COMPILER": stack.compiler}
    result = subprocess.run(
        [KILN, "config", "export", plain["version"]], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == EXPORTED.read_text()
    path = tmp_path / "neuron_config.json"
    record = stack.kiln("config", "export", plain["version"], "-o", path).last
    assert path.read_text() == result.stdout
    assert record["config"] == json.loads(result.stdout)
    again = compile_file(stack, path, "again")
    assert (again["bundle"], again["cache"]) == (plain["bundle"], "hit")
    # Every value is set now, those that no document names and those that this target ignores among them.
    new = {warning.partition(":")[0] for warning in again["warnings"] if warning not in plain["warnings"]}
    assert new == {"neuron_config", "neuron_config.async_mode"}


@pytest.mark.slow
def test_overrides_change_the_bundle(stack: Stack, plain: dict[str, Any]) -> None:
    overrides = {
        "neuron_config.context_encoding_buckets": "[64]",
        "neuron_config.token_generation_buckets": "[128]",
        "rope_theta": "1e6",
        "eos_token_id": "7",
        "use_cache": "false",
    }
    options = [word for path, value in overrides.items() for word in ("--override", f"{path}={value}")]
    compiled = compile_file(stack, SAVED, "overridden", *options)
    assert compiled["bundle"] != plain["bundle"]
    assert [executable["tag"] for executable in compiled["executables"]] == [
        "context_encoding_64",
        "token_generation_128",
    ]
    config = stack.kiln("config", "show", compiled["version"]).last["config"]
    assert config["model_attributes"] == {"rope_theta": 1e6, "eos_token_id": 7}
    assert config["rope"]["theta"] == 1e6
    assert config["neuron_config"]["token_generation_buckets"] == [128]
    # The executables computed what transformers does with this angle, or they would not have been published.
    manifest = stack.kiln("bundles", "show", compiled["version"]).last["manifest"]
    assert manifest["tokens"]["eos"] == [7]
    exported = stack.kiln("config", "export", compiled["version"]).last["config"]
    assert exported["rope_theta"] == exported["rope_parameters"]["rope_theta"] == 1e6
    assert exported["neuron_config"]["context_encoding_buckets"] == [64]
    check_other_weights(stack, compiled["version"])


def check_other_weights(stack: Stack, executables: str) -> None:
    """Weights for executables are checked, and serve, with the attributes that those were compiled with."""
    sharded = stack.kiln("shard-weights", executables, "--model", PIRATE, "--name", "pirate").last
    manifest = stack.kiln("bundles", "show", sharded["version"]).last["manifest"]
    assert manifest["config"]["model_attributes"] == {"rope_theta": 1e6, "eos_token_id": 7}
    assert manifest["tokens"]["eos"] == [7]


@pytest.mark.slow
def test_options_of_transformers_neuronx_make_the_same_bundle(stack: Stack, plain: dict[str, Any]) -> None:
    options = {
        "batch_size": 4,
        "prompt_batch_size": 1,
        "n_positions": 256,
        "amp": "f32",
        "group_query_attention": "shard-over-heads",
        "on_device_generation": {"dynamic": True, "top_k": 1, "global_top_k": 64},
    }
    rest = {"output_logits": True, "is_continuous_batching": True}
    compiled = stack.compile("neuronx", TINY, {"transformers_neuronx": options, "neuron_config": rest})
    assert [executable["tag"] for executable in compiled["executables"]] == [
        "context_encoding_64",
        "context_encoding_128",
        "token_generation_128",
        "token_generation_256",
    ]
    assert compiled["bundle"] == plain["bundle"]


@pytest.mark.slow
def test_attributes_that_a_model_lacks_may_come_from_the_configuration(stack: Stack) -> None:
    bare = stack.new_model("bare")
    bare.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    lacking = ("num_attention_heads", "num_hidden_layers", "vocab_size")
    (bare / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in lacking}))
    for name in ("model.safetensors", "tokenizer.json"):
        (bare / name).symlink_to(TINY / name)
    path = stack.home / "bare.json"
    path.write_text(json.dumps(CONFIG))
    options = ("compile", path, "--model", bare.relative_to(stack.models), "--name", "bare", "-O", "0")
    error = stack.kiln(*options, check=False).last["error"]
    assert error["reason"] == "MODEL_CONFIG_INVALID"
    assert error["metadata"]["family"] == "Llama"
    assert set(error["metadata"]["missing"].split(", ")) == {*lacking}
    path.write_text(json.dumps(CONFIG | {name: config[name] for name in lacking}))
    result = stack.kiln(*options).last
    assert {executable["cache"] for executable in result["executables"]} == {"hit"}
