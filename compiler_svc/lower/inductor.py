"""Steers Inductor: sets the instruction set, the places of files, and keeps this host's paths out of libraries."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.codegen import common
from torch._inductor.codegen.common import init_backend_registration
from torch._inductor.codegen.cpp import CppKernel, CppKernelProxy, OuterLoopFusedSchedulerNode, ParallelDepth
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.fx_passes import joint_graph, post_grad
from torch.utils._sympy.value_ranges import ValueRanges
from tqdm import tqdm

import execution.collectives.operators  # noqa: F401 - registers the operators
from compiler_svc.lower.common_objects import declare_interface, precompile_header
from compiler_svc.lower.job import LoweringJob
from compiler_svc.lower.limited_loop import LimitedLoop
from compiler_svc.lower.live_rows import generate_kernel, join_kernels, write_count
from compiler_svc.lower.tables import write_constructor, write_input_checks
from targets.cpu import GXX, X86_64

#: Elements below which one thread computes a loop alone. It reads 64 KB of floats in about the time in which two
#: threads begin and end a parallel region, if they need not be woken for it. Sums over fewer elements do not depend on
#: threads.
MIN_PARALLEL_ELEMENTS: Final = 16384
#: Threads that Inductor plans with. By default it would take the number of this host's processors, and the code would
#: depend on the host. It runs with any number. One thread would let it write code that all threads run at once.
PLANNED_THREADS: Final = 2


def decide_parallel_depth(kernel: CppKernel, deepest: ParallelDepth, threads: int) -> ParallelDepth:
    """Replaces `CppKernel.decide_parallel_depth`: how many of the loops in `deepest` threads divide, from the
    outermost.
    """
    if kernel.size_hint() < MIN_PARALLEL_ELEMENTS:
        return ParallelDepth(parallel_depth=0, start_depth=deepest.start_depth)
    chosen = _DECIDE(kernel, deepest, threads)
    loops: Any = getattr(getattr(kernel, "loop_nest", None), "loops", None) or ()
    # OpenMP does not divide two loops as one if the bound of the inner one depends on the outer one.
    inner = loops[chosen.start_depth + 1 : chosen.start_depth + chosen.parallel_depth]
    if any(isinstance(loop, LimitedLoop) for loop in inner):
        return ParallelDepth(parallel_depth=1, start_depth=chosen.start_depth)
    return chosen


_DECIDE: Final = CppKernel.decide_parallel_depth


def tighten(known: ValueRanges[Any], bounds: ValueRanges[Any]) -> ValueRanges[Any]:
    """Replaces `ValueRanges.tighten`, which takes the larger and the smaller one of what is nearly always equal: sympy
    takes long to find them.
    """
    return known if known == bounds else known & bounds


def register_patterns() -> None:
    """Registers the patterns that Inductor looks for in graphs of the CPU and what it writes code with, which it would
    do again in each process: a quarter of a lowering's time in Python.
    """
    init_backend_registration()
    # Each traced graph makes a progress bar. The first would start a thread, and a process with threads cannot fork.
    with _replaced(tqdm, "monitor_interval", 0):
        joint_graph.lazy_init(torch.device("cpu"))
        post_grad.lazy_init()


#: C functions by operator, as `aot_inductor.custom_ops_to_c_shims` takes them. The native library of kiln-execution has
#: them; every process loads it before it opens an executable.
C_FUNCTIONS: Final[dict[torch._ops.OpOverload, list[str]]] = {
    torch.ops.kiln.all_reduce.default: [
        "AOTITorchError aoti_torch_cpu_all_reduce(AtenTensorHandle input, int64_t tp_degree, AtenTensorHandle* output)"
    ],
    torch.ops.kiln.all_gather.default: [
        "AOTITorchError aoti_torch_cpu_all_gather(AtenTensorHandle input, int64_t tp_degree, AtenTensorHandle* output)"
    ],
}


class _ExactVectors(cpu_vec_isa.VecISA):  # type: ignore[misc]
    """Vectors of one level, without probing this host for more."""

    def __init__(self, extensions: Sequence[str]) -> None:
        """Takes the options of the C++ compiler for instructions that `-march` does not cover."""
        super().__init__()
        self._extensions = extensions

    def __bool__(self) -> bool:
        return True

    def build_arch_flags(self) -> str:
        """Options of the C++ compiler. Inductor's own code uses no instructions of the extensions; kernels may."""
        return " ".join([super().build_arch_flags(), *self._extensions])


class _ExactAvx2(_ExactVectors, cpu_vec_isa.VecAVX2):  # type: ignore[misc]
    """Vectors of x86-64-v3."""


class _ExactAvx512(_ExactVectors, cpu_vec_isa.VecAVX512):  # type: ignore[misc]
    """Vectors of x86-64-v4."""


