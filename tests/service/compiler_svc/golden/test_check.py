import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from bundle.manifest import Sampling
from compiler_svc.golden.check import GoldenResult, check_golden
from compiler_svc.golden.comparison import TOLERANCES
from compiler_svc.golden.errors import GoldenMismatch
from execution.ranks.forkservers import RankForkservers
from tests.bundles.unpublished import UnpublishedBundle, make_bundle
from tests.checkpoints.specs import HOST_SAMPLING
from tests.checkpoints.tiny_models import GEOMETRIES, ROPES, TinyModel, write_tiny_model

GREEDY = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", temperature=0.0)
DYNAMIC = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", dynamic=True, global_topk=64)
BAKED = msgspec.structs.replace(HOST_SAMPLING, mode="on_device", top_k=20, top_p=0.9, temperature=0.7)
DETERMINISTIC = msgspec.structs.replace(BAKED, deterministic=True)

#: The ranks of all checks come from these.
FORKSERVERS = RankForkservers()


@pytest.fixture(scope="module", autouse=True)
def _close_forkservers() -> Iterator[None]:
    yield
    FORKSERVERS.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("model"), GEOMETRIES["gqa-llama3-tied"])


def bundle_of(
    tiny: TinyModel, directory: Path, token_buckets: tuple[int, ...] = (32,), **changes: Any
) -> UnpublishedBundle:
    spec = tiny.spec(**changes)
    plan = tiny.plan(dtype=spec.dtype, tp_degree=spec.tp_degree)
    return make_bundle(directory, spec, plan, tiny.checkpoint, context_buckets=(16,), token_buckets=token_buckets)


