"""Warnings: values that are valid but may not do what their author expects."""

from typing import Any

import pytest

from tests.unit.compiler_svc.config.resolving import resolve


class TestWarnings:
    @pytest.mark.parametrize(
        ("values", "beginning"),
        [
            ({"logical_nc_config": 2}, "neuron_config.logical_nc_config: 2 is ignored"),
            ({"rpl_reduce_dtype": "float32"}, "neuron_config.rpl_reduce_dtype: 'float32' is ignored"),
            ({"vocab_parallel": True}, "neuron_config.vocab_parallel: ignored: one rank"),
            ({"attn_kernel_enabled": True}, "neuron_config.attn_kernel_enabled: True is ignored"),
            ({"context_encoding_buckets": [64]}, "neuron_config: bucket lists are ignored"),
            (
                {"enable_bucketing": True, "context_encoding_buckets": [64], "padding_side": "left"},
                "neuron_config.padding_side: prompts longer than the last of context_encoding_buckets are refused",
            ),
            (
                {"enable_bucketing": True, "token_generation_buckets": [64]},
                "neuron_config.token_generation_buckets: sequences end at the last bucket",
            ),
            ({"max_length": 256}, "neuron_config.max_length: KV positions beyond seq_len, which is 128,"),
            ({"batch_size": 2}, "neuron_config.is_continuous_batching: the runtime lets requests join"),
            ({"output_logits": True}, "neuron_config.output_logits: logits are the output anyway"),
            (
                {"on_device_sampling_config": {"top_k": 5}},
                "neuron_config.on_device_sampling_config: top_k, top_p and temperature are ignored",
            ),
        ],
    )
    def test_what_does_not_count_is_said(self, values: dict[str, Any], beginning: str) -> None:
        (warning,) = resolve(**values).warnings
        assert warning.startswith(beginning)

    def test_a_plain_configuration_has_none(self) -> None:
        sampling = {"dynamic": True, "global_topk": 64, "top_k": 5}
        resolution = resolve(
            seq_len=256,
            batch_size=4,
            is_continuous_batching=True,
            output_logits=True,
            on_device_sampling_config=sampling,
        )
        assert resolution.warnings == ()
