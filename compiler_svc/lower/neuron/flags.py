"""What neuronx-cc is called with, by submodel: as NxD Inference calls it, with the options of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import DType
from bundle.manifest import TargetKind
from targets.neuron import LONG_CONTEXT_TOKENS

#: The page size of long contexts if the configuration sets none.
LONG_CONTEXT_PAGE_SIZE: Final = 1024

#: From this context length on, and with two physical cores to a logical one, NxD Inference compiles prompts without
#: vectorized strided DMA.
VERY_LONG_CONTEXT_TOKENS: Final = 128 * 1024

#: neuronx-cc's own level, by Kiln's: the first for submodels that compute prompts, the second for the others. Level 1
#: is NxD Inference's choice.
_LEVELS: Final = {0: ("-O1", "-O1"), 1: ("-O1", "-O2"), 2: ("-O2", "-O2")}

#: Flags that releases of neuronx-cc from a version on have, and whose defaults change between releases. Kiln's graphs
#: need neither: the check of graphs refuses what they would allow.
_PINNED: Final[Sequence[tuple[tuple[int, int], str]]] = (
    ((2, 27), "--native-int64=disabled"),
    ((2, 27), "--implicit-integer-downcast=none"),
)

#: Targets whose 8-bit float is F8E4M3 rather than F8E4M3FN.
OLD_FLOAT8: Final = frozenset({"inf2", "trn1", "trn2"})
#: Lets them read items of the one as the other. Up to 240, the bound of `bundle.abi.formats`, both have the same bits.
_CASTS_FLOAT8: Final = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
#: What Neuron's packages read besides, as NxD Inference sets it.
_FLOAT8_VARIABLES: Final = {"XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1"}


class CompilerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What reaches neuronx-cc of a configuration.

    Attributes:
        cc_pipeline_tiling_factor: Parts into which a prompt's collectives are divided.
        scratchpad_page_size: In MiB; None for the compiler's own, or NxD Inference's for long contexts.
        max_context_length: In tokens.
        dtypes: Of the tensors of a shard and of the KV cache.
    """

    logical_nc_config: int
    cc_pipeline_tiling_factor: int
    scratchpad_page_size: int | None
    max_context_length: int
    dtypes: frozenset[DType]


def list_flags(
    submodel: SubmodelName,
    options: CompilerOptions,
    *,
    optimization_level: Literal[0, 1, 2],
    target: TargetKind,
    compiler_version: str,
) -> tuple[str, ...]:
    """Lists the arguments of neuronx-cc for a submodel, each one word; its version is such as `2.26.6360.0`."""
    computes_prompts = SUBMODELS[submodel].computes_prompts
    return (
        f"--target={target}",
        f"--lnc={options.logical_nc_config}",
        "--auto-cast=none",
        "--model-type=transformer",
        # Masks have infinities, of which the hardware makes NaN.
        "--enable-saturate-infinity",
        _LEVELS[optimization_level][0 if computes_prompts else 1],
        "--tensorizer-options=" + " ".join(_list_tensorizer_options(options, computes_prompts=computes_prompts)),
        "--internal-hlo2tensorizer-options="
        + " ".join(
            _list_graph_options(
                computes_prompts=computes_prompts,
                casts_float8=target in OLD_FLOAT8 and "float8_e4m3fn" in options.dtypes,
            )
        ),
        *_list_scratchpad_flags(options),
        *(flag for since, flag in _PINNED if _read_release(compiler_version) >= since),
        "--verbose=35",
    )


def list_variables(flags: Sequence[str]) -> Mapping[str, str]:
    """Lists the environment variables that go with flags."""
    return _FLOAT8_VARIABLES if any(_CASTS_FLOAT8 in flag for flag in flags) else {}


def render_flags(flags: Sequence[str]) -> str:
    """Renders flags as the command line that ModelBuilder takes: values with spaces in quotes."""
    return " ".join(_quote(flag) for flag in flags)


def _list_tensorizer_options(options: CompilerOptions, *, computes_prompts: bool) -> Iterator[str]:
    yield "--enable-ccop-compute-overlap"
    # One token has nothing to divide.
    yield f"--cc-pipeline-tiling-factor={options.cc_pipeline_tiling_factor if computes_prompts else 1}"
    is_very_long = options.logical_nc_config == 2 and options.max_context_length >= VERY_LONG_CONTEXT_TOKENS
    if not (computes_prompts and is_very_long):
        yield "--vectorize-strided-dma"


def _list_graph_options(*, computes_prompts: bool, casts_float8: bool) -> Iterator[str]:
    if computes_prompts:
        yield "--modular-flow-mac-threshold=10"
    yield "--verify-hlo=true"
    if casts_float8:
        yield _CASTS_FLOAT8


def _list_scratchpad_flags(options: CompilerOptions) -> Iterator[str]:
    size = options.scratchpad_page_size
    if size is None and options.max_context_length >= LONG_CONTEXT_TOKENS:
        size = LONG_CONTEXT_PAGE_SIZE
    if size is not None:
        yield f"--hbm-scratchpad-page-size={size}"


def _read_release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _quote(flag: str) -> str:
    name, _, value = flag.partition("=")
    return f"{name}='{value}'" if " " in value else flag
