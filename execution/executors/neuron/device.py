"""The NeuronCores of this process, and tensors in their memory."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NoReturn

from bundle.manifest import Target, TargetKind
from execution.device_errors import (
    DeviceBroken,
    DeviceBusy,
    DeviceCallFailed,
    DeviceHung,
    DeviceMemoryShort,
    DeviceUnsuitable,
)
from execution.executors.neuron.initialization import IN_RANKS, Initialization
from execution.executors.neuron.library import (
    NO_FRAMEWORK,
    ON_DEVICE,
    InstanceInfo,
    MemoryStats,
    open_library,
)
from execution.executors.neuron.status import Consequence, describe_status, tell_status
from execution.visible_cores import list_visible
from targets.neuron import NEFF

#: The target that each family of instances is (`nrt_instance_info_t.family`, an enumeration in nrt.h).
FAMILIES: Final[Mapping[int, TargetKind]] = MappingProxyType(
    {
        **dict.fromkeys((2, 3), "trn1"),
        **dict.fromkeys((4, 7), "inf2"),
        **dict.fromkeys((5, 6, 8, 9, 10, 11, 12, 13), "trn2"),
        **dict.fromkeys((14, 15), "trn3"),
    }
)

logger = logging.getLogger(__name__)

VISIBLE_CORES: Final = NEFF.core_variable
LOGICAL_CORE_SIZE: Final = NEFF.core_size_variable
EXEC_TIMEOUT: Final = "NEURON_RT_EXEC_TIMEOUT"

_MEMORY_STATS: Final = "nrt_get_vnc_memory_stats"

#: A rank has one logical core, the first that its process sees.
CORE: Final = 0


class NeuronDevice:
    """libnrt, initialized for the one logical core of this process. Use `open_device`."""

    def __init__(self, target: Target, initialization: Initialization) -> None:
        """Initializes the library, which takes the core until the process ends."""
        self._library = open_library()
        _require_core_size(target)
        # libnrt reads them when it is initialized or loads a NEFF.
        os.environ[LOGICAL_CORE_SIZE] = str(target.lnc)
        os.environ.setdefault(EXEC_TIMEOUT, f"{NEFF.find_step_timeout_s(0):.0f}")
        os.environ.setdefault(VISIBLE_CORES, "0")
        self._require_cores()
        code = initialization.run(
            lambda: self.call_for_status("nrt_init", NO_FRAMEWORK, b"", b""), os.environ[VISIBLE_CORES]
        )
        if code:
            self.raise_status("nrt_init", code)
        try:
            self._require_kind(target)
        except BaseException:
            self._library.nrt_close()
            raise
        atexit.register(self._library.nrt_close)

    def require_target(self, target: Target) -> None:
        """Checks that a bundle is for the core as it was initialized."""
        self._require_kind(target)
        _require_core_size(target)

    @property
    def free_bytes(self) -> int | None:
        """Bytes of the core's memory that nothing holds; None if the library does not tell."""
        stats = self.read_memory()
        return None if stats is None else max(0, int(stats.bytes_limit) - int(stats.bytes_used))

    def read_memory(self) -> MemoryStats | None:
        """Reads how much of the core's memory is held, and how much there is; None, and a note in the log, if that
        fails: it is advice, and allocations fail by themselves.
        """
        stats, size = MemoryStats(), ctypes.c_size_t()
        code = self.call_for_status(_MEMORY_STATS, CORE, stats, ctypes.sizeof(stats), size)
        if code:
            logger.warning("%s failed: %s; memory is not checked in advance", _MEMORY_STATS, tell_status(code))
            return None
        return stats

    def require_memory(self, what: str, needed_bytes: int) -> None:
        """Checks that the core has memory for something, before a part of it is allocated, if the library tells."""
        free_bytes = self.free_bytes
        if free_bytes is not None and needed_bytes > free_bytes:
            raise DeviceMemoryShort(what, needed_bytes, free_bytes)

    def call(self, name: str, *arguments: object) -> None:
        """Makes a call that returns a status."""
        code = self.call_for_status(name, *arguments)
        if code:
            self.raise_status(name, code)

    def call_for_status(self, name: str, *arguments: object) -> int:
        """Makes a call and returns its status. Structures and integers of ctypes are passed by reference."""
        return int(getattr(self._library, name)(*(_by_reference(argument) for argument in arguments)))

    def release(self, name: str, handle: ctypes.c_void_p) -> None:
        """Makes a call that frees what a handle stands for, and clears the handle."""
        getattr(self._library, name)(ctypes.byref(handle))

    def raise_status(self, call: str, code: int) -> NoReturn:
        """Raises the error that a status stands for."""
        text = tell_status(code, call)
        match describe_status(code, call).consequence:
            case Consequence.HANG:
                raise DeviceHung(call, text)
            case Consequence.BREAK:
                raise DeviceBroken(call, text)
            case Consequence.SHORT:
                raise DeviceMemoryShort(call, None, self.free_bytes)
            case Consequence.BUSY:
                raise DeviceBusy(os.environ.get(VISIBLE_CORES, ""), text, "another process has them")
            case Consequence.REFUSE:
                raise DeviceUnsuitable("executables", text, "NEFFs that this host's Neuron runtime takes")
            case _:
                raise DeviceCallFailed(call, text)

    def _require_kind(self, target: Target) -> None:
        info = InstanceInfo()
        self.call("nrt_get_instance_info", info, ctypes.sizeof(info))
        kind = FAMILIES.get(info.family, f"instances of family {info.family}, which Kiln does not know")
        if kind != target.kind:
            raise DeviceUnsuitable("target.kind", target.kind, kind)

    def _require_cores(self) -> None:
        total = ctypes.c_uint32()
        self.call("nrt_get_total_vnc_count", total)
        # Not by their numbers: in a container they are the host's, of which the library may count only some.
        num_wanted = len(list_visible(NEFF))
        if num_wanted > total.value:
            raise DeviceUnsuitable("cores", str(num_wanted), f"at most {total.value}, as many as this host has")


