from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bundle.abi.inputs import PROCESSORS
from bundle.abi.outputs import list_flags
from bundle.manifest import Sampling, TensorSpec, WeightSet
from compiler_svc.models.registry import describe_model, find_family
from compiler_svc.models.specs import AdapterSlots
from compiler_svc.models.state import KeptAs
from compiler_svc.models.transforms import Adapters, ModelChanges, with_adapters
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import describe_adapters, describe_state, describe_submodel
from execution.errors import StepInvalid
from execution.executors.arguments import StepArguments, make_tensors
from execution.step import StepForm
from tests.bundles.manifests import describe_executable, make_manifest
from tests.checkpoints.specs import HOST_SAMPLING
from tests.unit.compiler_svc.models.sizes import SIZES

CONFIG = SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_key_value_heads": 4}
ON_DEVICE = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", temperature=0.7)
GREEDY = msgspec.structs.replace(ON_DEVICE, temperature=0.0)


def make_spec(**changes: Any) -> GraphSpec:
    defaults: dict[str, Any] = {
        "description": describe_model(CONFIG),
        "model": find_family(CONFIG).model,
        "dtype": "bfloat16",
        "tp_degree": 1,
        "num_slots": 6,
        "max_length": 64,
        "ctx_batch_size": 2,
        "tkg_batch_size": 5,
        "sampling": HOST_SAMPLING,
        "output_logits": False,
    }
    return GraphSpec(**(defaults | changes))


def test_context_encoding() -> None:
    submodel = describe_submodel(make_spec(), "context_encoding", 32)
    assert (submodel.tag, submodel.bucket, submodel.batch_size) == ("context_encoding_32", (32,), 2)
    assert submodel.inputs == (
        TensorSpec(name="input_ids", dtype="int32", shape=(2, 32)),
        TensorSpec(name="position_ids", dtype="int32", shape=(2, 32)),
        TensorSpec(name="seq_ids", dtype="int32", shape=(2,)),
        TensorSpec(name="num_tokens", dtype="int32", shape=(2,)),
    )
    assert submodel.outputs == (TensorSpec(name="logits", dtype="float32", shape=(2, 100)),)
    assert submodel.state == ("k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1")
    assert submodel.flags == ("logits",)


def test_token_generation() -> None:
    sampling = msgspec.structs.replace(ON_DEVICE, dynamic=True)
    submodel = describe_submodel(make_spec(sampling=sampling, output_logits=True), "token_generation", 64)
    assert (submodel.tag, submodel.bucket, submodel.batch_size) == ("token_generation_64", (64,), 5)
    assert submodel.inputs == (
        TensorSpec(name="input_ids", dtype="int32", shape=(5, 1)),
        TensorSpec(name="position_ids", dtype="int32", shape=(5, 1)),
        TensorSpec(name="seq_ids", dtype="int32", shape=(5,)),
        TensorSpec(name="sampling_params", dtype="float32", shape=(5, 3)),
        TensorSpec(name="noise_keys", dtype="int32", shape=(5, 2)),
    )
    assert submodel.outputs == (
        TensorSpec(name="tokens", dtype="int32", shape=(5,)),
        TensorSpec(name="logits", dtype="float32", shape=(5, 100)),
    )
    assert submodel.flags == ("logits", "noise_keys", "sampling_params", "tokens")
    others = {"left_padded", "rank_logits", "block_kv", "computed_context", "prompt_lens", "live_rows", "adapters"}
    others |= {PROCESSORS, "cuts", "prompt_logprobs", "embeddings"}
    of_earlier_releases = {"rand"}
    assert set(submodel.flags) == list_flags() - others - of_earlier_releases


ROOM = Adapters(slots=AdapterSlots(slots=4, rank=3), targets=("o_proj", "v_proj"))


def test_rows_name_their_adapters_if_layers_have_room_for_some() -> None:
    spec = make_spec(description=with_adapters(describe_model(CONFIG), ROOM), tp_degree=2)
    for name, rows in (("context_encoding", 2), ("token_generation", 5)):
        submodel = describe_submodel(spec, name, 64)
        assert submodel.flags == ("adapters", "logits")
        assert submodel.inputs[-1] == TensorSpec(name="adapter_ids", dtype="int32", shape=(rows,))
    (weights,) = describe_adapters(spec)
    shapes = {one.name: (one.dtype, one.shape) for one in weights.shards[1].tensors if "layers.1" in one.name}
    heads, hidden = SIZES["num_attention_heads"] // 2, SIZES["hidden_size"]
    head_dim = hidden // SIZES["num_attention_heads"]
    at = "model.layers.1.self_attn"
    assert shapes == {
        f"{at}.o_proj.lora_A": ("bfloat16", (4, 3, heads * head_dim)),
        f"{at}.o_proj.lora_B": ("bfloat16", (4, hidden, 3)),
        f"{at}.v_proj.lora_A": ("bfloat16", (4, 3, hidden)),
        f"{at}.v_proj.lora_B": ("bfloat16", (4, 2 * head_dim, 3)),
    }


