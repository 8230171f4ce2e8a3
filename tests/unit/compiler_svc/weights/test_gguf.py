"""GGUF files: transformers' own reading of the same file says what their tensors and configurations are."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bundle.errors import KilnError
from compiler_svc.models.transforms import ModelChanges, Quantization
from compiler_svc.planning.checkpoint_quantization import read_quantization, warn_of_other_bits
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointError, CheckpointInvalid
from compiler_svc.weights.gguf.header import BLOCK_TYPES, StoredTensor, read_header
from compiler_svc.weights.gguf.model import GgufTensor
from compiler_svc.weights.gguf.values import OpenedBlocks, map_file
from compiler_svc.weights.held_sizes import check_sizes
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.specs import make_plan
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, write_tiny_model
from tests.unit.compiler_svc.config.resolving import resolve
from tests.unit.compiler_svc.sharding.test_ranks import NUM_PROMPT_TOKENS, TOKENS, generate_together

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
GEMMA = LLAMA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
#: Architectures, their attributes, and what else their files say.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LlamaForCausalLM": (LLAMA, {}),
    "Qwen2ForCausalLM": (LLAMA, {}),
    "Qwen3ForCausalLM": (LLAMA | {"head_dim": 32}, {}),
    "Gemma2ForCausalLM": (GEMMA, SOFT_CAPS),
    "Gemma3ForCausalLM": (GEMMA, {}),
    "Phi3ForCausalLM": (LLAMA | {"pad_token_id": 0}, {}),
}


def write(path: Path, kind: Kind = Kind.F32, name: str = "LlamaForCausalLM", **options: Any) -> TinyModel:
    """A file of a random model, and transformers' model with what transformers reads from it."""
    attributes, fields = FAMILIES[name]
    attributes = attributes | options.pop("attributes", {})
    tiny = write_tiny_model(path, attributes, architecture=name)
    file = write_gguf(path, path / "model.gguf", kind, fields=fields, **options)
    state = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=tiny.model)["tensors"]
    tiny.model.load_state_dict(state, strict=not tiny.model.config.tie_word_embeddings)
    return TinyModel(tiny.model, Checkpoint.open(file))


def check_logits(tiny: TinyModel) -> None:
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    for outputs in generate_together(tiny, tiny.spec(tp_degree=1)):
        assert deviation(outputs["logits"], expected) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_families_give_transformers_logits(name: str, tmp_path: Path) -> None:
    tiny = write(tmp_path, name=name)
    original = Checkpoint.open(tmp_path)
    assert tiny.checkpoint.description == original.description
    check_logits(tiny)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_types_give_transformers_logits(kind: Kind, tmp_path: Path) -> None:
    tiny = write(tmp_path, kind)
    assert tiny.checkpoint.config.get("dtype") == {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind)
    check_logits(tiny)


def test_block_types_have_the_sizes_of_gguf() -> None:
    for number, row in BLOCK_TYPES.items():
        assert (row.name, (row.items, row.size_bytes)) == (Kind(number).name, GGML_QUANT_SIZES[Kind(number)])


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_four_bits_stay_as_they_are(kind: Kind, tmp_path: Path) -> None:
    """Matrices whose rows the file has in another order are among them; the table is of another type."""
    wide = {"hidden_size": 128, "intermediate_size": 128}
    tiny = write(tmp_path, kind, attributes=wide, kinds={"token_embd.weight": Kind.Q8_0})
    given = read_quantization(tiny.checkpoint, "cpu")
    assert given["quantization_dtype"] == "int4_by_32"
    assert given["modules_to_not_convert"] == ()
    config = resolve(**given).config.neuron_config
    assert warn_of_other_bits(tiny.checkpoint, config) == (
        f"model: 1 quantized tables become {config.torch_dtype}, as all embeddings",
    )
    description = ModelChanges(quantization=Quantization(format="int4_by_32")).apply(tiny.checkpoint.description)
    expected = tiny.step_logits(TOKENS, NUM_PROMPT_TOKENS)
    for outputs in generate_together(tiny, tiny.spec(tp_degree=1, description=description)):
        assert deviation(outputs["logits"], expected) < TOLERANCE


def test_mixtures_become_what_all_matrices_can_be(tmp_path: Path) -> None:
    tiny = write(tmp_path, Kind.Q4_0, kinds={"blk.0.ffn_down.weight": Kind.Q8_0})
    given = read_quantization(tiny.checkpoint, "cpu")
    assert given["quantization_dtype"] == "int8"
    config = resolve(**given).config.neuron_config
    assert "model: 15 of 15 quantized matrices become int8_per_channel, and lose by it" in warn_of_other_bits(
        tiny.checkpoint, config
    )


