"""The target `cpu`: ships exported graphs at optimization level 0, libraries made by AOTInductor at levels 1 and 2."""

from __future__ import annotations

from typing import Final

from targets.isa import IsaLevel, IsaLevels
from targets.target import ExecutableFormat, Lowering, Target
from targets.toolchain import Program, Toolchain

#: The C++ compiler that AOTInductor calls.
GXX: Final = Program("g++", ("-dumpfullversion",))

#: Levels of the x86-64 psABI, and three that add instructions for int8 and bfloat16. The default suits bundles that run
#: on other hosts. Every processor with avx512_bf16 has avx512_vnni (Cooper Lake, Granite Rapids, Zen 4); Cascade Lake
#: and Ice Lake have avx512_vnni alone, Skylake neither. Tiles (AMX) are newer.
X86_64: Final = IsaLevels(
    (
        IsaLevel(
            name="x86-64-v3",
            added_flags=frozenset(
                [
                    "cx16",
                    "lahf_lm",
                    "popcnt",
                    "sse4_1",
                    "sse4_2",
                    "ssse3",
                    "avx",
                    "avx2",
                    "bmi1",
                    "bmi2",
                    "f16c",
                    "fma",
                    "abm",
                    "movbe",
                    "xsave",
                ]
            ),
            vector_bits=256,
            march="x86-64-v3",
        ),
        IsaLevel(
            name="x86-64-v4",
            added_flags=frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
            vector_bits=512,
            march="x86-64-v4",
            gain="linear layers of prompts and of 16 rows take 15 to 25 % less time, those of one row as long in "
            "float32 and 10 to 20 % longer in bfloat16",
        ),
        IsaLevel(
            name="x86-64-v4-vnni",
            added_flags=frozenset(["avx512_vnni"]),
            vector_bits=512,
            march="x86-64-v4",
            extensions=("-mavx512vnni",),
        ),
        IsaLevel(
            name="x86-64-v4-bf16",
            added_flags=frozenset(["avx512_bf16"]),
            vector_bits=512,
            march="x86-64-v4",
            extensions=("-mavx512vnni", "-mavx512bf16"),
        ),
        IsaLevel(
            name="x86-64-v4-amx",
            added_flags=frozenset(["amx_tile", "amx_bf16"]),
            vector_bits=512,
            march="x86-64-v4",
            extensions=("-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
            gain="linear layers in bfloat16 take a quarter of the time with 32 rows, an eighth with prompts, and 20 to "
            "25 % longer with one row",
        ),
    ),
    default="x86-64-v3",
)

# Memory of executables is that of models of 1 to 4 layers.

#: A serialized `torch.export` program, which is run operator by operator.
EXPORTED_PROGRAM: Final = ExecutableFormat(
    name="exported_program",
    media_type="application/vnd.kiln.executable.v1.exported-program",
    suffix=".pt2",
    state_convention="functional",
    is_native=False,
    executor="execution.executors.eager:load_eager_executor",
    preloaded=("torch.export.pt2_archive",),
    fixed_code_bytes=22_000,
    layer_code_bytes=40_000,
)

#: A shared library made by AOTInductor.
AOTI: Final = ExecutableFormat(
    name="aoti",
    media_type="application/vnd.kiln.executable.v1.aoti",
    suffix=".so",
    state_convention="in_place",
    is_native=True,
    executor="execution.executors.aoti:load_aoti_executor",
    fixed_code_bytes=450_000,
    layer_code_bytes=21_000,
)

#: The distributions with which weights are written, for all targets.
TORCH: Final = Toolchain(distributions=("torch",))

_COMPILED: Final = Lowering(
    format=AOTI,
    backend="compiler_svc.lower.aoti:lower_program",
    preloaded=(
        "setuptools",
        "sympy.combinatorics",
        "sympy.physics.units",
        "torch._inductor.codegen.cpp",
        "torch._inductor.codegen.cpp_wrapper_cpu",
        "torch._inductor.compile_fx",
        "torch.utils.cpp_extension",
        "compiler_svc.lower.inductor:register_patterns",
    ),
    toolchain=Toolchain(distributions=TORCH.distributions, programs=(GXX,)),
)

CPU: Final = Target(
    kind="cpu",
    tp_degrees=(1, 2, 4, 8, 16, 32, 64),
    takes_other_degrees=True,
    core_bytes=None,
    isas=X86_64,
    lowerings=(
        Lowering(
            format=EXPORTED_PROGRAM,
            backend="compiler_svc.lower.program:keep_program",
            in_process=True,
            toolchain=TORCH,
        ),
        _COMPILED,
        _COMPILED,
    ),
    returns_internal=True,
    skips_idle=True,
    has_rings=True,
    is_checked_on_host=True,
)
