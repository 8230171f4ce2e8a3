from typing import Any

import pytest

from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.config.submodels import describe_submodels

BUCKETS = {"enable_bucketing": True}
SHORT, LONG = {"seq_len": 512}, {"seq_len": 2048, "max_context_length": 1024}
MEDUSA = {"is_medusa": True, "num_medusa_heads": 2, "medusa_speculation_length": 4, "medusa_tree": [[0], [1], [0, 0]]}
MEDUSA |= {"seq_len": 512, "max_length": 1024}
PREFIXES = {"is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": 32, "pa_num_blocks": 64}
FUSED = {"speculation_length": 5, "enable_fused_speculation": True, "on_device_sampling_config": {}}
BATCHES = {"batch_size": 8, "seq_len": 256, "token_generation_batches": [1, 4]}
#: The examples of the feature guide.
LISTED = BUCKETS | {"seq_len": 8192, "max_context_length": 4096}
LISTED |= {"context_encoding_buckets": [1024, 2048, 4096], "token_generation_buckets": [8192]}
GRID = PREFIXES | BUCKETS | {"seq_len": 2048, "context_encoding_buckets": [512, 1024, 2048]}
GRID |= {"prefix_buckets": [512, 1024], "token_generation_buckets": [2048]}

GENERATION, SPECULATION, MEDUSAS = "token_generation", "speculation", "medusa_speculation"
#: Configuration, buckets of prompts, what generates, its buckets, and rows of both. Buckets of one length are numbers.
CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...], str, tuple[Any, ...], tuple[int, int]]] = {
    "none": ({"seq_len": 1000, "max_context_length": 600}, (600,), GENERATION, (1000,), (1, 1)),
    "generated": (SHORT | BUCKETS | {"batch_size": 4}, (128, 256, 512), GENERATION, (128, 256, 512), (4, 4)),
    "listed": (LISTED, (1024, 2048, 4096), GENERATION, (8192,), (1, 1)),
    "continuous": ({"max_batch_size": 8, "tkg_batch_size": 8}, (128,), GENERATION, (128,), (1, 8)),
    "batches": (BATCHES, (256,), GENERATION, ((8, 256), (4, 256), (1, 256)), (8, 8)),
    "batches-of-the-largest": (BATCHES | {"batch_size": 4}, (256,), GENERATION, ((4, 256), (1, 256)), (4, 4)),
    "batches-and-buckets": (
        BATCHES | BUCKETS,
        (128, 256),
        GENERATION,
        ((8, 128), (8, 256), (4, 128), (4, 256), (1, 128), (1, 256)),
        (8, 8),
    ),
    "prefixes": (PREFIXES | LONG, ((1024, 0), (1024, 1024)), GENERATION, ((1, 2048),), (1, 1)),
    "prefixes-and-buckets": (
        PREFIXES | LONG | BUCKETS,
        ((512, 0), (512, 512), (512, 1024), (1024, 0), (1024, 512), (1024, 1024)),
        GENERATION,
        ((1, 256), (1, 512), (1, 1024), (1, 2048)),
        (1, 1),
    ),
    "listed-prefixes": (
        GRID,
        tuple((active, prefix) for active in (512, 1024, 2048) for prefix in (0, 512, 1024)),
        GENERATION,
        ((1, 2048),),
        (1, 1),
    ),
    "draft-outside": (SHORT | {"speculation_length": 5}, (512,), SPECULATION, (512,), (1, 1)),
    "fused": (
        FUSED | SHORT | BUCKETS | {"batch_size": 2},
        (128, 256, 512),
        "fused_speculation",
        (128, 256, 512),
        (2, 2),
    ),
    "fused-prefixes": (
        FUSED | PREFIXES | SHORT | BUCKETS,
        ((512, 0), (512, 512)),
        "fused_speculation",
        ((1, 256), (1, 512)),
        (1, 1),
    ),
    "medusa": (MEDUSA, (512,), MEDUSAS, (512,), (1, 1)),
    "medusa-has-one-bucket-always": (MEDUSA | BUCKETS, (128, 256, 512), MEDUSAS, (512,), (1, 1)),
}


def resolve(**neuron_config: Any) -> NeuronConfig:
    document = {"neuron_config": neuron_config}
    if neuron_config.get("enable_fused_speculation"):
        same = ("batch_size", "seq_len", "enable_bucketing")
        draft = {name: neuron_config[name] for name in same if name in neuron_config}
        document["fused_spec_config"] = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft}}
    return resolve_config(document, checkpoint_dtype=None, target="trn2").config.neuron_config


@pytest.mark.parametrize("case", CASES)
def test_submodels_with_their_rows_and_buckets(case: str) -> None:
    config, *expected, rows = CASES[case]
    prompts, generation, lengths = expected
    found = describe_submodels(resolve(**config))
    assert [(one.name, one.batch_size) for one in found] == list(
        zip(("context_encoding", generation), rows, strict=True)
    )
    assert [one.buckets for one in found] == [
        tuple((one,) if isinstance(one, int) else one for one in buckets) for buckets in (prompts, lengths)
    ]
