import io
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from compiler_svc.sharding.split import split_tensor
from compiler_svc.sharding.writer import ALIGNMENT_BYTES, PADDING_PREFIX, write_shard
from tests.compiler_svc.sparse_checkpoint import write_sparse_checkpoint
from tests.compiler_svc.tiny_llama import GEOMETRIES, TinyLlama, write_tiny_llama


@pytest.fixture(scope="module", params=GEOMETRIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), GEOMETRIES[request.param])


def render(tiny: TinyLlama, dtype: str = "float32") -> bytes:
    shard = io.BytesIO()
    size_bytes = write_shard(tiny.plan(dtype=dtype), tiny.checkpoint, 0, shard)
    assert size_bytes == len(shard.getvalue())
    return shard.getvalue()


def header_of(data: bytes) -> tuple[int, dict[str, Any]]:
    (length,) = struct.unpack("<Q", data[:8])
    return 8 + length, json.loads(data[8 : 8 + length])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shard_holds_the_checkpoint(tiny: TinyLlama, dtype: str) -> None:
    tensors = load(render(tiny, dtype))
    expected = dict(tiny.model.state_dict())
    if tiny.model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    planned = {tensor.name for tensor in tiny.plan().tensors}
    assert {name for name in tensors if not name.startswith(PADDING_PREFIX)} == planned
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor.to(getattr(torch, dtype))), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_aligned(tiny: TinyLlama, dtype: str) -> None:
    data = render(tiny, dtype)
    start, header = header_of(data)
    assert start % ALIGNMENT_BYTES == 0
    assert len(data) % ALIGNMENT_BYTES == 0
    for name, entry in header.items():
        if not name.startswith(PADDING_PREFIX):
            assert (start + entry["data_offsets"][0]) % ALIGNMENT_BYTES == 0, name


def test_equal_inputs_give_equal_bytes(tiny: TinyLlama) -> None:
    assert render(tiny) == render(tiny)


def test_progress_adds_up(tiny: TinyLlama) -> None:
    counts: list[int] = []
    size_bytes = write_shard(tiny.plan(), tiny.checkpoint, 0, io.BytesIO(), progress=counts.append)
    assert sum(counts) == size_bytes
    assert len(counts) > len(tiny.checkpoint.tensors)


def test_progress_may_give_up(tiny: TinyLlama) -> None:
    def cancel(_count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        write_shard(tiny.plan(), tiny.checkpoint, 0, io.BytesIO(), progress=cancel)


def test_parts_make_up_the_whole(tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path, GEOMETRIES["mha-bias-untied"] | {"vocab_size": 212})
    plan = tiny.plan(tp_degree=2)
    shards = []
    for rank in range(2):
        shard = io.BytesIO()
        write_shard(plan, tiny.checkpoint, rank, shard)
        shards.append(load(shard.getvalue()))
    whole = tiny.model.state_dict()
    for tensor in plan.tensors:
        for rank in range(2):
            part = shards[rank][tensor.name]
            assert tuple(part.shape) == plan.rank_shape(tensor)
            if tensor.source is not None:
                assert torch.equal(part, split_tensor(plan, tensor, whole[tensor.source], rank))
        if tensor.source is not None and part.shape != tensor.shape:
            axis = next(axis for axis, size in enumerate(part.shape) if size != tensor.shape[axis])
            joined = torch.cat([shard[tensor.name] for shard in shards], dim=axis)
            assert torch.equal(joined, whole[tensor.source])


MEASURE_PEAK = """
import sys
from pathlib import Path
from compiler_svc.sharding.writer import write_shard
from compiler_svc.weights.checkpoint import Checkpoint
from tests.compiler_svc.specs import make_plan

def private_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])

class Nowhere:
    def write(self, data):
        global peak
        peak = max(peak, private_bytes())
        return len(data)

checkpoint = Checkpoint.open(Path(sys.argv[1]))
plan = make_plan(checkpoint)
before = peak = private_bytes()
write_shard(plan, checkpoint, 0, Nowhere())
print(peak - before, plan.shard_size_bytes)
"""


def test_memory_in_use_is_a_few_chunks(tmp_path: Path) -> None:
    """A gigabyte is written of a checkpoint that takes no room."""
    write_sparse_checkpoint(tmp_path)
    output = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    ).stdout
    peak_bytes, shard_size_bytes = map(int, output.split())
    assert shard_size_bytes > 900e6
    assert peak_bytes < 50e6
