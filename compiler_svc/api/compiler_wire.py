"""protobuf ↔ records, for the compiler and its operations."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from typing import Any, Final, Literal, TypeVar

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from kiln.compiler.v1 import compiler_pb2 as pb
from kiln.config.v1.config_pb2 import InferenceConfig

from bundle.digest import sha256_bytes
from bundle.errors import FieldViolation
from compiler_svc.api.limits import OperationRequest
from compiler_svc.api.status import status_from_failure
from compiler_svc.config.document import Document, parse_document
from compiler_svc.config.domains import show
from compiler_svc.database.operations import Operation
from compiler_svc.errors import ConfigInvalid
from compiler_svc.planning.adapter_admission import AdapterRequest
from compiler_svc.planning.admission import CompileRequest
from compiler_svc.planning.quantize_admission import QuantizeRequest
from compiler_svc.planning.shard_admission import ShardRequest
from compiler_svc.records import CheckpointResult, ExecutableResult, OperationResult
from targets.cpu import CPU
from targets.registry import TARGETS

_TARGET_KINDS: Final = {
    pb.Target.KIND_UNSPECIFIED: CPU.kind,
    **{pb.Target.Kind.Value(f"KIND_{kind.upper()}"): kind for kind in TARGETS},
}
_LEVELS: Final[dict[pb.OptimizationLevel.ValueType, Literal[0, 1, 2]]] = {
    pb.OPTIMIZATION_LEVEL_UNSPECIFIED: 1,
    pb.OPTIMIZATION_LEVEL_O0: 0,
    pb.OPTIMIZATION_LEVEL_O1: 1,
    pb.OPTIMIZATION_LEVEL_O2: 2,
}

MessageT = TypeVar("MessageT", bound=Message)


def copy_fields(message: type[MessageT], record: object, **given: Any) -> MessageT:
    """Writes a message whose fields are those of a record under the same names, but for those that are given."""
    names = message.DESCRIPTOR.fields_by_name.keys() - given.keys()
    return message(**given, **{name: getattr(record, name) for name in names})


def digest_request(request: OperationRequest) -> str:
    """Digests a request's method and content, but not its id. A repeated request id must come with the same digest."""
    content = deepcopy(request)
    content.request_id = ""
    return sha256_bytes(content.DESCRIPTOR.full_name.encode() + content.SerializeToString(deterministic=True))


def request_from_pb(request: pb.CompileRequest) -> CompileRequest:
    """Reads a request."""
    own = {name: getattr(request, name) for name in ("name", "skip_cache_lookup", "debug")}
    return CompileRequest(**own, **build_fields_from_pb(request))


def build_fields_from_pb(request: pb.CompileRequest | pb.PlanCompileRequest) -> dict[str, Any]:
    """Reads the fields of a `BuildRequest`."""
    unknown = [
        FieldViolation(field, str(value), ", ".join(map(str, sorted(table))))
        for field, value, table in (
            ("target.kind", request.target.kind, _TARGET_KINDS),
            ("optimization_level", request.optimization_level, _LEVELS),
        )
        if value not in table
    ]
    if unknown:
        raise ConfigInvalid(unknown)
    return {
        "model": request.model,
        "document": _document_from_pb(request),
        "target_kind": _TARGET_KINDS[request.target.kind],
        "isa": request.target.isa,
        "optimization_level": _LEVELS[request.optimization_level],
        "salt": request.salt,
    }


def shard_request_from_pb(request: pb.ShardWeightsRequest) -> ShardRequest:
    """Reads a request."""
    return ShardRequest(**{one.name: getattr(request, one.name) for one in fields(ShardRequest)})


def adapter_request_from_pb(request: pb.ShardAdapterRequest) -> AdapterRequest:
    """Reads a request."""
    return AdapterRequest(**{one.name: getattr(request, one.name) for one in fields(AdapterRequest)})


def quantize_request_from_pb(request: pb.QuantizeWeightsRequest) -> QuantizeRequest:
    """Reads a request."""
    return QuantizeRequest(
        model=request.model,
        output=request.output,
        dtype=request.dtype or "int8",
        layout=request.layout or "compressed-tensors",
        modules_to_not_convert=tuple(request.modules_to_not_convert),
    )