@pytest.mark.parametrize("kind", [one for one, row in BLOCK_TYPES.items() if not row.dtype])
def test_any_block_is_read_as_gguf_reads_it(kind: int, tmp_path: Path) -> None:
    """Bytes of chance; their scales are the numbers 1.0 and 0.5, for others would be no numbers."""
    row, number = BLOCK_TYPES[kind], Kind(kind)
    blocks = np.random.default_rng(7).integers(0, 128, (3, 2 * row.size_bytes), dtype=np.uint8)
    file = tmp_path / "blocks.bin"
    file.write_bytes(bytes(32) + blocks.tobytes())
    tensor = GgufTensor("matrix", StoredTensor("matrix", kind, (3, 2 * row.items), 32), file, heads=0, offset=0.0)
    opened = OpenedBlocks(tensor, map_file(file))
    expected = torch.from_numpy(dequantize(blocks, number))
    torch.testing.assert_close(opened.read_rows(1, 3), expected[1:], rtol=1e-6, atol=1e-7, equal_nan=True)
    if row.is_four_bit:
        pairs = opened.read_groups(0, 3, torch.arange(2 * row.items))
        rebuilt = opened.read_items(0, 3) * pairs[..., 0] + pairs[..., 1]
        torch.testing.assert_close(rebuilt, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole")
    return write(path).checkpoint.path.read_bytes()


def refuse(path: Path, content: bytes) -> CheckpointError:
    (path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path / "bad.gguf")
    return caught.value


def test_a_file_that_ends_early_is_refused_wherever_it_ends(whole: bytes, tmp_path: Path) -> None:
    for length in (0, 3, 4, 12, 23, 24, 40, 200, 700, 1500, len(whole) // 2, len(whole) - 1):
        assert "accepted: " in str(refuse(tmp_path, whole[:length]))


@pytest.mark.parametrize(
    ("start", "content", "message"),
    [
        (0, b"GGML", "a file that does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version: got version 1"),
        (4, struct.pack(">I", 3), "version: got big-endian numbers"),
        (8, struct.pack("<Q", 1 << 60), f"tensors: got {1 << 60} entries"),
        (16, struct.pack("<Q", 1 << 60), f"metadata: got {1 << 60} entries"),
        (24, struct.pack("<Q", 1 << 40), f"metadata: got a string of {1 << 40} bytes"),
    ],
)
def test_numbers_that_lead_out_of_the_file_are_refused(
    start: int, content: bytes, message: str, whole: bytes, tmp_path: Path
) -> None:
    assert message in str(refuse(tmp_path, whole[:start] + content + whole[start + len(content) :]))


def spoil(whole: bytes, name: str, offset: int, content: bytes) -> bytes:
    """Replaces bytes behind the first name like this."""
    start = whole.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + offset
    return whole[:start] + content + whole[start + len(content) :]


#: A name, what is written how many bytes behind it, and the message.
SPOILED = [
    ("blk.0.attn_q.weight", 0, struct.pack("<I", 900), "blk.0.attn_q.weight: got 900 dimensions"),
    ("blk.0.attn_q.weight", 4, struct.pack("<Q", 1 << 50), "ends at byte"),
    ("blk.0.attn_q.weight", 20, struct.pack("<I", 6), "blk.0.attn_q.weight: got type 6"),
    ("blk.0.attn_q.weight", 20, struct.pack("<I", 12), "rows of whole blocks of 256, as Q4_K has"),
    ("blk.0.attn_q.weight", 24, struct.pack("<Q", 1 << 50), "ends at byte"),
    ("blk.0.attn_q.weight", 24, struct.pack("<Q", 7), "a multiple of 32"),
    ("llama.block_count", 4, struct.pack("<I", 5), "model.layers.{2-4}.input_layernorm.weight: got missing"),
    ("llama.block_count", 4, struct.pack("<I", 1 << 31), "num_hidden_layers"),
    ("llama.block_count", -1, b"s", "llama.block_count: got missing"),
    ("general.architecture", 12, b"mamba", "general.architecture: got 'mamba'"),
    ("llama.rope.dimension_count", 4, struct.pack("<I", 8), "llama.rope.dimension_count: got 8"),
    ("llama.attention.value_length", -1, b"X", "llama.attention.value_lengtX: got 16"),
]


#: A field of four bytes that a file need not have.
SPARE = "llama.rope.dimension_count"


def put_field(whole: bytes, name: str, content: bytes) -> bytes:
    """Gives a field another type and value; one that is not there takes the place of `SPARE`."""
    old, new = (struct.pack("<Q", len(one)) + one.encode() for one in (name if name.encode() in whole else SPARE, name))
    start = whole.index(old)
    # Tensors begin at a multiple of some bytes, so that the file may get longer by these.
    return whole[:start] + new + content + whole[start + len(old) + 8 :] + bytes(64)


ARRAY = struct.pack("<IIQI", 9, 4, 1, 7)
TEXT = struct.pack("<IQ", 8, 1) + b"x"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("llama.attention.head_count", ARRAY, "got [7]; accepted: a finite number"),
        ("llama.embedding_length", TEXT, "got 'x'; accepted: a finite number"),
        ("llama.rope.freq_base", struct.pack("<If", 6, math.nan), "got nan; accepted: a finite number"),
        ("llama.rope.scaling.type", ARRAY, "got [7]; accepted: a name"),
        ("tokenizer.ggml.eos_token_id", ARRAY, "got [7]; accepted: the number of a token"),
        ("tokenizer.ggml.bos_token_id", struct.pack("<If", 6, 1.5), "got 1.5; accepted: the number of a token"),
    ],
    ids=lambda one: "" if isinstance(one, bytes) else one,
)
def test_values_of_other_types_are_refused_by_name(
    name: str, content: bytes, message: str, whole: bytes, tmp_path: Path
) -> None:
    assert f"{name}: {message}" in str(refuse(tmp_path, put_field(whole, name, content)))


