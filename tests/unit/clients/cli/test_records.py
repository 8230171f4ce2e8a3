"""Messages as JSON objects."""

from __future__ import annotations

import json
import math
from decimal import Decimal

import pytest
from google.longrunning.operations_pb2 import Operation
from google.protobuf.any_pb2 import Any as AnyMessage
from hypothesis import given
from hypothesis import strategies as st
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2
from kiln.runtime.v1 import generation_pb2, runtime_pb2
from kiln_client.cli.records import record_from_message

from tests.servers import responses as samples
from tests.servers.scripted_server import refusal


def test_names_numbers_times() -> None:
    record = record_from_message(samples.deployment())
    assert record["state"] == "ready"
    assert record["roles"][0]["role"] == "target"
    assert record["weights_bytes"] == 4_000_000
    assert record["create_time"] == "2023-11-14T22:13:20Z"
    assert record["cores"] == [0]
    assert record["capabilities"]["default_sampling"] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0}


def test_durations_are_seconds() -> None:
    usage = record_from_message(samples.finished(1).finished)["usage"]
    assert (usage["queue_seconds"], usage["prefill_seconds"], usage["decode_seconds"]) == (0.002, 0.03, 0.1)
    assert record_from_message(samples.watch_result().result)["seconds"] == 4.25
    progress = compiler_pb2.CompileMetadata(eta=samples.seconds(1.5))
    assert record_from_message(progress)["eta_seconds"] == 1.5
    assert not [name for name in record_from_message(runtime_pb2.LoadWeightsResult()) if "duration" in name]


def test_unset_is_null_and_empty_is_empty() -> None:
    record = record_from_message(generation_pb2.Token(id=1))
    unset = {"logprob": None, "text_offset": None}
    assert record == {"id": 1, "text": "", "top_logprobs": [], "logits": []} | unset
    finished = record_from_message(generation_pb2.Finished())
    assert (finished["stop_string"], finished["stop_token_id"], finished["usage"]) == (None, None, None)
    assert record_from_message(generation_pb2.Token(logprob=0.0))["logprob"] == 0.0


def test_embedded_json_is_unfolded() -> None:
    bundle = samples.bundle(manifest_json=b'{"abi": 1}')
    assert record_from_message(bundle)["manifest"] == {"abi": 1}
    assert record_from_message(samples.bundle())["manifest"] is None
    assert record_from_message(bundle_pb2.ReadBlobResponse(data=b"\x00\xff")) == {"data": "AP8="}


def test_operation_shows_what_it_packs() -> None:
    operation = Operation(name="operations/1", done=True, error=refusal("CANCELLED", "COMPILE_CANCELLED", "enough"))
    operation.metadata.Pack(compiler_pb2.CompileMetadata(stage=compiler_pb2.COMPILE_STAGE_LOWER))
    record = record_from_message(operation)
    assert record["metadata"]["stage"] == "lower"
    assert (record["error"]["code"], record["error"]["reason"]) == ("CANCELLED", "COMPILE_CANCELLED")
    assert record["response"] is None
    unknown = Operation(metadata=AnyMessage(type_url="type.googleapis.com/elsewhere.Message"))
    assert record_from_message(unknown)["metadata"] == {"type_url": "type.googleapis.com/elsewhere.Message"}


@pytest.mark.parametrize(("value", "shown"), [(math.inf, "Infinity"), (-math.inf, "-Infinity"), (math.nan, "NaN")])
def test_what_json_has_no_number_for_is_text(value: float, shown: str) -> None:
    assert record_from_message(generation_pb2.TokenLogprob(logprob=value))["logprob"] == shown


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_floats_are_short_and_the_same(value: float) -> None:
    shown = record_from_message(generation_pb2.TokenLogprob(logprob=value))["logprob"]
    assert generation_pb2.TokenLogprob(logprob=json.loads(json.dumps(shown))).logprob == value
    assert len(Decimal(repr(shown)).normalize().as_tuple().digits) <= 9


def test_seventenths_is_not_padded() -> None:
    assert record_from_message(generation_pb2.SamplingParams(temperature=0.7))["temperature"] == 0.7
