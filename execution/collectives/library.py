"""Loads the native library of collectives, as execution/native/collectives.h declares it. Knows no tensors."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from typing import Final

#: Values of `Outcome` in the header: how a collective ended.
DONE, ABORTED, TIMED_OUT, INVALID = range(4)

_MODULE: Final = "execution._collectives"


class NativeCommunicator(ctypes.Structure):
    """The struct `Communicator` of the header."""

    _fields_ = (
        ("memory", c_void_p),
        ("rank", c_int32),
        ("tp_degree", c_int32),
        ("spin_ns", c_int64),
        ("timeout_ns", c_int64),
    )


_COMMUNICATOR: Final = POINTER(NativeCommunicator)
_SIGNATURES: Final = {
    "kiln_max_ranks": (c_int32, ()),
    "kiln_memory_size": (c_size_t, (c_int32,)),
    "kiln_abort": (None, (c_void_p,)),
    "kiln_is_aborted": (c_int32, (c_void_p,)),
    "kiln_reset": (None, (c_void_p,)),
    "kiln_use": (None, (_COMMUNICATOR,)),
    "kiln_all_reduce": (c_int32, (_COMMUNICATOR, c_int32, c_void_p, c_int64, c_void_p)),
    "kiln_all_gather": (c_int32, (_COMMUNICATOR, c_void_p, c_int64, c_int64, c_void_p)),
}


@cache
def load_collective_library() -> ctypes.CDLL | None:
    """Loads the library, so that executables loaded later find its symbols; returns None if it has not been built."""
    spec = find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin, mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
