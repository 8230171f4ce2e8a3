"""What calls of our kernels in the code of libraries have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

#: Types in generated code, which knows no narrow floats.
_CPP_TYPES: Final = {
    torch.float32: "float",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
    torch.float8_e4m3fn: "uint8_t",
    torch.int8: "int8_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
}
#: What the code of libraries in progress declares already.
_DECLARED: Final[WeakKeyDictionary[PythonWrapperCodegen, set[str]]] = WeakKeyDictionary()


def declare(wrapper: PythonWrapperCodegen, function: str) -> None:
    """Declares a function of C in the code of a library, once."""
    declared = _DECLARED.setdefault(wrapper, set())
    if function not in declared:
        declared.add(function)
        wrapper.header.splice(f'extern "C" void {function};\n')


def point(tensor: Any) -> str:
    """Writes the pointer to a tensor's first element, which may lie within another tensor's memory."""
    if tensor is None:
        return "nullptr"
    element = _CPP_TYPES[tensor.get_dtype()]
    return f"static_cast<{element}*>({tensor.get_name()}.data_ptr()) + {tensor.get_layout().offset}"


def join_pointers(tensors: Sequence[Any]) -> str:
    """Writes the pointers to weights, which begin with their own memory."""
    return ", ".join(f"{tensor.get_name()}.data_ptr()" for tensor in tensors)


def join_sizes(tensors: Sequence[Any], axis: int = 0) -> str:
    """Writes the sizes of an axis."""
    return ", ".join(str(tensor.get_size()[axis]) for tensor in tensors)


def make_contiguous(tensor: Any) -> Any:
    """Has generated code hold a tensor in memory, densely."""
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(tensor))


def lay_out(like: Any, size: Sequence[Any]) -> ir.FixedLayout:
    """Lays out a dense result of a kernel, with the device and dtype of an input."""
    size = list(size)
    return ir.FixedLayout(like.get_device(), like.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
