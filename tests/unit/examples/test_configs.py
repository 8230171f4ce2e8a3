"""The shipped configurations are accepted by the compiler, and say what their names promise."""

from __future__ import annotations

import pytest
import yaml

from compiler_svc.config import NeuronConfig, resolve_config
from tests.repository import ROOT

CONFIGS = ROOT / "examples" / "configs"


def resolve(name: str) -> NeuronConfig:
    document = yaml.safe_load((CONFIGS / name).read_text())
    return resolve_config(document, checkpoint_dtype="float32").config.neuron_config


@pytest.mark.parametrize(
    ("name", "dtype", "logits"),
    [
        ("tiny.yaml", "float32", False),
        ("tiny-logits.yaml", "float32", True),
        ("tiny-bf16.yaml", "bfloat16", False),
    ],
)
def test_config(name: str, dtype: str, logits: bool) -> None:
    config = resolve(name)
    assert (config.torch_dtype, config.output_logits) == (dtype, logits)
    assert (config.context_encoding_buckets, config.token_generation_buckets) == ((64, 128), (128, 256))
    assert config.on_device_sampling_config is not None


def test_prefix_caching() -> None:
    config = resolve("tiny-prefix-caching.yaml")
    assert config.is_prefix_caching
    assert config.pa_num_blocks * config.pa_block_size == config.batch_size * config.seq_len


def test_every_config_is_tested() -> None:
    tested = {"tiny.yaml", "tiny-logits.yaml", "tiny-bf16.yaml", "tiny-prefix-caching.yaml"}
    assert {path.name for path in CONFIGS.iterdir()} == tested
