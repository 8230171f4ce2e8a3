import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bundle.abi.inputs import PROMPT_LOGPROBS
from bundle.abi.outputs import EMBEDDINGS
from bundle.manifest import Sampling
from compiler_svc.golden.check import GoldenResult, check_golden
from compiler_svc.golden.comparison import TOLERANCES
from compiler_svc.golden.errors import GoldenMismatch
from compiler_svc.models.layers import decoder
from compiler_svc.models.layers.decoder import CausalLm
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.trace.export import TracedSubmodel, export_submodel
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.submodels import ExecutableSpec
from execution.ranks.forkservers import RankForkservers
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.ropes import ROPES
from tests.checkpoints.specs import HOST_SAMPLING
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model

GREEDY = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", temperature=0.0)
DYNAMIC = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", dynamic=True, global_topk=64)
BAKED = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", top_k=20, top_p=0.9, temperature=0.7)
DETERMINISTIC = msgspec.structs.replace(BAKED, deterministic=True, chance="rand")

#: Executables that say of prompts all that there is to say; some of them cannot return logits to clients.
SAYS_ALL: dict[str, Any] = {
    "optional_inputs": (PROMPT_LOGPROBS, EMBEDDINGS),
    "reads_context": True,
    "skips_idle": True,
    "output_logits": False,
    "returns_internal": True,
}

Check = Callable[[TinyModel, UnpublishedBundle], GoldenResult]


@pytest.fixture
def check(forkservers: RankForkservers) -> Check:
    return lambda tiny, bundle: check_golden(bundle.manifest, bundle.blob_path, tiny.checkpoint, forkservers.open)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("model"), GEOMETRIES["gqa-llama3-tied"])


def bundle_of(
    tiny: TinyModel,
    directory: Path,
    context_buckets: tuple[int, ...] = (16,),
    token_buckets: tuple[int, ...] = (32,),
    **changes: Any,
) -> UnpublishedBundle:
    spec = tiny.spec(**changes)
    plan = tiny.plan(dtype=spec.dtype, tp_degree=spec.tp_degree)
    return make_bundle(
        directory, spec, plan, tiny.checkpoint, context_buckets=context_buckets, token_buckets=token_buckets
    )


@pytest.fixture(scope="module")
def bucketed(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> UnpublishedBundle:
    return bundle_of(tiny, tmp_path_factory.mktemp("bundle"), (16, 32), (12, 24, 128))


def test_every_executable_is_compared(check: Check, tiny: TinyModel, bucketed: UnpublishedBundle) -> None:
    result = check(tiny, bucketed)
    assert {one.tag: one.num_steps for one in result.executables} == {
        "context_encoding_16": 3,
        "context_encoding_32": 3,
        "token_generation_12": 4 + 2,  # positions 8 to 11 after the first prompt, 10 and 11 after the second
        "token_generation_24": 4 + 2 + 4 + 4 + 2,
        "token_generation_128": 4 + 2 + 4,  # 8 to 11 again, then 24 and 25, 32 to 35
    }
    assert result.reference.startswith("transformers 5")
    assert [(one.num_prompt_tokens, len(one.tokens)) for one in result.sequences] == [
        *((8, 12), (10, 14), (16, 20), (17, 21), (22, 26), (32, 36))
    ]
    assert (result.num_prompts, result.num_tokens) == (6, 129)
    check_deviations(result)


def check_deviations(result: GoldenResult) -> None:
    """Logits were compared in every executable."""
    deviations = [one.max_deviation for one in result.executables if one.max_deviation is not None]
    assert len(deviations) == len(result.executables)
    assert 0 < max(deviations) <= result.tolerance == 1e-4
    assert result.max_deviation == max(deviations)
    assert f"logits within {max(deviations):.1e} of transformers 5" in result.summary


@pytest.mark.parametrize(
    ("tp_degree", "changes"),
    [
        (1, {"sampling": DYNAMIC, "output_logits": False}),
        (1, {"sampling": DETERMINISTIC, "output_logits": False}),
        pytest.param(1, {"sampling": GREEDY, "output_logits": False}, marks=pytest.mark.slow),
        pytest.param(1, {"sampling": DYNAMIC, "output_logits": True}, marks=pytest.mark.slow),
        pytest.param(1, {"sampling": BAKED, "output_logits": False}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"sampling": DYNAMIC, "output_logits": True}, marks=pytest.mark.slow),
        pytest.param(2, {"sampling": DYNAMIC, "output_logits": False}, marks=pytest.mark.slow),
        (4, {"sampling": GREEDY, "output_logits": False}),
    ],
)
def test_logits_behind_tokens_and_of_several_ranks_are_compared(
    check: Check, tiny: TinyModel, tmp_path: Path, tp_degree: int, changes: dict[str, Any]
) -> None:
    """The vocabulary of 211 divides by neither 2 nor 4."""
    result = check(tiny, bundle_of(tiny, tmp_path, tp_degree=tp_degree, returns_internal=True, **changes))
    assert [one.num_steps for one in result.executables] == [2, 8]
    check_deviations(result)
    assert sum(one.num_ties for one in result.executables) == 0


