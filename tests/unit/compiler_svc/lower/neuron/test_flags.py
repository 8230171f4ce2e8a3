"""What neuronx-cc is called with, by submodel: as recorded of NxD Inference."""

from __future__ import annotations

import shlex
from typing import Any, Literal

import pytest

from bundle.abi.submodels import SubmodelName
from bundle.abi.tensor import DType
from bundle.manifest import TargetKind
from compiler_svc.lower.neuron.flags import CompilerOptions, list_flags, list_variables, render_flags

TILED = "--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={} --vectorize-strided-dma"


def flags_of(
    submodel: SubmodelName,
    *,
    optimization_level: Literal[0, 1, 2] = 1,
    target: TargetKind = "trn2",
    compiler_version: str = "2.26.6360.0",
    **options: Any,
) -> tuple[str, ...]:
    defaults = {
        "logical_nc_config": 2,
        "cc_pipeline_tiling_factor": 2,
        "scratchpad_page_size": None,
        "max_context_length": 128,
        "dtypes": frozenset({"bfloat16"}),
    }
    return list_flags(
        submodel,
        CompilerOptions(**(defaults | options)),
        optimization_level=optimization_level,
        target=target,
        compiler_version=compiler_version,
    )


def test_prompts() -> None:
    assert flags_of("context_encoding", target="trn1", logical_nc_config=1) == (
        "--target=trn1",
        "--lnc=1",
        "--auto-cast=none",
        "--model-type=transformer",
        "--enable-saturate-infinity",
        "-O1",
        "--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=2 --vectorize-strided-dma",
        "--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10 --verify-hlo=true",
        "--verbose=35",
    )


@pytest.mark.parametrize("submodel", ["token_generation", "speculation", "fused_speculation"])
def test_submodels_that_read_the_cache(submodel: SubmodelName) -> None:
    changed = {*flags_of(submodel, cc_pipeline_tiling_factor=4)} ^ {*flags_of("context_encoding")}
    assert changed == {
        "-O1",
        "-O2",
        f"--tensorizer-options={TILED.format(2)}",
        f"--tensorizer-options={TILED.format(1)}",
        "--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10 --verify-hlo=true",
        "--internal-hlo2tensorizer-options=--verify-hlo=true",
    }


@pytest.mark.parametrize(
    ("options", "added", "removed"),
    [
        ({"logical_nc_config": 1}, ["--lnc=1"], ["--lnc=2"]),
        ({"scratchpad_page_size": 512}, ["--hbm-scratchpad-page-size=512"], []),
        ({"max_context_length": 32768}, ["--hbm-scratchpad-page-size=1024"], []),
        ({"max_context_length": 32767}, [], []),
        ({"max_context_length": 32768, "scratchpad_page_size": 256}, ["--hbm-scratchpad-page-size=256"], []),
        ({"optimization_level": 2}, ["-O2"], ["-O1"]),
        ({"target": "trn3"}, ["--target=trn3"], ["--target=trn2"]),
        ({"compiler_version": "2.27.5334.0"}, ["--native-int64=disabled", "--implicit-integer-downcast=none"], []),
        (
            {"cc_pipeline_tiling_factor": 8},
            [f"--tensorizer-options={TILED.format(8)}"],
            [f"--tensorizer-options={TILED.format(2)}"],
        ),
    ],
    ids=str,
)
def test_each_option(options: dict[str, Any], added: list[str], removed: list[str]) -> None:
    before, after = {*flags_of("context_encoding")}, {*flags_of("context_encoding", **options)}
    assert (after - before, before - after) == ({*added}, {*removed})


@pytest.mark.parametrize(
    ("target", "dtypes", "casts"),
    [
        ("trn2", {"float32", "float8_e4m3fn"}, True),
        ("inf2", {"float8_e4m3fn"}, True),
        ("trn3", {"float8_e4m3fn"}, False),
        ("trn2", {"int8", "float8_e5m2"}, False),
    ],
)
def test_float8_that_a_target_has_under_another_name(target: TargetKind, dtypes: set[DType], casts: bool) -> None:
    """neuronx-cc takes the flag among those of its first pass alone."""
    flags = flags_of("token_generation", target=target, dtypes=frozenset(dtypes))
    (options,) = [flag for flag in flags if flag.startswith("--internal-hlo2tensorizer-options=")]
    wanted = "--verify-hlo=true --experimental-unsafe-fp8e4m3fn-as-fp8e4m3" if casts else "--verify-hlo=true"
    assert options == f"--internal-hlo2tensorizer-options={wanted}"
    variables = {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}
    assert list_variables(flags) == (variables if casts else {})


@pytest.mark.parametrize(
    ("submodel", "max_context_length", "logical_nc_config", "vectorizes"),
    [
        ("context_encoding", 131072, 2, False),
        ("context_encoding", 131071, 2, True),
        ("context_encoding", 131072, 1, True),
        ("token_generation", 131072, 2, True),
    ],
)
def test_very_long_prompts_have_no_vectorized_dma(
    submodel: SubmodelName, max_context_length: int, logical_nc_config: int, *, vectorizes: bool
) -> None:
    flags = flags_of(submodel, max_context_length=max_context_length, logical_nc_config=logical_nc_config)
    (options,) = [flag for flag in flags if flag.startswith("--tensorizer-options=")]
    assert ("--vectorize-strided-dma" in options) == vectorizes


def test_the_lowest_level_is_the_compilers_lowest() -> None:
    assert "-O1" in flags_of("token_generation", optimization_level=0)


@pytest.mark.parametrize("submodel", ["context_encoding", "token_generation"])
def test_a_shell_reads_the_rendered_flags(submodel: SubmodelName) -> None:
    flags = flags_of(submodel, scratchpad_page_size=512)
    assert shlex.split(render_flags(flags)) == [*flags]
    assert "--tensorizer-options='--enable-ccop-compute-overlap " in render_flags(flags), "as NxD Inference writes it"
