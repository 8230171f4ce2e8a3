"""The configuration that a bundle was compiled with."""

import msgspec
import pytest

from compiler_svc.config import resolve_config
from compiler_svc.errors import GraphAbiMismatch
from compiler_svc.planning.weights_fit import read_config
from tests.bundles.samples import sample_manifest


def test_attributes_that_are_newer_than_a_bundle_have_their_defaults() -> None:
    manifest = sample_manifest()
    expected = resolve_config(
        {"neuron_config": {"seq_len": 16, "tp_degree": 2, "torch_dtype": "bfloat16"}}, checkpoint_dtype=None
    )
    assert "pa_num_blocks" not in manifest.config["neuron_config"]
    assert read_config(manifest) == expected.config


def test_what_is_written_is_read() -> None:
    config = resolve_config({"neuron_config": {"batch_size": 3, "seq_len": 64}}, checkpoint_dtype="float32").config
    manifest = msgspec.structs.replace(sample_manifest(), config={"hidden_size": 8} | config.to_json())
    assert read_config(manifest) == config


@pytest.mark.parametrize("neuron_config", [{"later_attribute": 1}, {"kv_cache_quant": True}, {"seq_len": 0}])
def test_the_configuration_of_another_version_is_refused(neuron_config: dict[str, object]) -> None:
    manifest = msgspec.structs.replace(sample_manifest(), config={"neuron_config": neuron_config})
    with pytest.raises(GraphAbiMismatch, match=next(iter(neuron_config))):
        read_config(manifest)
