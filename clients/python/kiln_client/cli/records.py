"""Converts protobuf messages to the JSON objects that `--json` prints.

Field names are those of the protos. Every field is present; unset ones are null. Enum values are lower case without
their prefix. A duration is a number of seconds: `queue_duration` becomes `queue_seconds`, `duration` `seconds`, `eta`
`eta_seconds`. A timestamp is text in RFC 3339. JSON in a message is parsed: `manifest_json` becomes `manifest`.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.status_pb2 import Status

from kiln_client.completion import Completion
from kiln_client.enums import enum_name
from kiln_client.errors import KilnError, error_from_status

Record: TypeAlias = dict[str, Any]


def record_from_message(message: Message) -> Record:
    """Converts a message to a JSON object."""
    return {
        _key(field): _field_value(field, getattr(message, field.name))
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in cast("Iterable[FieldDescriptor]", message.DESCRIPTOR.fields)
    }


def record_from_error(error: KilnError) -> Record:
    """Converts an error to the JSON object of the key `error`."""
    return {
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "fields": [
            {"field": violation.field, "description": violation.description, "reason": violation.reason}
            for violation in error.fields
        ],
        "metadata": error.metadata,
        "retry_after_seconds": error.retry_after_s,
    }


def record_from_completion(completion: Completion) -> Record:
    """Converts a whole generation to a JSON object."""
    return record_from_sequence(completion) | record_from_message(completion.accepted)


def record_from_completions(completions: Sequence[Completion]) -> Record:
    """Converts all sequences of a generation to a JSON object."""
    sequences = [record_from_sequence(completion) for completion in completions]
    return {"sequences": sequences} | record_from_message(completions[0].accepted)


def record_from_sequence(completion: Completion) -> Record:
    """Converts what one sequence has of its own to a JSON object."""
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "tokens": [record_from_message(token) for token in completion.tokens],
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "usage": record_from_message(completion.usage),
        "weight_epoch": completion.weight_epoch,
        "captured_inputs_path": completion.captured_inputs_path,
        "prompt_text": completion.prompt_text,
        "prompt_tokens": [record_from_message(token) for token in completion.prompt_tokens],
        "cumulative_logprob": completion.cumulative_logprob,
        "capture_error": None if completion.capture_error is None else record_from_error(completion.capture_error),
    }


def _key(field: FieldDescriptor) -> str:
    if field.message_type is not None and field.message_type.full_name == Duration.DESCRIPTOR.full_name:
        stem = field.name.removesuffix("duration").removesuffix("_")
        return f"{stem}_seconds" if stem else "seconds"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return field.name.removesuffix("_json")
    return field.name


def _field_value(field: FieldDescriptor, value: Any) -> Any:
    if not field.is_repeated:
        return _value(field, value)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value_field = field.message_type.fields_by_name["value"]
        return {str(key): _value(value_field, value[key]) for key in value}
    return [_value(field, item) for item in value]


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes_value(field, value)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return _float(value)
    return _message_value(value) if isinstance(value, Message) else value


def _message_value(message: Message) -> Any:
    match message:
        case Duration():
            return message.seconds + message.nanos / 1e9
        case Timestamp():
            return message.ToJsonString()
        case Status():
            return record_from_error(error_from_status(message))
        case AnyMessage():
            return _unpack(message)
        case _:
            return record_from_message(message)


def _unpack(packed: AnyMessage) -> Record:
    try:
        descriptor = descriptor_pool.Default().FindMessageTypeByName(packed.TypeName())
    except KeyError:
        return {"type_url": packed.type_url}
    message = message_factory.GetMessageClass(descriptor)()
    packed.Unpack(message)
    return record_from_message(message)


def _bytes_value(field: FieldDescriptor, value: bytes) -> Any:
    if field.name.endswith("_json"):
        return json.loads(value) if value else None
    return base64.b64encode(value).decode()


def _float(value: float) -> float | str:
    """Returns the shortest number with the same 32-bit value; text for NaN and infinities, as protobuf's JSON has."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    rounded = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next(number for number in rounded if struct.pack("f", number) == struct.pack("f", value))
