import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from compiler_svc.sharding import writer
from compiler_svc.sharding.writer import ALIGNMENT_BYTES, CHUNK_SIZE_BYTES, PADDING_PREFIX, write_shards
from compiler_svc.weights.tensors import MAX_MAPPED_BYTES
from tests.checkpoints.headers import write_sparse_checkpoint
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model
from tests.snippets import run_python


@pytest.fixture(scope="module", params=GEOMETRIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("model"), GEOMETRIES[request.param])


def render(tiny: TinyModel, dtype: str = "float32") -> bytes:
    shard = io.BytesIO()
    size_bytes = write_shards(tiny.plan(dtype=dtype), tiny.checkpoint, {0: shard})
    assert size_bytes == len(shard.getvalue())
    return shard.getvalue()


def header_of(data: bytes) -> tuple[int, dict[str, Any]]:
    (length,) = struct.unpack("<Q", data[:8])
    return 8 + length, json.loads(data[8 : 8 + length])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shard_holds_the_checkpoint_and_every_tensor_is_aligned(tiny: TinyModel, dtype: str) -> None:
    data = render(tiny, dtype)
    tensors = load(data)
    expected = dict(tiny.model.state_dict())
    if tiny.model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    planned = {tensor.name for tensor in tiny.plan().tensors}
    assert {name for name in tensors if not name.startswith(PADDING_PREFIX)} == planned
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor.to(getattr(torch, dtype))), name
    start, header = header_of(data)
    assert start % ALIGNMENT_BYTES == 0
    assert len(data) % ALIGNMENT_BYTES == 0
    for name, entry in header.items():
        if not name.startswith(PADDING_PREFIX):
            assert (start + entry["data_offsets"][0]) % ALIGNMENT_BYTES == 0, name


def test_progress_adds_up(tiny: TinyModel) -> None:
    counts: list[int] = []
    size_bytes = write_shards(tiny.plan(), tiny.checkpoint, {0: io.BytesIO()}, progress=counts.append)
    assert sum(counts) == size_bytes
    assert len(counts) > len(tiny.checkpoint.tensors)


