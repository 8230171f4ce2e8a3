"""One library made by AOTInductor, called through its C interface.

The interface is declared in torch/csrc/inductor/aoti_runtime/interface.h. ctypes lets go of the interpreter lock during
a call; torch's own Python loaders hold it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import byref, c_bool, c_char_p, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _aoti

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool)

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)


class AotiError(Exception):
    """A call into the library failed; the message is the library's."""


@dataclass(frozen=True, slots=True)
class AotiConstant:
    """A tensor that the library must be given.

    Attributes:
        name: Its name in the exported program.
        symbol: Its name in the library's C interface.
        dtype: None where it is one that no bundle holds.
    """

    name: str
    symbol: bytes
    dtype: torch.dtype | None
    size_bytes: int


class _ConstantEntry(ctypes.Structure):
    _fields_ = (("symbol", c_char_p), ("handle", c_void_p))


class AotiLibrary:
    """A loaded library with up to two sets of constants: the one in use and the one staged.

    It holds no tensor data; whoever binds constants keeps the memory behind them mapped, and calls `bind_constants` and
    `swap_constants` before the first `run`: an unbound constant is a segmentation fault. One thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            AotiError: It is no library made by AOTInductor of this torch.
        """
        try:
            self._library = ctypes.CDLL(str(path))
            self._run = self._library.AOTInductorModelContainerRunSingleThreaded
        except (OSError, AttributeError) as error:
            raise AotiError(str(error)) from error
        self._run.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p)
        self._container = c_void_p()
        self._call("CreateWithDevice", byref(self._container), c_size_t(1), b"cpu", None)
        self._active: list[c_void_p] = []
        self._staged: list[c_void_p] = []
        self.num_inputs = self._count("GetNumInputs")
        self.num_outputs = self._count("GetNumOutputs")
        self.constants = tuple(self._constant(index) for index in range(self._count("GetNumConstants")))

    def bind_constants(self, tensors: Mapping[str, Tensor]) -> None:
        """Stages a tensor for every constant, by the constants' names, without copying any data."""
        self.discard_staged()
        self._staged = _handles([tensors[constant.name] for constant in self.constants])
        entries = (_ConstantEntry * len(self._staged))(
            *(
                _ConstantEntry(constant.symbol, handle.value)
                for constant, handle in zip(self.constants, self._staged, strict=True)
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

    def swap_constants(self) -> None:
        """Puts the staged constants in use and lets go of the others."""
        self._call("SwapConstantBuffer", self._container)
        self._active, self._staged = self._staged, self._active
        self.discard_staged()

    def discard_staged(self) -> None:
        """Lets go of staged constants, if there are any."""
        for handle in self._staged:
            self._library.aoti_torch_delete_tensor_object(handle)
        self._staged = []

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Calls the program; it reads and writes the arguments where they lie, and returns new tensors.

        Raises:
            AotiError: The program raised.
        """
        # The call takes the handles over, whether it succeeds or not.
        inputs = (c_void_p * self.num_inputs)(*(handle.value for handle in _handles(arguments)))
        outputs = (c_void_p * self.num_outputs)()
        self._check(self._run(self._container, inputs, len(inputs), outputs, len(outputs), None, None))
        return [_aoti.alloc_tensor_by_stealing_from_void_ptr(_new_capsule(output, None, None)) for output in outputs]

    def close(self) -> None:
        """Lets go of everything but the code, which stays mapped."""
        if self._container:
            self._call("Delete", self._container)
            self._container = c_void_p()
        self._staged += self._active
        self._active = []
        self.discard_staged()

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
        codes = {getattr(self._library, f"aoti_torch_dtype_{str(known)[6:]}")(): known for known in _DTYPES}
        return AotiConstant(name.value.decode(), symbol.value, codes.get(dtype.value), size.value)

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


def _handles(tensors: Iterable[Tensor]) -> list[c_void_p]:
    """New handles, each of which keeps its tensor's memory until it is deleted or taken over."""
    capsules = _aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [c_void_p(_capsule_pointer(capsule, None)) for capsule in capsules]
