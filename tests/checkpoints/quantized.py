"""Checkpoints as the field's quantizers write them. What their matrices stand for is said by code that is not ours:
compressed-tensors', or, of GPTQ, which nothing on this host reads, by the bits of each item one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter, FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP: Final = 16
BLOCK: Final = (48, 32)

#: The tensors of a module, by what stands behind its name.
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """One way to write a quantized checkpoint.

    Attributes:
        config: Its `quantization_config`.
        write: The tensors that a matrix becomes, and what these stand for.
        kept: The dtype of items that a kernel of ours has, too.
    """

    config: Mapping[str, Any]
    write: Callable[[Tensor], tuple[Tensors, Tensor]] = field(repr=False)
    kept: str | None = None

    def rewrite(self, path: Path, skipped: str = "lm_head") -> dict[str, Tensor]:
        """Quantizes the linear layers of a checkpoint in place; returns what its tensors stand for afterwards."""
        stored, meant = {}, {}
        for name, tensor in load_file(path / "model.safetensors").items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and tensor.dim() == 2 and "embed" not in name and skipped not in name:
                parts, meant[name] = self.write(tensor)
                stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
            else:
                stored[name] = meant[name] = tensor
        save_file(stored, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": self.config}))
        return meant


def compress(*, kept: str | None = None, activations: QuantizationArgs | None = None, **options: Any) -> Writer:
    """compressed-tensors' own formats."""
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    is_packed = args.type == "int" and (args.num_bits < 8 or args.group_size)
    compressor = PackedQuantizationCompressor if is_packed else NaiveQuantizationCompressor

    def write(matrix: Tensor) -> tuple[Tensors, Tensor]:
        size = args.group_size or matrix.shape[1]
        groups = matrix.reshape(1, 1, -1) if args.strategy == "tensor" else matrix.unflatten(1, (-1, size))
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        if args.strategy == "tensor":
            scales, zeros = scales.flatten(), zeros.flatten()
        state = {"weight": matrix, "weight_scale": scales, "weight_zero_point": zeros.float().round().to(torch.int8)}
        parts = compressor.compress(state, scheme)
        return parts, compressor.decompress(parts, scheme)["weight"]

    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized" if is_packed else f"{args.type}-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return Writer(config=json.loads(config.model_dump_json()), write=write, kept=kept)


