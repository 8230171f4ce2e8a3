"""One NEFF on its core."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bundle.abi.neff import NeffInput, NeffOutput, NeffProgram
from bundle.abi.tensor import DTYPES, DType
from bundle.errors import NeffInvalid
from bundle.manifest import Executable, Manifest, Target
from bundle.neff import check_neff
from bundle.neff_consistency import find_neff_problems
from execution.device_errors import DeviceCallFailed
from execution.dtypes import TORCH_DTYPES
from execution.errors import ExecutableInvalid, ExecutionError, RankLost, StepFailed
from execution.executors.neuron.device import CORE, DeviceTensor, NeuronDevice, TensorSet
from execution.executors.neuron.library import INPUT, TensorInfo, TensorInfos
from execution.executors.neuron.status import Consequence, describe_status

logger = logging.getLogger(__name__)

#: `vnc_count` of a NEFF that runs on one logical core.
_ONE_CORE: Final = 1
#: libnrt calls items of float8 int8, as AWS's nkipy notes.
_TOLD_AS_INT8: Final = frozenset(DTYPES[name].nrt for name in ("float8_e4m3fn", "float8_e5m2"))


class _Form(NamedTuple):
    is_input: bool
    size_bytes: int
    dtype: int
    shape: tuple[int, ...]

    def fits(self, other: _Form) -> bool:
        """Whether memory for the one can be that of the other."""
        return (self.is_input, self.size_bytes) == (other.is_input, other.size_bytes)


class NeffOnCore:
    """A loaded NEFF with memory for its inputs and outputs; weights and state are its callers'."""

    def __init__(self, device: NeuronDevice, executable: Executable, path: Path, manifest: Manifest, rank: int) -> None:
        program = _require_map(executable, manifest)
        self._device = device
        self._executable = executable
        self._handle = ctypes.c_void_p()
        self._num_without_numbers = 0
        self._rank, self._num_ranks = rank, manifest.tp_degree
        with ExitStack() as stack:
            self._load(path, program, manifest.target)
            stack.callback(self._unload)
            self._check_tensors(program)
            self._inputs = {
                one.tensor: self._allocate(stack, one.name, one.dtype, one.shape)
                for one in program.inputs
                if one.kind == "input"
            }
            self._outputs = {
                one.tensor: self._allocate(stack, one.name, one.dtype, one.shape)
                for one in program.outputs
                if one.kind == "output"
            }
            self._program = program
            self._resources = stack.pop_all()

    def bind(
        self, weights: Mapping[tuple[str, str], DeviceTensor], state: Mapping[str, DeviceTensor]
    ) -> tuple[TensorSet, TensorSet]:
        """Makes the sets of inputs and outputs with these weights and this state."""
        constants = {one.name: weights[one.weight_set, one.tensor] for one in self._executable.constants}
        taken = {"input": self._inputs, "weight": constants, "state": state}
        given = {"output": self._outputs, "state": state}
        inputs = TensorSet(self._device, {one.name: taken[one.kind][one.tensor] for one in self._program.inputs})
        try:
            outputs = TensorSet(self._device, {one.name: given[one.kind][one.tensor] for one in self._program.outputs})
        except BaseException:
            inputs.free()
            raise
        return inputs, outputs

    def run(self, arguments: Sequence[Tensor], sets: tuple[TensorSet, TensorSet]) -> dict[str, Tensor]:
        """Runs the NEFF once on the manifest's inputs, in its order, contiguous; returns new tensors by name."""
        try:
            return self._run(arguments, sets)
        except RankLost:
            raise
        except ExecutionError as error:
            raise StepFailed(self._executable.tag, error.metadata.get("status", str(error))) from error

    def _run(self, arguments: Sequence[Tensor], sets: tuple[TensorSet, TensorSet]) -> dict[str, Tensor]:
        for spec, argument in zip(self._executable.inputs, arguments, strict=True):
            self._inputs[spec.name].write(argument.data_ptr())
        inputs, outputs = sets
        code = self._device.call_for_status("nrt_execute", self._handle, inputs.handle, outputs.handle)
        if code and describe_status(code).consequence is not Consequence.COUNT:
            self._device.raise_status("nrt_execute", code)
        if code:
            self._count_without_numbers()
        results = {}
        for spec in self._executable.outputs:
            result = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
            self._outputs[spec.name].read(result.data_ptr())
            results[spec.name] = result
        return results

    def close(self) -> None:
        """Frees inputs and outputs and unloads the NEFF."""
        self._resources.close()

    def _count_without_numbers(self) -> None:
        self._num_without_numbers += 1
        number = self._num_without_numbers
        # Powers of two: a model that always makes some would fill the log.
        if number & (number - 1) == 0:
            logger.warning("%s: %d steps so far had outputs without numbers", self._executable.tag, number)

    def _load(self, path: Path, program: NeffProgram, target: Target) -> None:
        tag = self._executable.tag
        try:
            check_neff(self._executable, target, path)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
                view = (ctypes.c_char * len(data)).from_buffer(data)
                try:
                    self._call_load(ctypes.addressof(view), len(data), program)
                finally:
                    del view
        except (OSError, NeffInvalid) as error:
            detail = str(error) if isinstance(error, NeffInvalid) else f"it cannot be read ({type(error).__name__})"
            raise ExecutableInvalid(tag, detail) from error
        except DeviceCallFailed as error:
            raise ExecutableInvalid(tag, f"libnrt does not load it: {error.metadata['status']}") from error

    def _call_load(self, address: int, size_bytes: int, program: NeffProgram) -> None:
        arguments: list[object] = [address, size_bytes, CORE, _ONE_CORE]
        if program.is_collective:
            # The first one waits for the other ranks, with which it makes the communicator.
            arguments += [self._rank, self._num_ranks]
        name = "nrt_load_collectives" if program.is_collective else "nrt_load"
        self._device.call(name, *arguments, ctypes.byref(self._handle))

    def _unload(self) -> None:
        self._device.call("nrt_unload", self._handle)

    def _allocate(self, stack: ExitStack, name: str, dtype: DType, shape: tuple[int, ...]) -> DeviceTensor:
        tensor = DeviceTensor(self._device, name, count_bytes(dtype, shape))
        stack.callback(tensor.free)
        return tensor

    def _check_tensors(self, program: NeffProgram) -> None:
        """Refuses tensors of other names, usages or bytes; of another dtype or shape, the log tells: libnrt does not
        report the original dtype of every tensor, as AWS notes.
        """
        tensors: list[NeffInput | NeffOutput] = [*program.inputs, *program.outputs]
        described = {one.name: _form_of(one) for one in tensors}
        held = self._read_tensors()
        others = []
        for name in sorted(held.keys() | described.keys()):
            told, expected = held.get(name), described.get(name)
            if told == expected:
                continue
            if told is None or expected is None or not told.fits(expected):
                detail = f"tensor {name} of the NEFF is {_describe(told)}, the manifest has {_describe(expected)}"
                raise ExecutableInvalid(self._executable.tag, detail)
            others.append(f"{name} is {_describe(told)}, the manifest has {_describe(expected)}")
        if others:
            message = "%s: libnrt reports another dtype or shape of as many bytes for %d tensors; the first: tensor %s"
            logger.warning(message, self._executable.tag, len(others), others[0])

    def _read_tensors(self) -> dict[str, _Form]:
        infos = ctypes.POINTER(TensorInfos)()
        self._device.call("nrt_get_model_tensor_info", self._handle, ctypes.byref(infos))
        try:
            begin = ctypes.addressof(infos.contents) + ctypes.sizeof(TensorInfos)
            array = (TensorInfo * infos.contents.tensor_count).from_address(begin)
            return {
                one.name.decode(errors="replace"): _Form(
                    one.usage == INPUT, one.size, _tell(one.dtype), tuple(one.shape[: one.ndim])
                )
                for one in array
            }
        finally:
            self._device.call("nrt_free_model_tensor_info", infos)


