"""Which test shows what an attribute does that the cpu target honours: in the compiled result or at run time."""

from typing import Final

_PLAN: Final = "tests/compiler_svc/builds/test_honoured_attributes.py::test_plan"
_GRAPH: Final = "tests/compiler_svc/builds/test_honoured_attributes.py::test_graph"
_SAMPLING: Final = "tests/compiler_svc/builds/test_honoured_attributes.py::test_graph_of_sampling"
_LISTS: Final = f"{_PLAN}[context_encoding_buckets-token_generation_buckets]"
_WEIGHTS: Final = "tests/compiler_svc/builds/test_weights.py::test_executables_and_weights_apart"
_CAPS: Final = "tests/compiler_svc/builds/test_plan.py::test_active_tokens_and_positions_cap_buckets_and_limits"
_LEFT: Final = "tests/compiler_svc/models/test_left_padding.py::test_executable_says_on_which_side_it_is_padded"
_RUNTIME: Final = "tests/compiler_svc/builds/test_plan.py::test_what_the_configuration_asks_of_the_runtime"

#: Node id of a test, by class and attribute.
SHOWN_BY: Final = {
    "InferenceConfig.neuron_config": f"{_PLAN}[seq_len]",
    "InferenceConfig.attribute_map": "tests/compiler_svc/weights/test_overrides.py::test_an_alias_in_the_checkpoint",
    "NeuronConfig.batch_size": f"{_PLAN}[batch_size]",
    "NeuronConfig.padding_side": _LEFT,
    "NeuronConfig.seq_len": f"{_PLAN}[seq_len]",
    "NeuronConfig.max_context_length": f"{_PLAN}[max_context_length]",
    "NeuronConfig.max_new_tokens": f"{_PLAN}[max_new_tokens]",
    "NeuronConfig.max_length": f"{_PLAN}[max_length]",
    "NeuronConfig.n_active_tokens": _CAPS,
    "NeuronConfig.n_positions": _CAPS,
    "NeuronConfig.torch_dtype": f"{_PLAN}[torch_dtype]",
    "NeuronConfig.rpl_reduce_dtype": f"{_GRAPH}[rpl_reduce_dtype]",
    "NeuronConfig.cast_type": "tests/compiler_svc/models/test_dtypes.py::test_as_declared_weights_keep_their_dtypes",
    "NeuronConfig.save_sharded_checkpoint": _WEIGHTS,
    "NeuronConfig.skip_sharding": _WEIGHTS,
    "NeuronConfig.skip_warmup": "tests/runtime_svc/test_load_bundle.py::test_bundle_may_ask_for_no_warm_up",
    "NeuronConfig.allow_input_truncation": _RUNTIME,
    "NeuronConfig.tp_degree": f"{_PLAN}[tp_degree]",
    "NeuronConfig.output_logits": f"{_GRAPH}[output_logits]",
    "NeuronConfig.enable_bucketing": f"{_PLAN}[enable_bucketing]",
    "NeuronConfig.context_encoding_buckets": _LISTS,
    "NeuronConfig.token_generation_buckets": _LISTS,
    "NeuronConfig.max_batch_size": f"{_PLAN}[max_batch_size-tkg_batch_size]",
    "NeuronConfig.ctx_batch_size": f"{_PLAN}[ctx_batch_size]",
    "NeuronConfig.tkg_batch_size": f"{_PLAN}[max_batch_size-tkg_batch_size]",
    "NeuronConfig.on_device_sampling_config": f"{_GRAPH}[on_device_sampling_config]",
    "OnDeviceSamplingConfig.do_sample": f"{_SAMPLING}[do_sample-False]",
    "OnDeviceSamplingConfig.top_k": f"{_SAMPLING}[top_k-6]",
    "OnDeviceSamplingConfig.top_p": f"{_SAMPLING}[top_p-0.8]",
    "OnDeviceSamplingConfig.temperature": f"{_SAMPLING}[temperature-0.6]",
    "OnDeviceSamplingConfig.dynamic": f"{_SAMPLING}[dynamic-True]",
    "OnDeviceSamplingConfig.deterministic": f"{_SAMPLING}[deterministic-True]",
    "OnDeviceSamplingConfig.global_topk": f"{_SAMPLING}[global_topk-32]",
}
