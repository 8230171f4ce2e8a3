"""Calls one library made by AOTInductor through its C interface.

torch/csrc/inductor/aoti_runtime/interface.h declares the interface. ctypes releases the interpreter lock during a call;
torch's own Python loaders hold it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import byref, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _aoti

from execution.collectives.library import load_collective_library
from execution.dtypes import TORCH_DTYPES

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)


class AotiError(Exception):
    """A call into the library failed; the message is the library's."""


@dataclass(frozen=True, slots=True)
class AotiConstant:
    """A constant of the library, for which the caller binds a tensor.

    `name` is the exported program's, `symbol` the C interface's. `dtype` is None if no bundle can hold it.
    """

    name: str
    symbol: bytes
    dtype: torch.dtype | None
    size_bytes: int


class _ConstantEntry(ctypes.Structure):
    _fields_ = (("symbol", c_char_p), ("handle", c_void_p))


class AotiLibrary:
    """A loaded library with up to two sets of constants: the one in use and the one staged.

    It holds no tensor data: the caller that binds constants keeps their memory while they are in use. An unbound
    constant causes a segmentation fault, so call `bind_constants` and `swap_constants` before the first `run`. Use it
    from one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        # Libraries of older bundles read this at their first run, and check arguments only if it is set.
        os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
        # Libraries of several ranks find their collectives in this one.
        load_collective_library()
        try:
            self._library = ctypes.CDLL(str(path))
            self._run = self._library.AOTInductorModelContainerRunSingleThreaded
        except (OSError, AttributeError) as error:
            raise AotiError(str(error)) from error
        self._run.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p)
        self._container = c_void_p()
        self._call("CreateWithDevice", byref(self._container), c_size_t(1), b"cpu", None)
        self._dtype_codes: dict[torch.dtype, int] = {
            dtype: getattr(self._library, f"aoti_torch_dtype_{name}")() for name, dtype in TORCH_DTYPES.items()
        }
        self.num_inputs = self._count("GetNumInputs")
        self.num_outputs = self._count("GetNumOutputs")
        self.constants = tuple(self._constant(index) for index in range(self._count("GetNumConstants")))

    def bind_constants(self, tensors: Mapping[str, Tensor]) -> None:
        """Stages a tensor for every constant, by the constant's name, without copying data."""
        handles = [self._borrow(tensors[constant.name]) for constant in self.constants]
        entries = (_ConstantEntry * len(handles))(
            *(
                _ConstantEntry(constant.symbol, handle.value)
                for constant, handle in zip(self.constants, handles, strict=True)
            )
        )
        use_inactive, validate_full_update = c_bool(True), c_bool(True)
        self._call(
            "UpdateUserManagedConstantBufferPairs",
            self._container,
            entries,
            c_size_t(len(entries)),
            use_inactive,
            validate_full_update,
        )
        for handle in handles:
            self._library.aoti_torch_delete_tensor_object(handle)

    def swap_constants(self) -> None:
        """Exchanges the staged constants and those in use."""
        self._call("SwapConstantBuffer", self._container)

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Calls the program, which reads and writes the arguments in place and returns new tensors."""
        # The call takes over the handles, even if it fails.
        inputs = (c_void_p * self.num_inputs)(*_handles(arguments))
        outputs = (c_void_p * self.num_outputs)()
        self._check(self._run(self._container, inputs, len(inputs), outputs, len(outputs), None, None))
        # torch's function for a single handle copies it and never deletes it, so the tensor's memory would leak.
        taken: list[Tensor] = _aoti.alloc_tensors_by_stealing_from_void_ptrs(
            [_new_capsule(output, None, None) for output in outputs]
        )
        return taken

    def close(self) -> None:
        """Releases everything except the code, which stays mapped."""
        if self._container:
            self._call("Delete", self._container)
            self._container = c_void_p()

    def _borrow(self, tensor: Tensor) -> c_void_p:
        """A handle on a tensor's memory that does not keep the memory alive.

        The library makes a second handle of every constant and never deletes it. If that handle kept the memory alive,
        weights could never be unmapped. Without it, each set of constants leaks a few hundred bytes per tensor.
        """
        sizes = (c_int64 * tensor.dim())(*tensor.shape)
        strides = (c_int64 * tensor.dim())(*tensor.stride())
        handle = c_void_p()
        failed = self._library.aoti_torch_create_tensor_from_blob(
            c_void_p(tensor.data_ptr()),
            c_int64(tensor.dim()),
            sizes,
            strides,
            c_int64(0),
            c_int32(self._dtype_codes[tensor.dtype]),
            c_int32(self._library.aoti_torch_device_type_cpu()),
            c_int32(0),
            byref(handle),
        )
        assert not failed, "torch refuses a tensor of its own"
        return handle

    def _constant(self, index: int) -> AotiConstant:
        symbol, name, dtype, size = c_char_p(), c_char_p(), c_int32(), c_size_t()
        for function, result in (
            ("GetConstantName", symbol),
            ("GetConstantOriginalFQN", name),
            ("GetConstantDtype", dtype),
            ("GetConstantDataSize", size),
        ):
            self._call(function, self._container, c_size_t(index), byref(result))
        assert symbol.value is not None
        assert name.value is not None
        known = next((known for known, code in self._dtype_codes.items() if code == dtype.value), None)
        return AotiConstant(name.value.decode(), symbol.value, known, size.value)

    def _count(self, function: str) -> int:
        count = c_size_t()
        self._call(function, self._container, byref(count))
        return count.value

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(getattr(self._library, f"AOTInductorModelContainer{function}")(*arguments))

    def _check(self, code: int) -> None:
        if code != 0:
            message = c_char_p()
            self._library.AOTInductorGetLastError(byref(message))
            raise AotiError((message.value or b"no message").decode(errors="replace").strip())


def _handles(tensors: Sequence[Tensor]) -> list[int]:
    """New handles. Each keeps its tensor alive until it is deleted or taken over."""
    capsules = _aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [_capsule_pointer(capsule, None) for capsule in capsules]