def test_long_arrays_of_numbers_are_not_kept(whole: bytes, tmp_path: Path) -> None:
    content = struct.pack("<IIQ", 9, 4, 5000) + bytes(20_000)
    (tmp_path / "long.gguf").write_bytes(put_field(whole, "general.long", content))
    header = read_header(tmp_path / "long.gguf")
    assert header.metadata["general.long"] is None
    assert header.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize(("base", "divisors"), [(0.0, [1.0] * 8), (10_000.0, [1.0] * 7 + [0.0])])
def test_frequencies_that_nothing_divides_are_refused(base: float, divisors: list[float], tmp_path: Path) -> None:
    attributes = {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    with pytest.raises(CheckpointInvalid, match=r"rope_freqs\.weight: got .*; accepted: finite numbers above 0"):
        write(tmp_path, attributes=attributes, divisors=divisors)


def plan(file: Path) -> None:
    checkpoint = Checkpoint.open(file)
    check_sizes(checkpoint)
    make_plan(checkpoint)


@pytest.mark.parametrize("spoiled", SPOILED, ids=lambda spoiled: spoiled[3])
def test_what_a_file_cannot_mean_is_refused_by_name(
    spoiled: tuple[str, int, bytes, str], whole: bytes, tmp_path: Path
) -> None:
    *change, message = spoiled
    (tmp_path / "bad.gguf").write_bytes(spoil(whole, *change))
    with pytest.raises(KilnError) as caught:
        plan(tmp_path / "bad.gguf")
    assert message in str(caught.value)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)
    file = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointInvalid, match=r"split\.count: got 3 files; accepted: .*--merge"):
        Checkpoint.open(file)


def test_frequencies_of_llama_3_are_read_from_what_divides_them(tmp_path: Path) -> None:
    """transformers leaves the tensor out of a GGUF file; the model that the file was made of says what is right."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    attributes = LLAMA | {"rope_parameters": rope, "head_dim": 64, "max_position_embeddings": 131072}
    tiny = write_tiny_model(tmp_path, attributes)
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    divisors = (plain / tiny.model.model.rotary_emb.inv_freq).tolist()
    checkpoint = Checkpoint.open(write_gguf(tmp_path, tmp_path / "a.gguf", Kind.F32, divisors=divisors))
    assert checkpoint.description == tiny.checkpoint.description
    spoiled = write_gguf(tmp_path, tmp_path / "b.gguf", Kind.F32, divisors=[2.0, *divisors[1:]])
    with pytest.raises(CheckpointInvalid, match=r"rope_freqs\.weight: got other divisors"):
        Checkpoint.open(spoiled)