@pytest.fixture(scope="module")
def bucketed(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> UnpublishedBundle:
    return make_bundle(
        tmp_path_factory.mktemp("bundle"),
        tiny.spec(),
        tiny.plan(),
        tiny.checkpoint,
        context_buckets=(16, 32),
        token_buckets=(12, 24, 128),
    )


def check(tiny: TinyModel, bundle: UnpublishedBundle) -> GoldenResult:
    return check_golden(bundle.manifest, bundle.blob_path, tiny.checkpoint, FORKSERVERS.open)


def test_every_executable_is_compared(tiny: TinyModel, bucketed: UnpublishedBundle) -> None:
    result = check(tiny, bucketed)
    assert {one.tag: one.num_steps for one in result.executables} == {
        "context_encoding_16": 1,
        "context_encoding_32": 1,
        "token_generation_12": 4,  # positions 8 to 11 after the first prompt
        "token_generation_24": 8,  # and 17 to 20 after the second
        "token_generation_128": 4,
    }
    assert result.reference.startswith("transformers 5")
    assert [(one.num_prompt_tokens, len(one.tokens)) for one in result.sequences] == [(8, 12), (17, 21)]
    for one in result.executables:
        assert one.max_deviation is not None
        assert one.max_deviation <= result.tolerance == 1e-4


@pytest.mark.parametrize(
    ("sampling", "output_logits"),
    [(GREEDY, False), (DYNAMIC, False), (DYNAMIC, True), (BAKED, False), (DETERMINISTIC, False)],
)
def test_tokens_are_compared(tiny: TinyModel, tmp_path: Path, sampling: Sampling, output_logits: bool) -> None:
    result = check(tiny, bundle_of(tiny, tmp_path, sampling=sampling, output_logits=output_logits))
    assert all(one.num_steps > 0 for one in result.executables)
    assert all((one.max_deviation is not None) == output_logits for one in result.executables)
    assert sum(one.num_ties for one in result.executables) == 0


@pytest.mark.parametrize(
    ("tp_degree", "changes"),
    [(2, {}), (2, {"sampling": DYNAMIC, "output_logits": True}), (4, {"sampling": GREEDY, "output_logits": True})],
)
def test_several_ranks(tiny: TinyModel, tmp_path: Path, tp_degree: int, changes: dict[str, Any]) -> None:
    result = check(tiny, bundle_of(tiny, tmp_path, tp_degree=tp_degree, **changes))
    assert [one.num_steps for one in result.executables] == [1, 4]
    for one in result.executables:
        assert one.max_deviation is not None
        assert one.max_deviation <= result.tolerance == 1e-4
        assert one.num_ties == 0


def test_a_rank_with_anothers_weights_is_found(tiny: TinyModel, tmp_path: Path) -> None:
    bundle = bundle_of(tiny, tmp_path, tp_degree=2)
    shards = [shard.blob for shard in bundle.manifest.weight_sets[0].shards]
    swapped = {**bundle.blobs, shards[0]: bundle.blobs[shards[1]]}
    with pytest.raises(GoldenMismatch, match=r"context_encoding_16 differs .* at position 7: logits deviate by "):
        check(tiny, UnpublishedBundle(bundle.manifest, swapped))


def test_batched_prompts(tiny: TinyModel, tmp_path: Path) -> None:
    assert check(tiny, bundle_of(tiny, tmp_path, ctx_batch_size=2)).executables


def test_prompts_longer_than_any_generation(tiny: TinyModel, tmp_path: Path) -> None:
    bundle = make_bundle(
        tmp_path, tiny.spec(), tiny.plan(), tiny.checkpoint, context_buckets=(16, 32), token_buckets=(12,)
    )
    assert [one.num_steps for one in check(tiny, bundle).executables] == [1, 1, 4]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(tiny: TinyModel, tmp_path: Path, dtype: str) -> None:
    """The tolerance is wide enough for rounding, and not much wider."""
    result = check(tiny, bundle_of(tiny, tmp_path, dtype=dtype))
    worst = max(one.max_deviation or 0.0 for one in result.executables)
    assert TOLERANCES[result.dtype] / 50 < worst < TOLERANCES[result.dtype]


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_sequences_do_not_stretch_each_other(tmp_path: Path, rope: str) -> None:
    """The reference's rotary embedding would remember an earlier, longer sequence."""
    attributes = GEOMETRIES["gqa-llama3-tied"] | {"rope_parameters": ROPES[rope], "max_position_embeddings": 10}
    tiny = write_tiny_model(tmp_path / "model", attributes)
    bundle = make_bundle(
        tmp_path, tiny.spec(), tiny.plan(), tiny.checkpoint, context_buckets=(14, 15, 16), token_buckets=(64,)
    )
    assert check(tiny, bundle).executables


def with_damaged_weights(bundle: UnpublishedBundle, directory: Path, name: str, change: float) -> UnpublishedBundle:
    shard = bundle.manifest.weight_sets[0].shards[0].blob
    tensors = load_file(bundle.blob_path(shard))
    tensors[name] += change
    save_file(tensors, directory / "damaged.safetensors")
    return UnpublishedBundle(bundle.manifest, {**bundle.blobs, shard: directory / "damaged.safetensors"})


@pytest.mark.parametrize(
    ("name", "change"),
    [("model.layers.1.mlp.down_proj.weight", 0.01), ("rope.inv_freq", 0.01), ("model.norm.weight", math.nan)],
)
def test_wrong_weights_are_found(
    tiny: TinyModel, bucketed: UnpublishedBundle, tmp_path: Path, name: str, change: float
) -> None:
    with pytest.raises(GoldenMismatch, match=r"context_encoding_16 differs .* at position 7: logits deviate by "):
        check(tiny, with_damaged_weights(bucketed, tmp_path, name, change))


def test_wrong_tokens_are_found(tiny: TinyModel, tmp_path: Path) -> None:
    bundle = bundle_of(tiny, tmp_path, sampling=GREEDY, output_logits=False)
    damaged = with_damaged_weights(bundle, tmp_path, "model.layers.0.self_attn.v_proj.weight", 0.5)
    with pytest.raises(GoldenMismatch, match=r"token \d+ in place of \d+, whose logit is .* away") as caught:
        check(tiny, damaged)
    assert caught.value.metadata.keys() == {"tag", "position", "detail"}


def test_swapped_buckets_are_found(tiny: TinyModel, bucketed: UnpublishedBundle) -> None:
    """A token_generation executable that reads fewer positions than its bucket says."""
    manifest = bucketed.manifest
    smaller = next(executable for executable in manifest.executables if executable.tag == "token_generation_12")
    executables = tuple(
        msgspec.structs.replace(executable, blob=smaller.blob)
        if executable.tag == "token_generation_24"
        else executable
        for executable in manifest.executables
    )
    swapped = UnpublishedBundle(msgspec.structs.replace(manifest, executables=executables), bucketed.blobs)
    with pytest.raises(GoldenMismatch, match=r"token_generation_24 differs .* at position 17"):
        check(tiny, swapped)
