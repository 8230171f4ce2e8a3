"""Whatever a configuration says, it resolves or is refused by name."""

import json

from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.config import parse_document, resolve_config
from compiler_svc.errors import ConfigInvalid, FeatureNotServed
from tests.fuzzing import broken, fuzz, mutated

CONFIG = {
    "neuron_config": {
        "seq_len": 256,
        "max_context_length": 128,
        "batch_size": 4,
        "max_batch_size": 4,
        "ctx_batch_size": 1,
        "tkg_batch_size": 4,
        "tp_degree": 2,
        "torch_dtype": "bfloat16",
        "padding_side": "right",
        "enable_bucketing": True,
        "context_encoding_buckets": [64, 128],
        "token_generation_buckets": [128, 256],
        "max_new_tokens": 64,
        "output_logits": False,
        "save_sharded_checkpoint": True,
        "on_device_sampling_config": {
            "dynamic": True,
            "do_sample": True,
            "top_k": 50,
            "top_p": 0.9,
            "temperature": 1.0,
        },
    }
}
ENCODED = json.dumps(CONFIG).encode()


@fuzz()
@given(data=mutated(CONFIG) | broken(ENCODED), checkpoint_dtype=st.sampled_from([None, "float32", "bfloat16", "?"]))
def test_configurations(data: bytes, checkpoint_dtype: str | None) -> None:
    try:
        document = parse_document(data.decode(errors="replace"))
        resolution = resolve_config(document, checkpoint_dtype=checkpoint_dtype)
    except (ConfigInvalid, FeatureNotServed):
        return
    # What was resolved says everything, and resolves to itself.
    again = resolve_config(resolution.config.to_json(), checkpoint_dtype=checkpoint_dtype)
    assert again.config == resolution.config