def write_blocks(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks of float8, as DeepSeek's and Qwen's releases have them; the last ones are smaller."""
    rows, columns = (torch.arange(size) // length for size, length in zip(matrix.shape, BLOCK, strict=True))
    largest = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(len(largest)):
        for column in range(largest.shape[1]):
            largest[row, column] = matrix[rows == row][:, columns == column].abs().max()
    scales = largest / 448
    items = (matrix / scales[rows][:, columns]).to(torch.float8_e4m3fn)
    parts = {"weight": items, "weight_scale_inv": scales}
    named = {f"module.{name}": part for name, part in parts.items()}
    reader = FP8BlockDequantizer(targets=["re:module"], weight_block_size=BLOCK, dtype=torch.float32)
    return parts, reader.process(named)["module.weight"]


def write_nxd(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """What NxD Inference's `save_quantized_state_dict` writes, with a scale for each output."""
    scales = matrix.abs().amax(1, keepdim=True) / 127
    items = (matrix / scales).round().to(torch.int8)
    return {"weight": items, "scale": scales}, items * scales


def quantize_groups(matrix: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Items [inputs, outputs], scales and zero points [groups, outputs], of inputs in groups of any order."""
    columns = matrix.t()
    scales, zeros = [], []
    items = torch.empty(columns.shape, dtype=torch.int64)
    for group in range(int(groups.max()) + 1):
        part = columns[groups == group]
        low, high = part.amin(0).clamp(max=0), part.amax(0).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).half().float()
        # GPTQ stores one less, so it has none at 0.
        zero = (-low / scale).round().clamp(1, 2**bits - 1)
        items[groups == group] = (part / scale + zero).round().clamp(0, 2**bits - 1).long()
        scales.append(scale)
        zeros.append(zero)
    return items, torch.stack(scales), torch.stack(zeros).long()


def pack(items: Tensor, bits: int, order: list[int]) -> Tensor:
    """int32 [..., items * bits / 32]: the first item is at place `order[0]` of a word, in items from its low bits."""
    words = torch.zeros(*items.shape[:-1], items.shape[-1] * bits // 32, dtype=torch.int64)
    for number in range(items.shape[-1]):
        word, place = divmod(number, 32 // bits)
        words[..., word] |= items[..., number] << (bits * order[place])
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(bits: int, *, group: int = GROUP, reorders: bool = False, is_second: bool = False, **options: Any) -> Writer:
    """GPTQ's tensors; its activation order scatters the inputs of a group."""
    in_turn = list(range(32 // bits))

    def write(matrix: Tensor) -> tuple[Tensors, Tensor]:
        groups = torch.arange(matrix.shape[1]) // group
        if reorders:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        items, scales, zeros = quantize_groups(matrix, bits, groups)
        meant = ((items - zeros[groups]) * scales[groups]).t()
        parts = {
            "qweight": pack(items.t(), bits, in_turn).t(),
            "qzeros": pack(zeros - int(not is_second), bits, in_turn),
            "scales": scales.half(),
            "g_idx": groups.int(),
        }
        return parts, meant

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": reorders, "sym": False}
    return Writer(config=config | ({"checkpoint_format": "gptq_v2"} if is_second else {}), write=write, **options)


def awq(group: int = GROUP, **options: Any) -> Writer:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM", "zero_point": True}
    return Writer(config=config, write=partial(write_awq, group), **options)


def write_awq(group: int, matrix: Tensor) -> tuple[Tensors, Tensor]:
    """AWQ's tensors, in the order of its GEMM kernels."""
    items, scales, zeros = quantize_groups(matrix, 4, torch.arange(matrix.shape[1]) // group)
    order = AutoAWQConverter.AWQ_REVERSE_ORDER
    parts = {"qweight": pack(items, 4, order), "qzeros": pack(zeros, 4, order), "scales": scales.half()}
    reader = AutoAWQConverter(group_size=group, ignore=())
    # In float32, because it computes in the dtype of scales.
    converted = reader.process({f"module.{name}": part for name, part in (parts | {"scales": scales}).items()})
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {name.removeprefix("module."): part for name, part in converted.items()}
    return parts, PackedQuantizationCompressor.decompress(state, scheme)["weight"]


#: Items, scales and zero points of a matrix.
Parts = tuple[Tensor, Tensor, Tensor]


def torchao(kind: str, write: Callable[[Tensor], Parts], *, adds: bool = False, **options: Any) -> Writer:
    """What transformers saves of torchao's tensors; their zero points are added to products if `adds`."""
    kept, data = options.pop("kept", None), options

    def write_parts(matrix: Tensor) -> tuple[Tensors, Tensor]:
        items, scales, zeros = write(matrix)
        spread = partial(Tensor.repeat_interleave, repeats=matrix.shape[1] // scales.shape[1], dim=1)
        meant = items * spread(scales) + spread(zeros) if adds else (items - spread(zeros.float())) * spread(scales)
        if adds:
            # Two in a byte, the first of which has the low bits.
            items, scales, zeros = (items[:, ::2] & 15) | (items[:, 1::2] << 4), scales.t(), zeros.t()
        return {"_weight_qdata": items, "_weight_scale": scales, "_weight_zero_point": zeros}, meant

    said = {"default": {"_type": kind, "_version": 2, "_data": data}}
    return Writer(config={"quant_method": "torchao", "quant_type": said}, write=write_parts, kept=kept)


def name(kind: str, value: str) -> dict[str, str]:
    """An enumeration's value, or a dtype, as torchao writes it."""
    return {"_type": kind, "_data": value}


def write_symmetric(matrix: Tensor, *, group: int = 0) -> Parts:
    groups = matrix.unflatten(1, (-1, group or matrix.shape[1]))
    scales = groups.abs().amax(-1) / 127.5
    items = (groups / scales[..., None]).round().clamp(-128, 127).flatten(1)
    return items.to(torch.int8), scales, torch.zeros_like(scales, dtype=torch.int8)


def write_small(matrix: Tensor, *, group: int, bits: int = 4, is_whole: bool = True) -> Parts:
    """Items in two's complement; zero points are items if `is_whole`, otherwise the weights of items that are 0."""
    half, groups = 1 << (bits - 1), matrix.unflatten(1, (-1, group))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (most - least) / (2 * half - 1)
    zeros = (-half - least / scales).round() if is_whole else least + half * scales
    start = zeros if is_whole else -zeros / scales
    items = (groups / scales[..., None] + start[..., None]).round().clamp(-half, half - 1).flatten(1)
    return items.to(torch.int8), scales, zeros.to(torch.int8) if is_whole else zeros


def intx(bits: int, group: int, **options: Any) -> Writer:
    said = {"weight_dtype": name("torch.dtype", f"int{bits}"), "mapping_type": name("MappingType", "ASYMMETRIC")}
    write = partial(write_small, group=group, bits=bits)
    return torchao("IntxWeightOnlyConfig", write, **said, **options)


def plain_int4(group: int, **options: Any) -> Writer:
    said = {"group_size": group, "int4_packing_format": name("Int4PackingFormat", "PLAIN")}
    write = partial(write_small, group=group, is_whole=False)
    return torchao("Int4WeightOnlyConfig", write, adds=True, **said, **options)


_FP8: Final = {"num_bits": 8, "type": "float", "symmetric": True}
_GROUPS: Final = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
WRITERS: Final[Mapping[str, Writer]] = {
    "int8-channel": compress(kept="int8", num_bits=8, type="int", symmetric=True, strategy="channel"),
    "int8-tensor": compress(kept="int8", num_bits=8, type="int", symmetric=True, strategy="tensor"),
    "int8-zeros": compress(num_bits=8, type="int", symmetric=False, strategy="channel"),
    "int8-groups": compress(num_bits=8, type="int", symmetric=True, strategy="group", group_size=GROUP),
    "fp8-channel": compress(kept="float8_e4m3fn", strategy="channel", **_FP8),
    "fp8-tensor": compress(kept="float8_e4m3fn", strategy="tensor", **_FP8),
    "fp8-blocks": Writer(
        config={"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"},
        write=write_blocks,
    ),
    "nxd": Writer(config={}, write=write_nxd, kept="int8"),
    "int4-channel": compress(kept="uint8", num_bits=4, type="int", symmetric=True, strategy="channel"),
    "int4-groups": compress(symmetric=True, **_GROUPS),
    "int4-groups-zeros": compress(symmetric=False, **_GROUPS),
    "gptq-2": gptq(2),
    "gptq-4": gptq(4),
    "gptq-4-reordered": gptq(4, reorders=True),
    "gptq-8-v2": gptq(8, is_second=True),
    "awq": awq(),
    "torchao-int8": torchao("Int8WeightOnlyConfig", write_symmetric, kept="int8"),
    "torchao-int8-groups": torchao("Int8WeightOnlyConfig", partial(write_symmetric, group=GROUP)),
    "torchao-int4": plain_int4(GROUP),
    "torchao-int3": intx(3, GROUP),
}
_TOKENS: Final = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
#: Checkpoints whose layers quantize each token that they multiply.
TOKEN_WRITERS: Final[Mapping[str, Writer]] = {
    kind: compress(
        kept=kept,
        activations=QuantizationArgs(type=kind, **_TOKENS),
        num_bits=8,
        type=kind,
        symmetric=True,
        strategy="channel",
    )
    for kind, kept in (("int", "int8"), ("float", "float8_e4m3fn"))
}
#: Groups of 4 bits that a kernel of ours has, too, by their size.
KEPT_GROUPS: Final[Mapping[str, tuple[int, Writer]]] = {
    "int4": (128, compress(kept="uint8", symmetric=True, **(_GROUPS | {"group_size": 128}))),
    "int4-zeros": (64, compress(kept="uint8", symmetric=False, **(_GROUPS | {"group_size": 64}))),
    "gptq": (32, gptq(4, group=32, kept="uint8")),
    "gptq-large": (128, gptq(4, group=128, kept="uint8")),
    "awq": (64, awq(64, kept="uint8")),
    "awq-large": (128, awq(128, kept="uint8")),
    "torchao": (32, plain_int4(32, kept="uint8")),
    "torchao-large": (128, plain_int4(256, kept="uint8")),
    "torchao-intx": (64, intx(4, 64, kept="uint8")),
}
