"""What a library knows of its inputs, outputs and constants, as tables and loops.

Inductor writes some twenty lines of code for each of them, which took half of the C++ compiler's time for a library of
12 layers. These functions replace the methods of Inductor's that write the lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from torch._inductor import config
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.utils import normalize_name
from torch._inductor.virtualized import V

#: The rows of the tables. An array of extents has, for each row, the sizes of the dimensions and then their strides.
DECLARATIONS: Final = """\
namespace kiln {
struct Input {
  int32_t (*dtype)();
  int64_t dims;
};
struct Constant {
  const char* name;
  const char* original_name;
  torch::aot_inductor::ConstantType type;
  int32_t (*dtype)();
  int64_t dims;
  int64_t offset;
  size_t size_bytes;
};
void check_inputs(const AtenTensorHandle* handles, const Input* inputs, size_t count, const int64_t* extents);
}  // namespace kiln
"""
#: Defines what `DECLARATIONS` declare.
DEFINITIONS: Final = Path(__file__).with_name("tables.cpp")

#: Sizes of constants are rounded up to this, as Inductor does.
_ALIGNMENT_BYTES: Final = 64
_CONSTRUCTOR: Final = """\
{model}::{model}(
    std::shared_ptr<ConstantMap> constants_map, std::shared_ptr<std::vector<ConstantHandle>> constants_array,
    const std::string& device_str, std::optional<std::string> cubin_dir)
    : AOTInductorModelBase({num_inputs}, {num_outputs}, {num_constants}, device_str, std::move(cubin_dir), false) {{
{tables}
  for (size_t index = 0; index < {num_inputs}; ++index) inputs_info_[index].name = input_names[index];
  for (size_t index = 0; index < {num_outputs}; ++index) outputs_info_[index].name = output_names[index];
  const int64_t* extents = constant_extents;
  for (size_t index = 0; index < {num_constants}; ++index) {{
    const kiln::Constant& row = constants[index];
    auto& info = constants_info_[index];
    info.name = row.name;
    info.original_fqn = row.original_name;
    info.type = static_cast<int32_t>(row.type);
    info.dtype = row.dtype();
    info.device_type = aoti_torch_device_type_cpu();
    info.layout = aoti_torch_layout_strided();
    info.offset = row.offset;
    info.data_size = row.size_bytes;
    info.shape.assign(extents, extents + row.dims);
    info.stride.assign(extents + row.dims, extents + 2 * row.dims);
    extents += 2 * row.dims;
  }}
  update_constants_map(std::move(constants_map));
  update_constants_array(std::move(constants_array));
"""


def write_constructor(wrapper: CppWrapperCpu) -> None:
    """Replaces `codegen_model_constructor`: writes the constructor, with tables of names and constants."""
    graph = V.graph
    constants = {name: graph.get_original_value_of_constant(name) for name in graph.constants}
    types = {normalize_name(name): "Buffer" for name in graph.named_buffers}
    types |= {normalize_name(name): "Parameter" for name in graph.named_parameters}
    original_names = graph.allocated_constant_name | graph.dynamo_flat_name_to_original_fqn
    rows = [
        f'{{"{name}", "{original_names[name]}", ConstantType::{types.get(name, "Unknown")}, '
        f"{_dtype(tensor.dtype)}, {tensor.dim()}, {tensor.storage_offset()}, {_round_up(tensor)}}}"
        for name, tensor in constants.items()
    ]
    tables = [
        _table("char* const", "input_names", [f'"{name}"' for name in graph.graph_inputs]),
        _table("char* const", "output_names", [f'"output{index}"' for index in range(len(graph.graph_outputs))]),
        _table("kiln::Constant", "constants", rows),
        _table("int64_t", "constant_extents", _list_extents(constants.values())),
    ]
    wrapper.prefix.splice(
        _CONSTRUCTOR.format(
            model=wrapper.aoti_model_class_name,
            num_inputs=len(graph.graph_inputs),
            num_outputs=len(graph.graph_outputs),
            num_constants=len(constants),
            tables="".join(tables),
        )
    )
    options = config.aot_inductor
    wrapper.codegen_write_arg_with_large_length_string("in_spec_", options.serialized_in_spec)
    wrapper.codegen_write_arg_with_large_length_string("out_spec_", options.serialized_out_spec)
    wrapper.prefix.writeline("kernels_ = std::make_unique<AOTInductorModelKernels>();")
    wrapper.prefix.writeline("}")


def write_input_checks(wrapper: CppWrapperCpu, count: str = "") -> None:
    """Replaces `generate_input_output_runtime_checks`: writes the function that a step calls first, with its table.
    `count` is code that reads from `input_handles` which tokens of the step are live; see `live_rows.write_count`.
    """
    inputs = V.graph.graph_inputs.values()
    rows = [f"{{{_dtype(one.get_dtype())}, {len(one.get_size())}}}" for one in inputs]
    extents = [str(extent) for one in inputs for extent in (*one.get_size(), *one.get_stride())]
    wrapper.prefix.splice(
        "AOTI_NOINLINE static void __check_inputs_outputs(AtenTensorHandle* input_handles, AtenTensorHandle*) {\n"
        f"{_table('kiln::Input', 'inputs', rows)}{_table('int64_t', 'extents', extents)}"
        f"kiln::check_inputs(input_handles, inputs, {len(rows)}, extents);\n"
        f"{count}}}\n"
    )


def _table(row_type: str, name: str, rows: list[str]) -> str:
    """Writes an array; C++ has no empty ones."""
    if not rows:
        return f"static const {row_type}* {name} = nullptr;\n"
    lines = ",\n".join(rows)
    return f"static const {row_type} {name}[] = {{\n{lines}}};\n"


def _list_extents(tensors: Iterable[torch.Tensor]) -> list[str]:
    return [str(extent) for tensor in tensors for extent in (*tensor.shape, *tensor.stride())]


def _dtype(dtype: torch.dtype) -> str:
    return f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}"


def _round_up(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