def test_room_for_adapters_is_part_of_what_a_graph_spec_says() -> None:
    plain = describe_model(CONFIG)
    assert describe_adapters(make_spec()) == ()
    assert "adapters" not in make_spec().to_json()
    rooms = [replace(ROOM, slots=AdapterSlots(slots=slots, rank=rank)) for slots, rank in ((4, 3), (5, 3), (4, 4))]
    said = [make_spec(description=with_adapters(plain, room)).to_json() for room in rooms]
    assert all(one["parameters"] == make_spec().to_json()["parameters"] for one in said)
    assert [one["adapters"]["model.layers.0.self_attn.v_proj.lora_B"] for one in said] == [
        (slots, 4 * SIZES["hidden_size"] // SIZES["num_attention_heads"], rank)
        for slots, rank in ((4, 3), (5, 3), (4, 4))
    ]


def test_steps_take_no_slot_behind_the_last() -> None:
    spec = make_spec(description=with_adapters(describe_model(CONFIG), ROOM))
    executable = describe_executable(describe_submodel(spec, "token_generation", 64))
    sets = (WeightSet(name="model", shards=()), *describe_adapters(spec))
    manifest = make_manifest(executables=[executable], weight_sets=sets)
    arguments = StepArguments(manifest)
    inputs = make_tensors(executable.inputs, StepForm(manifest, executable).make_idle())
    assert inputs["adapter_ids"].tolist() == [-1] * 5
    inputs["adapter_ids"][2] = 3
    arguments.order(executable, inputs)
    for slot in (-2, 4):
        inputs["adapter_ids"][2] = slot
        with pytest.raises(StepInvalid, match=rf"inputs\[adapter_ids\]: got {slot}; accepted: -1 to 3"):
            arguments.order(executable, inputs)


@pytest.mark.parametrize(("tp_degree", "share"), [(1, 100), (3, 34)])
def test_tokens_alone_come_with_the_logits_of_a_rank(tp_degree: int, share: int) -> None:
    spec = make_spec(sampling=GREEDY, returns_internal=True, tp_degree=tp_degree)
    submodel = describe_submodel(spec, "token_generation", 64)
    assert submodel.outputs == (
        TensorSpec(name="tokens", dtype="int32", shape=(5,)),
        TensorSpec(name="rank_logits", dtype="bfloat16", shape=(5, share)),
    )
    assert submodel.flags == ("rank_logits", "tokens")


@pytest.mark.parametrize("changes", [{"sampling": HOST_SAMPLING}, {"sampling": GREEDY, "output_logits": True}])
def test_logits_that_clients_may_see_are_not_returned_twice(changes: dict[str, Any]) -> None:
    submodel = describe_submodel(make_spec(returns_internal=True, **changes), "token_generation", 64)
    assert "logits" in submodel.flags
    assert "rank_logits" not in submodel.flags


@pytest.mark.parametrize(
    ("sampling", "flags"),
    [
        (HOST_SAMPLING, {"logits"}),
        (msgspec.structs.replace(HOST_SAMPLING, dynamic=True), {"logits"}),
        (msgspec.structs.replace(ON_DEVICE, temperature=0.0), {"tokens"}),
        (msgspec.structs.replace(ON_DEVICE, top_k=1), {"tokens"}),
        (ON_DEVICE, {"tokens", "noise_keys"}),
        (msgspec.structs.replace(ON_DEVICE, deterministic=True), {"tokens"}),
        (msgspec.structs.replace(ON_DEVICE, dynamic=True), {"tokens", "noise_keys", "sampling_params"}),
        (
            msgspec.structs.replace(ON_DEVICE, dynamic=True, temperature=0.0),
            {"tokens", "noise_keys", "sampling_params"},
        ),
        (msgspec.structs.replace(ON_DEVICE, dynamic=True, deterministic=True), {"tokens", "sampling_params"}),
    ],
)
def test_flags_follow_the_sampling(sampling: Sampling, flags: set[str]) -> None:
    submodel = describe_submodel(make_spec(sampling=sampling), "token_generation", 64)
    assert set(submodel.flags) == flags
    named = {tensor.name for tensor in (*submodel.inputs, *submodel.outputs)}
    assert named & list_flags() == flags


@pytest.mark.parametrize(
    ("tp_degree", "kv_heads"),
    [
        (2, ((0, 1), (2, 3))),
        # Four KV heads of two query heads each: every query head has a copy, and one is padding.
        (3, ((0, 0, 1), (1, 2, 2), (3, 3, -1))),
        (8, ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))),
    ],
)
def test_state_of_several_ranks(tp_degree: int, kv_heads: tuple[tuple[int, ...], ...]) -> None:
    layout = describe_state(make_spec(tp_degree=tp_degree))
    assert (layout.kv_heads_by_rank, layout.num_slots) == (kv_heads, 6)
    assert [tensor.name for tensor in layout.tensors] == ["k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1"]
    for tensor in layout.tensors:
        assert (tensor.dtype, tensor.shape) == ("bfloat16", (6, len(kv_heads[0]), 64 + 1, 8))
        assert tensor.axes == ("slot", "kv_head", "position", "head_dim")


