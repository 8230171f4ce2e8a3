"""How compiled executables call the collectives: as plain C functions, without Python and its lock."""

from __future__ import annotations

from typing import Final

import torch

import execution.collectives  # noqa: F401 - registers the operators

#: C functions by operator, as `aot_inductor.custom_ops_to_c_shims` takes them. They are in the native library of
#: kiln-execution, which every process loads before it opens an executable.
C_FUNCTIONS: Final[dict[torch._ops.OpOverload, list[str]]] = {
    torch.ops.kiln.all_reduce.default: [
        "AOTITorchError aoti_torch_cpu_all_reduce(AtenTensorHandle input, int64_t tp_degree, AtenTensorHandle* output)"
    ],
    torch.ops.kiln.all_gather.default: [
        "AOTITorchError aoti_torch_cpu_all_gather(AtenTensorHandle input, int64_t tp_degree, AtenTensorHandle* output)"
    ],
}
