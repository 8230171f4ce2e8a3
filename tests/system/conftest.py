"""The shipped model on the run's services."""

from collections.abc import Iterator

import pytest

from tests.repository import ROOT
from tests.servers.stack import Stack

TINY = ROOT / "examples/models/kiln-tiny"
PIRATE = ROOT / "examples/models/kiln-tiny-pirate"
CONFIG = {
    "neuron_config": {
        "seq_len": 256,
        "batch_size": 4,
        "torch_dtype": "float32",
        "enable_bucketing": True,
        "context_encoding_buckets": [64, 128],
        "token_generation_buckets": [128, 256],
        "is_continuous_batching": True,
        "ctx_batch_size": 1,
        "output_logits": True,
        "on_device_sampling_config": {"dynamic": True, "global_topk": 64},
    }
}


@pytest.fixture(scope="module")
def tiny(stack: Stack) -> Iterator[str]:
    """The shipped model at -O0, loaded."""
    stack.provide("tiny", TINY, CONFIG)
    with stack.deployed("tiny"):
        yield "tiny"