def test_attention_computes_in_one_dtype_and_keeps_in_another() -> None:
    plain = make_spec()
    changes = ModelChanges(attention_dtype="float32", kept=KeptAs(dtype="float8_e4m3fn"))
    kept = {"dtype": "float8_e4m3fn", "key_scales": None, "value_scales": None}
    spec = make_spec(description=changes.apply(plain.description))
    assert {tensor.dtype for tensor in describe_state(spec).tensors} == {"float8_e4m3fn"}
    assert [tensor.shape for tensor in describe_state(spec).tensors] == [
        tensor.shape for tensor in describe_state(plain).tensors
    ]
    assert spec.to_json() == plain.to_json() | {"attention_dtype": "float32", "kept": kept}


def make_sliding_spec(window: int, **changes: Any) -> GraphSpec:
    """The second of two layers has a window."""
    config = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}
    return make_spec(description=describe_model(config | {"sliding_window": window}), **changes)


def test_state_of_layers_with_a_window_is_a_ring() -> None:
    """Windows of 9 positions and steps of 16 need 24, which are rounded up to a multiple of 16."""
    layout = describe_state(make_sliding_spec(9, largest_step=16))
    assert [tensor.shape for tensor in layout.tensors] == [(7, 4, 64, 8)] * 2 + [(7, 4, 32, 8)] * 2
    assert [tensor.window for tensor in layout.tensors] == [0, 0, 9, 9]
    assert layout.max_rewound_tokens == 24


@pytest.mark.parametrize(
    ("window", "changes", "positions"),
    [
        (9, {}, 64 + 1),
        (9, {"num_blocks": 8, "block_tokens": 8}, 8),
        (9, {"largest_step": 48}, 64),
        (64, {"largest_step": 1}, 64),
        (1000, {"largest_step": 16}, 64),
    ],
    ids=["target without rings", "blocks", "long steps", "long window", "longer window"],
)
def test_state_of_other_layers_has_all_positions(window: int, changes: dict[str, Any], positions: int) -> None:
    layout = describe_state(make_sliding_spec(window, **changes))
    assert {tensor.shape[2] for tensor in layout.tensors} == {positions}
    assert {tensor.window for tensor in layout.tensors} == {0}
    assert layout.max_rewound_tokens is None


def test_what_changes_logits_comes_beside_what_does_not() -> None:
    spec = make_spec(sampling=msgspec.structs.replace(ON_DEVICE, dynamic=True), optional_inputs=(PROCESSORS,))
    plain, processing = (describe_submodel(spec, "token_generation", 64, processes=one) for one in (False, True))
    assert (plain.tag, processing.tag) == ("token_generation_64", "token_generation_64_processors")
    assert set(processing.flags) - set(plain.flags) == {PROCESSORS, "cuts"}
    added = {one.name: one.shape for one in processing.inputs[len(plain.inputs) :]}
    pairs = dict.fromkeys(("pair_ids", "pair_bias", "pair_factor", "pair_penalty"), (5, 100))
    assert added == {"token_bitmask": (5, 4), **pairs, "cuts": (5, 2)}
    greedy = describe_submodel(replace(spec, sampling=GREEDY), "token_generation", 64, processes=True)
    assert greedy.inputs[-1].name == "pair_penalty", "nothing would read cuts"
    without = make_spec(sampling=spec.sampling)
    assert describe_submodel(without, "token_generation", 64) == plain
