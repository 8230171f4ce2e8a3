"""What every library shares, compiled once for each set of flags: objects, and precompiled headers.

They would take four fifths of the C++ compiler's time for a small graph. The objects have the functions by which
callers run AOTInductor's libraries, and the kernels. `prebuilt` makes all of it when the distribution is installed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

from filelock import FileLock
from torch._inductor.codegen import cpp_wrapper_cpu
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa

from compiler_svc.lower.job import PREBUILT, LoweringJob
from compiler_svc.lower.live_rows import declare_count
from compiler_svc.lower.tables import DECLARATIONS, DEFINITIONS

_KERNELS: Final = Path(__file__).with_name("kernels")
_INCLUDED: Final = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
#: What Inductor's code begins with, and whether that is the code that calls kernels.
HEADERS: Final = {"torch/csrc/inductor/aoti_include/cpu.h": True, "torch/csrc/inductor/cpp_prefix.h": False}
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
#: A function that the constructor calls in place of the template that matches, which took a third of what was left.
_REGEX_MATCH: Final = "bool std::regex_match(const std::string& text, std::smatch& match, const std::regex& expression)"
MATCH_DECLARATION: Final = f"#include <regex>\nnamespace std {{\n{_REGEX_MATCH.replace('std::', '')};\n}}\n"
_MATCH_DEFINITION: Final = (
    f"{_REGEX_MATCH} {{\n  return regex_match(text.begin(), text.end(), match, expression);\n}}\n"
)
#: They keep g++ from compiling the templates again: the object of the interface has them.
TEMPLATE_DECLARATIONS: Final = "".join(f"extern template {template};\n" for template in _REGEX_TEMPLATES)


def compile_interface(job: LoweringJob) -> Path:
    """Compiles the object with the functions by which callers run a library, with what libraries do with their tables,
    and with what they need of regular expressions. Valid inside `steered`.
    """
    parts = [
        MATCH_DECLARATION,
        "#include <torch/csrc/inductor/aoti_include/cpu.h>\n",
        _INTERFACE_SOURCE.read_text(),
        DECLARATIONS,
        DEFINITIONS.read_text(),
        _MATCH_DEFINITION,
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
    """Compiles a C++ source once, with the flags of the job's library; returns the object. Valid inside `steered`. With
    `is_wrapper`, uses the flags of the code that calls kernels, not the flags of kernels.
    """
    flags = _read_flags(is_wrapper=is_wrapper, compile_only=True)

    def build() -> Path:
        source_path = job.directory / f"{name}.cpp"
        source_path.write_text(source)
        builder = CppBuilder(name=name, sources=str(source_path), output_dir=str(job.directory), BuildOption=flags)
        builder.build()
        return Path(builder.get_target_file_path())

    return _make_once(job, f"objects/{name}-{_digest(job, flags, source)}.o", build)


def precompile_headers(job: LoweringJob) -> None:
    """Compiles the headers that the code of libraries begins with."""
    for header, is_wrapper in HEADERS.items():
        precompile_header(job, header, is_wrapper=is_wrapper)


def precompile_header(job: LoweringJob, header: str, *, is_wrapper: bool) -> Path:
    """Compiles a header of torch's once; returns what sources that begin with it include instead. Valid inside
    `steered`.
    """
    flags = _read_flags(is_wrapper=is_wrapper, precompiling=True)
    source, name = f"{MATCH_DECLARATION if is_wrapper else ''}#include <{header}>\n", Path(header).stem

    def build() -> Path:
        # Where g++ finds no precompiled header that it can read, it reads the text.
        source_path = job.directory / f"{name}.hpp"
        source_path.write_text(source)
        builder = CppBuilder(name=str(source_path), sources=str(source_path), BuildOption=flags)
        builder.build()
        return Path(builder.get_target_file_path())

    compiled = _make_once(job, f"headers/{name}-{_digest(job, flags, source)}.hpp.gch", build)
    text = compiled.with_suffix("")
    if not text.exists():
        text.write_text(source)
    return text


def _read_flags(*, is_wrapper: bool, **kind: bool) -> CppTorchDeviceOptions:
    return CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(), device_type="cpu", aot_mode=True, min_optimize=is_wrapper, **kind
    )


def _make_once(job: LoweringJob, name: str, build: Callable[[], Path]) -> Path:
    """Finds a file in the distribution or the cache, or builds it into the cache, whole or not at all."""
    if (prebuilt := PREBUILT / name).exists():
        return prebuilt
    path = job.cache_dir / name
    path.parent.mkdir(exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            # Copies to a neighbour first, because the job's directory may be on another file system.
            new = path.with_suffix(".new")
            shutil.copyfile(build(), new)
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
