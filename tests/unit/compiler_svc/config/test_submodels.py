from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.config import NeuronConfig, resolve_config
from compiler_svc.config.submodels import SubmodelShape, describe_submodels

MEDUSA = {
    "is_medusa": True,
    "num_medusa_heads": 2,
    "medusa_speculation_length": 4,
    "medusa_tree": [[0], [1], [0, 0]],
}
PREFIXES = {"is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": 32}
FUSED = {"speculation_length": 5, "enable_fused_speculation": True, "on_device_sampling_config": {}}


def resolve(**neuron_config: Any) -> NeuronConfig:
    document = {"neuron_config": neuron_config}
    if neuron_config.get("enable_fused_speculation"):
        same = ("batch_size", "max_batch_size", "tkg_batch_size", "seq_len", "max_length", "enable_bucketing")
        draft = {name: neuron_config[name] for name in same if name in neuron_config}
        document["fused_spec_config"] = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft}}
    return resolve_config(document, checkpoint_dtype=None, target="trn2").config.neuron_config


def describe(**neuron_config: Any) -> dict[str, tuple[int, tuple[tuple[int, ...], ...]]]:
    """Batch size and buckets, by submodel."""
    shapes = describe_submodels(resolve(**neuron_config))
    return {shape.name: (shape.batch_size, shape.buckets) for shape in shapes}


class TestPlain:
    def test_one_bucket_each_without_bucketing(self) -> None:
        assert describe_submodels(resolve(seq_len=1000, max_context_length=600)) == (
            SubmodelShape("context_encoding", 1, ((600,),)),
            SubmodelShape("token_generation", 1, ((1000,),)),
        )

    def test_generated_buckets(self) -> None:
        assert describe(seq_len=1000, max_context_length=513, enable_bucketing=True, batch_size=4) == {
            "context_encoding": (4, ((128,), (256,), (513,))),
            "token_generation": (4, ((128,), (256,), (512,), (1000,))),
        }

    def test_listed_buckets(self) -> None:
        """The example of the feature guide."""
        assert describe(
            seq_len=8192,
            max_context_length=4096,
            enable_bucketing=True,
            context_encoding_buckets=[1024, 2048, 4096],
            token_generation_buckets=[8192],
        ) == {
            "context_encoding": (1, ((1024,), (2048,), (4096,))),
            "token_generation": (1, ((8192,),)),
        }

    def test_rows_of_continuous_batching(self) -> None:
        config = {"max_batch_size": 8, "tkg_batch_size": 8, "is_continuous_batching": True}
        assert describe(**config) == {"context_encoding": (1, ((128,),)), "token_generation": (8, ((128,),))}

    def test_batches_of_token_generation(self) -> None:
        config = {"batch_size": 8, "seq_len": 256, "token_generation_batches": [1, 4]}
        assert describe(**config)["token_generation"] == (8, ((8, 256), (4, 256), (1, 256)))
        assert describe(**config, enable_bucketing=True) == {
            "context_encoding": (8, ((128,), (256,))),
            "token_generation": (8, ((8, 128), (8, 256), (4, 128), (4, 256), (1, 128), (1, 256))),
        }


class TestPrefixCaching:
    def test_without_bucketing(self) -> None:
        assert describe(**PREFIXES, seq_len=2048, max_context_length=1024, pa_num_blocks=64) == {
            "context_encoding": (1, ((1024, 0), (1024, 1024))),
            "token_generation": (1, ((1, 2048),)),
        }

    def test_generated_grid(self) -> None:
        assert describe(**PREFIXES, seq_len=2048, max_context_length=1024, pa_num_blocks=64, enable_bucketing=True) == {
            "context_encoding": (1, ((512, 0), (512, 512), (512, 1024), (1024, 0), (1024, 512), (1024, 1024))),
            "token_generation": (1, ((1, 256), (1, 512), (1, 1024), (1, 2048))),
        }

    def test_listed_grid(self) -> None:
        """The example of the feature guide."""
        prefill = describe(
            **PREFIXES,
            seq_len=2048,
            pa_num_blocks=64,
            enable_bucketing=True,
            context_encoding_buckets=[512, 1024, 2048],
            prefix_buckets=[512, 1024],
            token_generation_buckets=[2048],
        )
        assert prefill == {
            "context_encoding": (
                1,
                tuple((active, prefix) for active in (512, 1024, 2048) for prefix in (0, 512, 1024)),
            ),
            "token_generation": (1, ((1, 2048),)),
        }


class TestSpeculation:
    def test_a_draft_model_outside_leaves_speculation_in_place_of_token_generation(self) -> None:
        assert describe(speculation_length=5, seq_len=512, enable_bucketing=True) == {
            "context_encoding": (1, ((128,), (256,), (512,))),
            "speculation": (1, ((128,), (256,), (512,))),
        }
        assert describe(speculation_length=5, seq_len=512)["speculation"] == (1, ((512,),))

    def test_fused_speculation_has_the_rows_of_token_generation(self) -> None:
        assert describe(**FUSED, batch_size=2, seq_len=512, enable_bucketing=True) == {
            "context_encoding": (2, ((128,), (256,), (512,))),
            "fused_speculation": (2, ((128,), (256,), (512,))),
        }

    def test_fused_speculation_with_prefixes(self) -> None:
        assert describe(**FUSED, **PREFIXES, seq_len=512, pa_num_blocks=16, enable_bucketing=True) == {
            "context_encoding": (1, ((512, 0), (512, 512))),
            "fused_speculation": (1, ((1, 256), (1, 512))),
        }

    @pytest.mark.parametrize("enable_bucketing", [False, True])
    def test_medusa_has_one_bucket_always(self, enable_bucketing: bool) -> None:
        config = MEDUSA | {"seq_len": 512, "max_length": 1024, "enable_bucketing": enable_bucketing}
        assert describe(**config)["medusa_speculation"] == (1, ((512,),))
        assert set(describe(**config)) == {"context_encoding", "medusa_speculation"}


@given(
    seq_len=st.integers(1, 2**15),
    share=st.floats(0, 1),
    batch_size=st.integers(1, 8),
    mode=st.sampled_from([{}, {"enable_bucketing": True}]),
)
def test_buckets_ascend_to_the_longest_length(
    seq_len: int, share: float, batch_size: int, mode: dict[str, Any]
) -> None:
    longest_prompt = max(int(seq_len * share), 1)
    shapes = describe(seq_len=seq_len, max_context_length=longest_prompt, batch_size=batch_size, **mode)
    for name, longest in (("context_encoding", longest_prompt), ("token_generation", seq_len)):
        rows, buckets = shapes[name]
        assert rows == batch_size
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == (longest,)