def _require_core_size(target: Target) -> None:
    size = os.environ.get(LOGICAL_CORE_SIZE, str(target.lnc))
    if size != str(target.lnc):
        raise DeviceUnsuitable("target.lnc", str(target.lnc), f"{size}, as {LOGICAL_CORE_SIZE} says")


def _by_reference(argument: object) -> object:
    is_result = isinstance(argument, ctypes.Structure | ctypes.c_size_t | ctypes.c_uint32)
    return ctypes.byref(argument) if is_result else argument  # type: ignore[arg-type]


class DeviceTensor:
    """A piece of the core's memory."""

    def __init__(self, device: NeuronDevice, name: str, size_bytes: int) -> None:
        """Allocates memory, which is not cleared."""
        self.size_bytes = size_bytes
        self.handle = ctypes.c_void_p()
        self._device = device
        try:
            device.call("nrt_tensor_allocate", ON_DEVICE, CORE, size_bytes, name.encode(), ctypes.byref(self.handle))
        except DeviceMemoryShort as error:
            raise DeviceMemoryShort(name, size_bytes, device.free_bytes) from error

    def write(self, address: int, offset: int = 0, size_bytes: int | None = None) -> None:
        """Copies a part from host memory; by default, the whole tensor."""
        size_bytes = self.size_bytes if size_bytes is None else size_bytes
        self._device.call("nrt_tensor_write", self.handle, address, offset, size_bytes)

    def read(self, address: int) -> None:
        """Copies the whole tensor to host memory."""
        self._device.call("nrt_tensor_read", self.handle, address, 0, self.size_bytes)

    def zero(self, offset: int, size_bytes: int) -> None:
        """Zeroes a part."""
        self._device.call("nrt_tensor_memset", self.handle, offset, 0, size_bytes)

    def free(self) -> None:
        """Gives the memory back. Calling it again is harmless."""
        if self.handle:
            self._device.release("nrt_tensor_free", self.handle)


class TensorSet:
    """Tensors by the names that a NEFF has for them."""

    def __init__(self, device: NeuronDevice, tensors: Mapping[str, DeviceTensor]) -> None:
        """Makes a set. The tensors stay their owner's."""
        self.handle = ctypes.c_void_p()
        self._device = device
        device.call("nrt_allocate_tensor_set", ctypes.byref(self.handle))
        try:
            for name, tensor in tensors.items():
                device.call("nrt_add_tensor_to_tensor_set", self.handle, name.encode(), tensor.handle)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Releases the set, not its tensors. Calling it again is harmless."""
        if self.handle:
            self._device.release("nrt_destroy_tensor_set", self.handle)


_opened: NeuronDevice | None = None
_opening: Final = threading.Lock()


def open_device(target: Target, initialization: Initialization = IN_RANKS) -> NeuronDevice:
    """Returns the device of this process; initializes it at the first call, which a rank makes after its fork.

    libnrt cannot be initialized anew once it was closed, so the device stays until the process ends.

    Raises:
        NeuronLibraryMissing: There is no libnrt, or one without a call that Kiln makes.
        DeviceUnsuitable: The host has other cores than the target's.
        DeviceBusy: Another process has the core, as far as can be told.
        DeviceCallFailed: libnrt cannot be initialized.
    """
    global _opened  # noqa: PLW0603 - the library's state is the process's
    with _opening:
        if _opened is None:
            _opened = NeuronDevice(target, initialization)
        else:
            _opened.require_target(target)
        return _opened
