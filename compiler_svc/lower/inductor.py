"""Steering Inductor: one explicit instruction set, files where we want them, and no trace of where they were made."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

import execution.collectives.operators  # noqa: F401 - registers the operators
from compiler_svc.lower.common_objects import declare_interface
from compiler_svc.lower.job import LoweringJob
from targets.cpu import GXX, X86_64

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


class _ExactAvx2(cpu_vec_isa.VecAVX2):  # type: ignore[misc]
    """AVX2 without a probe of this host."""

    def __bool__(self) -> bool:
        return True


class _ExactAvx512(cpu_vec_isa.VecAVX512):  # type: ignore[misc]
    """AVX-512 as in x86-64-v4: without a probe, and without the VNNI and bf16 that this host may have."""

    def __bool__(self) -> bool:
        return True


_JOB_ENVIRONMENT: Final = "KILN_LOWERING_DIRECTORY"
#: g++ has its output file open for as long as it compiles a header. If it is killed, Inductor takes the file to be
#: whole, and g++ refuses to compile anything with it from then on. Who compiles a header holds Inductor's lock for it.
_COMPILER_SCRIPT: Final = """\
#!/bin/sh
for output; do :; done
case $output:" $* " in
*.gch:*)
    rm -f "$output".new.*
    {compiler} "$@" -o "$output.new.$$" && exec mv "$output.new.$$" "$output"
    ;;
*" -shared "*)
    exec {compiler} "$@" @"${directory}/{objects}"
    ;;
*)
    exec {compiler} "$@"
    ;;
esac
"""
#: In a job's directory: objects that are linked with what Inductor makes, which has no option for it.
_OBJECTS_FILE: Final = "objects"
_VECTOR_ISAS: Final = {256: _ExactAvx2, 512: _ExactAvx512}


@contextmanager
def steered(job: LoweringJob) -> Iterator[dict[str, Any]]:
    """Options for `torch._inductor.aot_compile`, valid inside the block, where they are in force already.

    Inductor would vectorize for all that it finds on this host, keep precompiled headers under the temporary directory,
    and compile the interface with every library; it has no options for any of these.
    """
    vector_bits = X86_64[job.options.target.isa].vector_bits
    headers = job.cache_dir / "headers"
    headers.mkdir(exist_ok=True)
    with (
        _replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: [_VECTOR_ISAS[vector_bits]()]),
        _replaced(codecache, "_HEADER_DIR", str(headers)),
        _replaced(codecache, "_HEADER_LOCK_DIR", str(headers / "locks")),
        _replaced(CppWrapperCpu, "_write_aoti_interface_header", declare_interface),
    ):
        options = {
            "aot_inductor.output_path": str(job.directory / "executable.so"),
            # Names would otherwise be hashes of paths, and end up in the library.
            "aot_inductor.model_name_for_generated_files": "executable",
            "aot_inductor.package_constants_in_so": False,
            # Weights have no values yet: Inductor would bake the garbage in small ones into the code, and what follows
            # from it where they have one element, as a rank's number has.
            "always_keep_tensor_constants": True,
            "joint_graph_constant_folding": False,
            "aot_inductor.custom_ops_to_c_shims": C_FUNCTIONS,
            "aot_inductor.enable_line_tables": False,
            # The wrapper is most of the text and none of the arithmetic.
            "aot_inductor.compile_wrapper_opt_level": "O1",
            # Inductor names precompiled headers with the openssl command.
            "aot_inductor.precompile_headers": shutil.which("openssl") is not None,
            "cpp.cxx": (None, str(_write_compiler_script(job))),
            "cpp.march": job.options.target.isa,
            "cpp.simdlen": vector_bits,
            # Take the number of threads from whoever runs the executable, not from the host that makes it.
            "cpp.dynamic_threads": True,
            "cpp.enable_floating_point_contract_flag": "fast" if job.options.optimization_level > 1 else "off",
            # Whoever calls decides what runs in parallel.
            "compile_threads": 1,
        }
        with config.patch(options):
            yield options


def link_with(job: LoweringJob, objects: Sequence[Path]) -> None:
    """Lets the job's library have these objects, too."""
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
    """A compiler that leaves the job's and torch's paths out of what it makes, so that equal jobs make equal bytes, and
    that makes a precompiled header, which all jobs share, whole or not at all.

    It lies where all jobs find it: its path is part of what precompiled headers are found by.
    """
    site_packages = Path(torch.__file__).parents[1]
    compiler = shlex.join([str(GXX.find()), f"-ffile-prefix-map={site_packages}=/site-packages"])
    script = job.cache_dir / "bin" / GXX.name
    script.parent.mkdir(exist_ok=True)
    text = _COMPILER_SCRIPT.format(
        compiler=f'{compiler} "-ffile-prefix-map=${_JOB_ENVIRONMENT}=/executable"',
        directory=_JOB_ENVIRONMENT,
        objects=_OBJECTS_FILE,
    )
    if not script.exists() or script.read_text() != text:
        # Beside it: the job's directory may be on another file system.
        new = script.with_name(f"{GXX.name}.{os.getpid()}")
        new.write_text(text)
        new.chmod(0o755)
        new.replace(script)
    os.environ[_JOB_ENVIRONMENT] = str(job.directory)
    return script
