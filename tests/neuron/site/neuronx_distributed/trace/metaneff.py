"""Stands in for the messages of torch_neuronx.proto.metaneff_pb2, by their recorded fields."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

DATA_TYPES = {
    "torch.float32": 1, "torch.int32": 2, "torch.int8": 7, "torch.int64": 10, "torch.float16": 12, "torch.bfloat16": 14,
    "torch.float8_e4m3fn": 15, "torch.float8_e5m2": 16,
}  # fmt: skip
USER_INPUT, INPUT_STATE, INPUT_WEIGHT = 1, 2, 3


@dataclass
class MetaTensor:
    name: bytes
    shape: list[int]
    data_type: int
    type: int = 0
    checkpoint_key: bytes = b""
    user_input_key: bytes = b""


@dataclass
class MetaNeff:
    input_tensors: list[MetaTensor] = field(default_factory=list)
    output_tensors: list[MetaTensor] = field(default_factory=list)
    #: Output → input.
    output_aliases_to: dict[int, int] = field(default_factory=dict)

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that messages have
        def decode(value: Any) -> Any:
            return value.decode()

        return json.dumps(asdict(self), default=decode).encode()


class HloModule:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that messages have
        return self._data

    def ParseFromString(self, data: bytes) -> None:  # noqa: N802 - the name that messages have
        self._data = data
