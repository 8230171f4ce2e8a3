"""Requests to kiln.compiler.v1.CompilerService, made of Python's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.config.v1.config_pb2 import InferenceConfig

from kiln_client.documents import write_json
from kiln_client.enums import enum_number
from kiln_client.options import check_options


class BuildOptions(TypedDict, total=False):
    """Options that a compile and a plan share. If an option is left out, the server's default applies."""

    target: str
    """Hardware: `cpu` (default), `inf2`, `trn1`, `trn2` or `trn3`."""
    isa: str
    """CPU instruction set: `x86-64-v3`, `x86-64-v4`, `x86-64-v4-vnni`, `x86-64-v4-bf16`, `x86-64-v4-amx` or
    `native`.

    Default: the compiler's.
    """
    optimization_level: int
    """Level 0 ships the exported graph; 1 (default) and 2 compile ahead of time."""
    salt: str
    """Text that enters every cache key."""


class CompileOptions(BuildOptions, total=False):
    """Options of a compile."""

    request_id: str
    """Makes the call idempotent: calls with the same id start one operation."""
    skip_cache_lookup: bool
    """Build even if the cache has the result."""
    debug: bool
    """Keep every graph, with the lines of code that produced it, as a referrer of the bundle."""


def compile_request(
    name: str, model: str, config: Mapping[str, object] | InferenceConfig, **options: Unpack[CompileOptions]
) -> pb.CompileRequest:
    """Makes the request for one compile.

    Args:
        name: Bundle name.
        model: Directory of a Hugging Face checkpoint on the compiler's host, absolute or relative to a model root.
        config: Mapping with NxD Inference's names, such as `{"neuron_config": {"seq_len": 256}}`. The server validates
            it.
        options: See CompileOptions.

    Raises:
        ValueError: The mapping holds values other than JSON's and infinities, or an option has a value that its enum
            lacks.
        TypeError: There is no such option.
    """
    check_options(options, CompileOptions)
    request = pb.CompileRequest(
        name=name,
        model=model,
        target=_target(options.get("target"), options.get("isa")),
        optimization_level=_level(options.get("optimization_level")),
        request_id=options.get("request_id", ""),
        skip_cache_lookup=options.get("skip_cache_lookup", False),
        salt=options.get("salt", ""),
        debug=options.get("debug", False),
    )
    _set_config(request, config)
    return request


class PlanOptions(BuildOptions, total=False):
    """Options of a plan."""

    core_memory_bytes: int
    """Memory of one core. Default: the target's."""
    check_graphs: bool
    """Whether to check graphs for what Neuron's compiler would refuse. Takes seconds for each executable."""


def plan_request(
    model: str, config: Mapping[str, object] | InferenceConfig, **options: Unpack[PlanOptions]
) -> pb.PlanCompileRequest:
    """Makes the request for one plan.

    Args:
        model: Directory of a Hugging Face checkpoint on the compiler's host, absolute or relative to a model root.
        config: Mapping with NxD Inference's names, as for `compile_request`.
        options: See PlanOptions.

    Raises:
        ValueError: The mapping is not JSON, or an option has a value that its enum lacks.
        TypeError: There is no such option.
    """
    check_options(options, PlanOptions)
    request = pb.PlanCompileRequest(
        model=model,
        target=_target(options.get("target"), options.get("isa")),
        optimization_level=_level(options.get("optimization_level")),
        salt=options.get("salt", ""),
        core_memory_bytes=options.get("core_memory_bytes", 0),
        check_graphs=options.get("check_graphs", False),
    )
    _set_config(request, config)
    return request


def _target(kind: str | None, isa: str | None) -> pb.Target:
    number = enum_number(pb.Target.Kind.DESCRIPTOR, kind)
    return pb.Target(kind=pb.Target.Kind.ValueType(number), isa=isa or "")


def _level(level: int | None) -> pb.OptimizationLevel.ValueType:
    number = enum_number(pb.OptimizationLevel.DESCRIPTOR, None if level is None else f"o{level}")
    return pb.OptimizationLevel.ValueType(number)


def _set_config(
    request: pb.CompileRequest | pb.PlanCompileRequest, config: Mapping[str, object] | InferenceConfig
) -> None:
    if isinstance(config, InferenceConfig):
        request.config.CopyFrom(config)
    else:
        request.config_json = write_json(config, infinities=True)


class QuantizeOptions(TypedDict, total=False):
    """Options of a quantized checkpoint. If an option is left out, the server's default applies."""

    dtype: str
    """`int8` (default), `f8e4m3`, `f8e5m2`, or `int4` in groups of 128 inputs."""
    layout: str
    """`compressed-tensors` (default), which vLLM loads, or `nxd`."""
    modules_to_not_convert: Sequence[str]
    """Parts of names of linear layers that stay as they are."""
    request_id: str
    """Makes the call idempotent: calls with the same id start one operation."""


def quantize_request(model: str, output: str, **options: Unpack[QuantizeOptions]) -> pb.QuantizeWeightsRequest:
    """Makes the request for one quantized checkpoint.

    Raises:
        TypeError: There is no such option.
    """
    check_options(options, QuantizeOptions)
    return pb.QuantizeWeightsRequest(
        model=model,
        output=output,
        dtype=options.get("dtype", ""),
        layout=options.get("layout", ""),
        modules_to_not_convert=options.get("modules_to_not_convert", ()),
        request_id=options.get("request_id", ""),
    )