@pytest.mark.parametrize("tp_degree", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_what_executables_say_of_prompts_is_compared(
    check: Check, tiny: TinyModel, tmp_path: Path, tp_degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head computes five positions at a time."""
    monkeypatch.setattr(decoder, "MAX_TOLD_LOGITS", 5 * 211)
    bundle = bundle_of(tiny, tmp_path, tp_degree=tp_degree, sampling=GREEDY, **SAYS_ALL)
    said = {spec.name: spec.shape for spec in bundle.manifest.executables[0].outputs}
    assert said.items() >= {"prompt_logprobs": (1, 16), "prompt_top_ids": (1, 16, 20), "hidden_sum": (1, 64)}.items()
    assert not {spec.name for spec in bundle.manifest.executables[1].outputs} & {"prompt_logprobs", "hidden_sum"}
    check_deviations(check(tiny, bundle))


@pytest.mark.parametrize("name", ["prompt_logprobs", "prompt_top_logprobs", "last_hidden", "hidden_sum"])
def test_false_words_on_prompts_are_found(
    check: Check, tiny: TinyModel, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_falsely(*args: Any, **inputs: Any) -> Any:
        logits, state, said = read_prompts(*args, **inputs)
        return logits, state, said | {name: said[name] * 1.001}

    read_prompts = CausalLm.read_prompts
    monkeypatch.setattr(CausalLm, "read_prompts", read_falsely)
    with pytest.raises(GoldenMismatch, match=name):
        check(tiny, bundle_of(tiny, tmp_path, sampling=GREEDY, **SAYS_ALL))


def test_executables_of_v0_1_have_tokens_only(check: Check, tiny: TinyModel, tmp_path: Path) -> None:
    """As when weights are made for a bundle that v0.1 compiled."""
    result = check(tiny, bundle_of(tiny, tmp_path, sampling=GREEDY, output_logits=False))
    assert all(one.num_steps > 0 and one.max_deviation is None for one in result.executables)
    assert result.max_deviation is None
    assert "whose greedy tokens are those of transformers" in result.summary


def test_a_rank_with_anothers_weights_is_found(check: Check, tiny: TinyModel, tmp_path: Path) -> None:
    bundle = bundle_of(tiny, tmp_path, tp_degree=2)
    shards = [shard.blob for shard in bundle.manifest.weight_sets[0].shards]
    swapped = {**bundle.blobs, shards[0]: bundle.blobs[shards[1]]}
    with pytest.raises(GoldenMismatch, match=r"context_encoding_16 differs .* at position 7: logits deviate by "):
        check(tiny, UnpublishedBundle(bundle.manifest, swapped))


def test_batched_prompts(check: Check, tiny: TinyModel, tmp_path: Path) -> None:
    assert check(tiny, bundle_of(tiny, tmp_path, ctx_batch_size=2)).executables


def test_prompts_longer_than_any_generation(check: Check, tiny: TinyModel, tmp_path: Path) -> None:
    result = check(tiny, bundle_of(tiny, tmp_path, (16, 32), (12,)))
    assert [one.num_steps for one in result.executables] == [2, 1, 6]


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [
        pytest.param("bfloat16", GREEDY, id="bfloat16-tokens"),
        pytest.param("float16", HOST_SAMPLING, id="float16-logits"),
        pytest.param("bfloat16", HOST_SAMPLING, id="bfloat16-logits", marks=pytest.mark.slow),
        pytest.param("float16", GREEDY, id="float16-tokens", marks=pytest.mark.slow),
    ],
)
def test_low_precision(check: Check, tiny: TinyModel, tmp_path: Path, dtype: str, sampling: Sampling) -> None:
    """The tolerance is wide enough for rounding, and not much wider."""
    changes = {"sampling": sampling, "output_logits": False, "returns_internal": True}
    result = check(tiny, bundle_of(tiny, tmp_path, dtype=dtype, **changes))
    assert result.max_deviation is not None
    assert TOLERANCES[result.dtype] / 50 < result.max_deviation < TOLERANCES[result.dtype]


@pytest.mark.parametrize("rope", ["longrope", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_sequences_do_not_stretch_each_other(check: Check, tmp_path: Path, rope: str) -> None:
    """The reference's rotary embedding would remember an earlier, longer sequence."""
    attributes = GEOMETRIES["gqa-llama3-tied"] | {"rope_parameters": ROPES[rope], "max_position_embeddings": 10}
    tiny = write_tiny_model(tmp_path / "model", attributes)
    assert check(tiny, bundle_of(tiny, tmp_path, (14, 15, 16), (64,))).executables


def with_changed_weights(
    bundle: UnpublishedBundle, directory: Path, name: str, change: Callable[[Tensor], Tensor]
) -> UnpublishedBundle:
    blobs = dict(bundle.blobs)
    for shard in bundle.manifest.weight_sets[0].shards:
        tensors = load_file(bundle.blob_path(shard.blob))
        tensors[name] = change(tensors[name])
        blobs[shard.blob] = directory / f"changed-{shard.rank}.safetensors"
        save_file(tensors, blobs[shard.blob])
    return UnpublishedBundle(bundle.manifest, blobs)


@pytest.mark.parametrize(
    ("name", "change"),
    [("model.layers.1.mlp.down_proj.weight", 0.01), ("rope.inv_freq", 0.01), ("model.norm.weight", math.nan)],
)
def test_wrong_weights_are_found(
    check: Check, tiny: TinyModel, bucketed: UnpublishedBundle, tmp_path: Path, *, name: str, change: float
) -> None:
    with pytest.raises(GoldenMismatch, match=r"context_encoding_16 differs .* at position 7: logits deviate by "):
        check(tiny, with_changed_weights(bucketed, tmp_path, name, lambda weight: weight + change))


def test_wrong_tokens_are_found(check: Check, tiny: TinyModel, tmp_path: Path) -> None:
    bundle = bundle_of(tiny, tmp_path, sampling=GREEDY, output_logits=False)
    name = "model.layers.0.self_attn.v_proj.weight"
    damaged = with_changed_weights(bundle, tmp_path, name, lambda weight: weight + 0.5)
    with pytest.raises(GoldenMismatch, match=r"token \d+ in place of \d+, whose logit is .* away") as caught:
        check(tiny, damaged)
    assert caught.value.metadata.keys() == {"tag", "position", "detail"}


@pytest.mark.parametrize("tp_degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_wrong_logits_are_found_though_the_tokens_agree(
    check: Check, tiny: TinyModel, tmp_path: Path, tp_degree: int
) -> None:
    """Scaled logits have the same order. Without them, as in v0.1, the same weights pass."""
    for returns_internal in (False, True):
        directory = tmp_path / str(returns_internal)
        directory.mkdir()
        changes = {"tp_degree": tp_degree, "sampling": GREEDY, "output_logits": False}
        bundle = bundle_of(tiny, directory, returns_internal=returns_internal, **changes)
        scaled = with_changed_weights(bundle, directory, "model.norm.weight", lambda weight: weight * 1.001)
        if not returns_internal:
            assert sum(one.num_ties for one in check(tiny, scaled).executables) == 0
            continue
        with pytest.raises(GoldenMismatch, match=r"context_encoding_16 .* logits deviate by 1\.00e-03 of the largest"):
            check(tiny, scaled)


def test_a_fault_of_one_graph_is_found_though_its_tokens_agree(
    check: Check, tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled is not what was written: one graph computes with a norm that is off by a thousandth."""

    def export_faulty(spec: GraphSpec, plan: WeightPlan, submodel: ExecutableSpec) -> TracedSubmodel:
        traced = export_submodel(spec, plan, submodel)
        if submodel.tag == "token_generation_32":
            *_, head = traced.program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
            with traced.program.graph.inserting_before(head):
                off = traced.program.graph.call_function(torch.ops.aten.mul.Tensor, (head.args[0], 1.001))
                off.meta["val"] = head.args[0].meta["val"]
            head.replace_input_with(head.args[0], off)
        return traced

    monkeypatch.setattr("tests.bundles.unpublished.export_submodel", export_faulty)
    bundle = bundle_of(tiny, tmp_path, sampling=GREEDY, output_logits=False, returns_internal=True)
    with pytest.raises(GoldenMismatch, match=r"token_generation_32 differs .* at position 8: logits deviate by 1\.00e"):
        check(tiny, bundle)


def test_swapped_buckets_are_found(check: Check, tiny: TinyModel, bucketed: UnpublishedBundle) -> None:
    """A token_generation executable that reads fewer positions than its bucket says."""
    manifest = bucketed.manifest
    smaller = next(executable for executable in manifest.executables if executable.tag == "token_generation_12")
    executables = tuple(
        msgspec.structs.replace(one, blob=smaller.blob) if one.tag == "token_generation_24" else one
        for one in manifest.executables
    )
    swapped = UnpublishedBundle(msgspec.structs.replace(manifest, executables=executables), bucketed.blobs)
    with pytest.raises(GoldenMismatch, match=r"token_generation_24 differs .* at position 12"):
        check(tiny, swapped)
