"""Objects that every library shares: compiled once for each set of flags, kept beside the precompiled headers.

They take half of the C++ compiler's time for a small graph: the functions by which callers run AOTInductor's libraries,
and the kernel of linear layers.
"""

from __future__ import annotations

import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Final

from filelock import FileLock
from torch._inductor.codegen import cpp_wrapper_cpu
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa

from compiler_svc.lower.job import LoweringJob
from compiler_svc.lower.live_rows import declare_count
from compiler_svc.lower.tables import DECLARATIONS, DEFINITIONS

_KERNELS: Final = Path(__file__).with_name("kernels")
_INCLUDED: Final = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_INTERFACE_SOURCE: Final = Path(cpp_wrapper_cpu.__file__).with_name("aoti_runtime") / "interface.cpp"


#: Templates of the regular expression by which the constructor in every library reads the name of its device. They took
#: two of the five and a half seconds that g++ took for the code of a library. The names are libstdc++'s own; they are
#: part of its ABI, so it has kept them since GCC 5.
_REGEX_TEMPLATES: Final = (
    "class std::basic_regex<char>",
    "class std::__detail::_Scanner<char>",
    "class std::__detail::_Compiler<std::regex_traits<char>>",
    "class std::__detail::_NFA<std::regex_traits<char>>",
)
#: They keep g++ from compiling the templates again: the object of the interface has them.
TEMPLATE_DECLARATIONS: Final = "".join(f"extern template {template};\n" for template in _REGEX_TEMPLATES)


def compile_interface(job: LoweringJob) -> Path:
    """Compiles the object with the functions by which callers run a library, with what libraries do with their tables,
    and with `_REGEX_TEMPLATES`.

    Valid inside `steered`.
    """
    parts = [
        "#include <torch/csrc/inductor/aoti_include/cpu.h>\n",
        _INTERFACE_SOURCE.read_text(),
        DECLARATIONS,
        DEFINITIONS.read_text(),
        *(f"template {template};\n" for template in _REGEX_TEMPLATES),
    ]
    return compile_once(job, "interface", "\n".join(parts), is_wrapper=True)


def declare_interface(wrapper: CppWrapperCpu) -> None:
    """Replaces the method that writes the interface's source into a library: writes only the declarations it needs."""
    wrapper.header.splice("#include <torch/csrc/inductor/aoti_runtime/model.h>\n")
    wrapper.header.splice(TEMPLATE_DECLARATIONS)
    wrapper.header.splice(DECLARATIONS)
    wrapper.header.splice(declare_count())


def compile_once(job: LoweringJob, name: str, source: str, *, is_wrapper: bool = False) -> Path:
    """Compiles a C++ source once, with the flags of the job's library; returns the object. Valid inside `steered`.

    Args:
        is_wrapper: Use the flags of the code that calls kernels, not the flags of kernels.

    Raises:
        CppCompileError: The source does not compile.
    """
    flags = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(), device_type="cpu", aot_mode=True, compile_only=True, min_optimize=is_wrapper
    )
    directory = job.cache_dir / "objects"
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{_digest(job, flags, source)}.o"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            source_path = job.directory / f"{name}.cpp"
            source_path.write_text(source)
            builder = CppBuilder(name=name, sources=str(source_path), output_dir=str(job.directory), BuildOption=flags)
            builder.build()
            # Copies to a neighbour first, because the job's directory may be on another file system.
            new = path.with_suffix(".new")
            shutil.copyfile(builder.get_target_file_path(), new)
            new.replace(path)
    return path


def read_kernel(name: str) -> str:
    """Returns a kernel's source as one text, with the headers beside it in place of the lines that include them."""
    return _include(name, set())


def _include(name: str, included: set[str]) -> str:
    if name in included:
        return ""
    included.add(name)
    text = (_KERNELS / name).read_text().replace("#pragma once\n", "")
    return _INCLUDED.sub(lambda line: _include(line.group(1), included), text)


def _digest(job: LoweringJob, flags: CppTorchDeviceOptions, source: str) -> str:
    parts = [
        *(f"{name} {version}" for name, version in job.options.lowering.toolchain.read_versions().items()),
        *flags.get_definitions(),
        *flags.get_cflags(),
        *flags.get_include_dirs(),
        *flags.get_passthrough_args(),
        source,
    ]
    return sha256("\0".join(parts).encode()).hexdigest()[:32]