def count_bytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize


def _require_map(executable: Executable, manifest: Manifest) -> NeffProgram:
    program = executable.neff
    if program is None:
        raise ExecutableInvalid(executable.tag, "the manifest has no map of the NEFF's tensors")
    constants = {one.name for one in executable.constants}
    for one in program.inputs:
        if one.kind == "weight" and one.tensor not in constants:
            raise ExecutableInvalid(executable.tag, f"constant {one.tensor} is bound to no weight")
    for problem in find_neff_problems("neff", program, executable, manifest):
        raise ExecutableInvalid(executable.tag, f"its tensor map does not fit what the manifest has: {problem}")
    return program


def _form_of(one: NeffInput | NeffOutput) -> _Form:
    dtype = _tell(DTYPES[one.dtype].nrt)
    return _Form(isinstance(one, NeffInput), count_bytes(one.dtype, one.shape), dtype, one.shape)


def _tell(dtype: int) -> int:
    """What libnrt says of a tensor that has this `nrt_dtype_t`."""
    return DTYPES["int8"].nrt if dtype in _TOLD_AS_INT8 else dtype


def _describe(form: _Form | None) -> str:
    if form is None:
        return "nothing"
    dtype = next((name for name, item in DTYPES.items() if item.nrt == form.dtype), f"dtype {form.dtype:#x}")
    return f"{'input' if form.is_input else 'output'} {dtype} {list(form.shape)} of {form.size_bytes} bytes"