def operation_to_pb(operation: Operation) -> operations_pb2.Operation:
    """Writes an operation with its metadata, and its response or error once it is done."""
    message = operations_pb2.Operation(name=operation.resource_name, done=operation.is_done)
    message.metadata.Pack(metadata_to_pb(operation))
    if operation.result is not None:
        message.response.Pack(result_to_pb(operation.result))
    elif operation.error is not None:
        message.error.CopyFrom(status_from_failure(operation.error))
    return message


def event_to_pb(operation: Operation) -> pb.WatchCompileResponse:
    """Writes an operation's progress, result or error for a watcher."""
    if operation.result is not None:
        end = result_to_pb(operation.result)
        if isinstance(end, pb.QuantizeWeightsResponse):
            return pb.WatchCompileResponse(checkpoint=end)
        return pb.WatchCompileResponse(result=end)
    if operation.error is not None:
        return pb.WatchCompileResponse(error=status_from_failure(operation.error))
    return pb.WatchCompileResponse(progress=metadata_to_pb(operation))


def metadata_to_pb(operation: Operation) -> pb.CompileMetadata:
    """Writes an operation's progress."""
    progress = operation.progress
    return copy_fields(
        pb.CompileMetadata,
        progress,
        name=operation.name,
        stage=pb.CompileStage.Value(f"COMPILE_STAGE_{progress.stage.name}"),
        eta=None if progress.eta_s is None else duration_to_pb(progress.eta_s),
        create_time=timestamp_to_pb(operation.create_time_ns),
        update_time=timestamp_to_pb(operation.update_time_ns),
    )


def result_to_pb(result: OperationResult) -> pb.CompileResponse | pb.QuantizeWeightsResponse:
    """Writes the result of a compile, or of another operation."""
    if isinstance(result, CheckpointResult):
        return copy_fields(pb.QuantizeWeightsResponse, result, duration=duration_to_pb(result.duration_s))
    return copy_fields(
        pb.CompileResponse,
        result,
        cache=cache_result_to_pb(result.cached),
        executables=map(_executable_to_pb, result.executables),
        duration=duration_to_pb(result.duration_s),
    )


def duration_to_pb(seconds: float) -> Duration:
    """Writes a duration."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def timestamp_to_pb(time_ns: int) -> Timestamp:
    """Writes a point in time."""
    timestamp = Timestamp()
    timestamp.FromNanoseconds(time_ns)
    return timestamp


def _document_from_pb(request: pb.CompileRequest | pb.PlanCompileRequest) -> dict[str, Any]:
    if request.WhichOneof("config_source") == "config_json":
        return parse_document(request.config_json)
    return document_from_pb(request.config)


def _executable_to_pb(executable: ExecutableResult) -> pb.ExecutableResult:
    return copy_fields(
        pb.ExecutableResult,
        executable,
        cache=cache_result_to_pb(executable.cached),
        duration=None if executable.duration_s is None else duration_to_pb(executable.duration_s),
    )


def cache_result_to_pb(cached: bool) -> pb.CacheResult.ValueType:
    """Writes whether the cache had something."""
    return pb.CACHE_RESULT_HIT if cached else pb.CACHE_RESULT_MISS


_MODEL_ATTRIBUTES = "model_attributes_json"


def document_from_pb(config: InferenceConfig) -> Document:
    """Writes a configuration as an equal document, with the attributes that are set, under their names. Paths of the
    Medusa tree become lists of lists, and the model's attributes stand at the top level.
    """
    # An optional field that is set to zero is in the dictionary; an unset one is not.
    return _flatten(MessageToDict(config, preserving_proto_field_name=True), "")


def _flatten(document: dict[str, Any], path: str) -> Document:
    """Gives a message's dictionary, and that of the draft model inside it, the form of a document."""
    attributes: Document = {}
    if (text := document.pop(_MODEL_ATTRIBUTES, None)) is not None:
        field = f"{path}{_MODEL_ATTRIBUTES}"
        attributes = parse_document(text, field=field)
        fields = {one.name for one in InferenceConfig.DESCRIPTOR.fields}
        repeated = [FieldViolation(field, show(name), "model attributes") for name in attributes if name in fields]
        if repeated:
            raise ConfigInvalid(repeated)
    neuron_config = document.get("neuron_config", {})
    if "medusa_tree" in neuron_config:
        neuron_config["medusa_tree"] = [one.get("choices", []) for one in neuron_config["medusa_tree"]]
    fused = document.get("fused_spec_config", {})
    if "draft_config" in fused:
        fused["draft_config"] = _flatten(fused["draft_config"], f"{path}fused_spec_config.draft_config.")
    return attributes | document
