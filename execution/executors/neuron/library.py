"""The calls of libnrt that Kiln makes, as AWS's headers declare them (nrt.h, nrt_experimental.h, nrt_status.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from types import MappingProxyType
from typing import Any, Final

from execution.device_errors import NeuronLibraryMissing

#: The library's name, and where its package puts it if the loader does not look there.
LIBRARIES: Final = ("libnrt.so.1", "/opt/aws/neuron/lib/libnrt.so.1")

#: `nrt_framework_type_t` of a program without a framework.
NO_FRAMEWORK: Final = 1
#: `nrt_tensor_placement_t` of memory on the device.
ON_DEVICE: Final = 0
#: `nrt_tensor_usage_t` of a model's inputs.
INPUT: Final = 0

_Handle = c_void_p
_Out = POINTER(c_void_p)


class InstanceInfo(ctypes.Structure):
    """What kind of instance the host is: `nrt_instance_info_t` of nrt.h."""

    _fields_ = [("family", c_uint32), ("size", c_uint32), ("arch_name", c_char * 16), ("device_revision", c_char * 8)]


class Version(ctypes.Structure):
    """Version of the library: `nrt_version_t` of nrt_version.h."""

    _fields_ = [
        ("major", c_uint64),
        ("minor", c_uint64),
        ("patch", c_uint64),
        ("maintenance", c_uint64),
        ("detail", c_char * 128),
        ("git_hash", c_char * 64),
    ]


class MemoryStats(ctypes.Structure):
    """Memory of a logical core, in bytes: `nrt_vnc_memory_stats_t` of nrt.h."""

    _fields_ = [("bytes_used", c_size_t), ("bytes_limit", c_size_t)]


class TensorInfo(ctypes.Structure):
    """One input or output of a NEFF: `nrt_tensor_info_t` of nrt_experimental.h."""

    _fields_ = [
        ("name", c_char * 256),
        ("usage", c_int),
        ("size", c_size_t),
        ("dtype", c_int),
        ("shape", POINTER(c_uint32)),
        ("ndim", c_uint32),
    ]


class TensorInfos(ctypes.Structure):
    """The beginning of `nrt_tensor_info_array_t`; as many `TensorInfo` follow."""

    _fields_ = [("tensor_count", c_uint64)]


#: The arguments of each call that returns a status.
STATUS_CALLS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "nrt_init": (c_int, c_char_p, c_char_p),
        "nrt_get_instance_info": (POINTER(InstanceInfo), c_size_t),
        "nrt_get_total_vnc_count": (POINTER(c_uint32),),
        "nrt_get_vnc_memory_stats": (c_uint32, POINTER(MemoryStats), c_size_t, POINTER(c_size_t)),
        "nrt_load": (c_void_p, c_size_t, c_int32, c_int32, _Out),
        "nrt_load_collectives": (c_void_p, c_size_t, c_int32, c_int32, c_uint32, c_uint32, _Out),
        "nrt_unload": (_Handle,),
        "nrt_get_model_tensor_info": (_Handle, POINTER(POINTER(TensorInfos))),
        "nrt_free_model_tensor_info": (POINTER(TensorInfos),),
        "nrt_allocate_tensor_set": (_Out,),
        "nrt_add_tensor_to_tensor_set": (_Handle, c_char_p, _Handle),
        "nrt_execute": (_Handle, _Handle, _Handle),
        "nrt_tensor_allocate": (c_int, c_int, c_size_t, c_char_p, _Out),
        "nrt_tensor_read": (_Handle, c_void_p, c_size_t, c_size_t),
        "nrt_tensor_write": (_Handle, c_void_p, c_size_t, c_size_t),
        "nrt_tensor_memset": (_Handle, c_uint64, c_int, c_size_t),
    }
)
#: The arguments of each call that returns nothing.
VOID_CALLS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {"nrt_close": (), "nrt_destroy_tensor_set": (_Out,), "nrt_tensor_free": (_Out,)}
)


def open_library() -> ctypes.CDLL:
    """Opens libnrt and declares the calls. They run without the interpreter's lock."""
    library = find_library()
    for calls, result in ((STATUS_CALLS, c_int), (VOID_CALLS, None)):
        for name, arguments in calls.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise NeuronLibraryMissing(f"{LIBRARIES[0]} has no {name}") from error
            function.argtypes, function.restype = arguments, result
    return library


def find_library() -> ctypes.CDLL:
    """Loads libnrt without declaring its calls."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            last = error
    raise NeuronLibraryMissing(f"{LIBRARIES[0]} cannot be loaded") from last


def read_version(library: ctypes.CDLL) -> str | None:
    """Reads the library's version, such as `2.33.10.0`; None if it does not say."""
    version = Version()
    try:
        call = library.nrt_get_version
    except AttributeError:
        return None
    call.argtypes, call.restype = (POINTER(Version), c_size_t), c_int
    if call(ctypes.byref(version), ctypes.sizeof(version)):
        return None
    return f"{version.major}.{version.minor}.{version.patch}.{version.maintenance}"