_COMPILER_SCRIPT: Final = """\
#!/bin/sh
case " $* " in
*" -shared "*)
    exec {compiler} "$@" @{objects}
    ;;
*)
    exec {compiler} "$@"
    ;;
esac
"""
#: File in a job's directory that lists objects to link with the library; Inductor has no option for them.
_OBJECTS_FILE: Final = "objects"
_VECTOR_ISAS: Final = {256: _ExactAvx2, 512: _ExactAvx512}


@contextmanager
def steered(job: LoweringJob) -> Iterator[dict[str, Any]]:
    """Yields options for `torch._inductor.aot_compile`; they are in force, and valid, inside the block.

    Inductor would use every vector instruction of this host, read the text of precompiled headers again to see whether
    it has changed, compile the interface with every library, and take a third of its time to make rules for dtypes and
    to intersect equal bounds at each operation of a loop; it has no options to change any of these.
    """
    isa = X86_64[job.options.target.isa]
    with (
        _replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: [_VECTOR_ISAS[isa.vector_bits](isa.extensions)]),
        _replaced(codecache, "_precompile_header", partial(_find_header, job)),
        _replaced(ValueRanges, "tighten", tighten),
        _replaced(common, "DtypePropagationOpsHandler", cache(common.DtypePropagationOpsHandler)),
        _replaced(CppWrapperCpu, "_write_aoti_interface_header", declare_interface),
        _replaced(CppWrapperCpu, "codegen_model_constructor", write_constructor),
        _replaced(
            CppWrapperCpu,
            "generate_input_output_runtime_checks",
            lambda wrapper: write_input_checks(wrapper, _write_count(job)),
        ),
        _replaced(CppKernelProxy, "codegen_nodes", generate_kernel),
        _replaced(CppKernel, "decide_parallel_depth", decide_parallel_depth),
        _replaced(OuterLoopFusedSchedulerNode, "merge_outer_fusion_kernels", join_kernels),
    ):
        options = {
            "aot_inductor.output_path": str(job.directory / "executable.so"),
            # The default names are hashes of paths, which would end up in the library.
            "aot_inductor.model_name_for_generated_files": "executable",
            "aot_inductor.package_constants_in_so": False,
            # Weights have no values yet. Inductor would bake the garbage of small ones into the code, and for weights
            # of one element, such as a rank's number, also everything computed from them.
            "always_keep_tensor_constants": True,
            "joint_graph_constant_folding": False,
            "aot_inductor.custom_ops_to_c_shims": C_FUNCTIONS,
            "aot_inductor.enable_line_tables": False,
            # The function of `write_input_checks` checks inputs.
            "size_asserts": False,
            # The wrapper is most of the code but does no arithmetic.
            "aot_inductor.compile_wrapper_opt_level": "O1",
            "aot_inductor.precompile_headers": True,
            "cpp.cxx": (None, str(_write_compiler_script(job))),
            "cpp.march": isa.march,
            "cpp.simdlen": isa.vector_bits,
            # The process that runs the executable sets the number of threads, not the host that compiles it.
            "cpp.dynamic_threads": True,
            "cpp.threads": PLANNED_THREADS,
            "cpp.enable_floating_point_contract_flag": "fast" if job.options.optimization_level > 1 else "off",
            # The caller runs lowerings in parallel.
            "compile_threads": 1,
        }
        with config.patch(options):
            yield options


def _find_header(job: LoweringJob, header: str, _command: str, *, min_optimize: bool = False, **_flags: Any) -> str:
    return str(precompile_header(job, header, is_wrapper=min_optimize))


def _write_count(job: LoweringJob) -> str:
    return "" if job.live is None else write_count(job.live, tells_collectives=job.has_collectives)


def link_with(job: LoweringJob, objects: Sequence[Path]) -> None:
    """Links these objects with the job's library, in addition to earlier ones."""
    (job.directory / _OBJECTS_FILE).write_text("".join(f"{shlex.quote(str(path))}\n" for path in objects))


@contextmanager
def _replaced(owner: ModuleType | type, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _write_compiler_script(job: LoweringJob) -> Path:
    """Writes the script that runs the C++ compiler, and keeps the job's and torch's paths out of objects, so that equal
    jobs make equal bytes.
    """
    prefixes = {Path(torch.__file__).parents[1]: "/site-packages", job.directory: "/executable"}
    maps = [f"-ffile-prefix-map={path}={name}" for path, name in prefixes.items()]
    # torch's headers cause 2,660 lines of warnings with each library, an eighth of the time for its loops.
    compiler = shlex.join([str(GXX.find()), "-w", *maps])
    script = job.directory / GXX.name
    script.write_text(
        _COMPILER_SCRIPT.format(compiler=compiler, objects=shlex.quote(str(job.directory / _OBJECTS_FILE)))
    )
    script.chmod(0o755)
    return script