def test_progress_may_give_up(tiny: TinyModel) -> None:
    def cancel(_count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        write_shards(tiny.plan(), tiny.checkpoint, {0: io.BytesIO()}, progress=cancel)


def render_ranks(tiny: TinyModel, tp_degree: int) -> list[dict[str, torch.Tensor]]:
    shards = []
    for rank in range(tp_degree):
        shard = io.BytesIO()
        write_shards(tiny.plan(tp_degree=tp_degree), tiny.checkpoint, {rank: shard})
        shards.append(load(shard.getvalue()))
    return shards


def joined_heads(whole: torch.Tensor, heads: list[int], head_dim: int, axis: int) -> torch.Tensor:
    """The heads of `whole`, -1 for zeros, side by side: the table of a layout applied literally."""
    parts = torch.split(whole, head_dim, dim=axis)
    return torch.cat([torch.zeros_like(parts[0]) if head < 0 else parts[head] for head in heads], dim=axis)


def padded(whole: torch.Tensor, length: int, axis: int) -> torch.Tensor:
    shape = list(whole.shape)
    shape[axis] = length - shape[axis]
    return torch.cat((whole, torch.zeros(shape)), dim=axis)


@pytest.fixture(params=[1024, writer.CHUNK_SIZE_BYTES])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that end amid heads and amid padding, and chunks that hold whole tensors."""
    monkeypatch.setattr(writer, "CHUNK_SIZE_BYTES", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(
    ("heads", "tp_degree", "queries", "keys"),
    [
        pytest.param((4, 4), 2, [0, 1, 2, 3], [0, 1, 2, 3], id="4-4-tp2"),
        pytest.param((4, 4), 3, [0, 1, 2, 3, -1, -1], [0, 1, 2, 3, -1, -1], id="4-4-tp3"),
        pytest.param((6, 2), 4, [0, 1, 2, -1, 3, 4, 5, -1], [0, 0, 1, 1], id="6-2-tp4"),
        pytest.param((6, 3), 4, [0, 1, 2, 3, 4, 5, -1, -1], [0, 0, 1, 1, 2, 2, -1, -1], id="6-3-tp4"),
    ],
)
def test_ranks_hold_parts_copies_and_zeros(
    tmp_path: Path, heads: tuple[int, int], tp_degree: int, queries: list[int], keys: list[int]
) -> None:
    """Of so many heads for queries and for keys, ranks hold these one after another."""
    changes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    changes |= {"head_dim": 8, "num_hidden_layers": 1, "vocab_size": 101, "intermediate_size": 37}
    tiny = write_tiny_model(tmp_path, GEOMETRIES["mha-bias-untied"] | changes)
    shards, whole = render_ranks(tiny, tp_degree), tiny.model.state_dict()

    def joined(name: str, axis: int = 0) -> torch.Tensor:
        return torch.cat([shard[name] for shard in shards], dim=axis)

    layer = "model.layers.0."
    for name, axis, held in (
        ("q_proj.weight", 0, queries),
        ("q_proj.bias", 0, queries),
        ("k_proj.weight", 0, keys),
        ("k_proj.bias", 0, keys),
        ("v_proj.weight", 0, keys),
        ("o_proj.weight", 1, queries),
    ):
        full = f"{layer}self_attn.{name}"
        assert torch.equal(joined(full, axis), joined_heads(whole[full], held, 8, axis)), name
    for full, axis in (
        (f"{layer}mlp.gate_proj.weight", 0),
        (f"{layer}mlp.up_proj.bias", 0),
        (f"{layer}mlp.down_proj.weight", 1),
        ("model.embed_tokens.weight", 1),
        ("lm_head.weight", 0),
    ):
        parts = joined(full, axis)
        assert parts.shape[axis] == -(-whole[full].shape[axis] // tp_degree) * tp_degree
        assert torch.equal(parts, padded(whole[full], parts.shape[axis], axis)), full
    for full in (f"{layer}self_attn.o_proj.bias", f"{layer}mlp.down_proj.bias", "model.norm.weight"):
        assert all(torch.equal(shard[full], whole[full]) for shard in shards), full
    assert joined("rank_util.rank").tolist() == list(range(tp_degree))
    assert joined("rank_util.rank").dtype == torch.int32


def test_shapes_are_those_of_the_plan(tiny: TinyModel) -> None:
    for tp_degree in (1, 3, 4):
        plan = tiny.plan(tp_degree=tp_degree)
        for shard in render_ranks(tiny, tp_degree):
            shapes = {name: tuple(t.shape) for name, t in shard.items() if not name.startswith(PADDING_PREFIX)}
            assert shapes == {tensor.name: tensor.rank_shape for tensor in plan.tensors}


MEASURE_PEAK = """
import sys
from pathlib import Path
from compiler_svc.sharding.writer import write_shards
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.specs import make_plan

def read_status(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])

class Nowhere:
    def write(self, data):
        global peak_private
        peak_private = max(peak_private, read_status("RssAnon"))
        return len(data)

tp_degree, num_ranks = int(sys.argv[2]), int(sys.argv[3])
checkpoint = Checkpoint.open(Path(sys.argv[1]))
plan = make_plan(checkpoint, tp_degree=tp_degree)
Path("/proc/self/clear_refs").write_text("5")
private = peak_private = read_status("RssAnon")
resident = read_status("VmHWM")
write_shards(plan, checkpoint, {rank: Nowhere() for rank in range(num_ranks)}, num_threads=2)
print(peak_private - private, read_status("VmHWM") - resident, plan.shard_size_bytes)
"""


@pytest.mark.parametrize(
    ("tp_degree", "num_ranks"),
    [pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow), (4, 4)],
)
def test_memory_in_use_follows_neither_checkpoint_nor_shard(tp_degree: int, num_ranks: int, tmp_path: Path) -> None:
    """A gigabyte is written of a checkpoint that takes no room."""
    write_sparse_checkpoint(tmp_path)
    output = run_python(MEASURE_PEAK, tmp_path, tp_degree, num_ranks).stdout
    peak_private_bytes, peak_bytes, shard_size_bytes = map(int, output.split())
    assert shard_size_bytes > 900e6 / tp_degree
    # Two chunks for each rank, and what torch loads when it is first used.
    private_bytes = 20e6 + 2 * num_ranks * CHUNK_SIZE_BYTES
    assert peak_private_bytes < private_bytes
    # What is mapped before the reader unmaps it, and a chunk of each rank, which is half as large in the file; a
    # library's pages.
    assert peak_bytes < private_bytes + MAX_MAPPED_BYTES + num_ranks * CHUNK_SIZE_BYTES / 2 + 20e6
