"""Messages of vLLM's engine API, converted without a server."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto import vllm_engine_pb2 as pb

from execution.text.constraint import Constraint
from execution.text.prompt import TextPrompt, TokenPrompt
from runtime_svc.admission.calls import check_call
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.errors import ConstraintLimitExceeded, FeatureNotServed, PromptTooLong, RequestInvalid
from runtime_svc.vllm_engine.messages import NEUTRAL, SERVED, call_from_pb, check_served, rename_fields
from tests.bundles.manifests import make_manifest

PROMPT = pb.TokenizedInput(input_ids=[5, 6])
PARAMS = "sampling_params."


def paths_of(descriptor: Any) -> list[str]:
    """Every field of a request, as errors name it."""
    paths = []
    for field in descriptor.fields:
        if field.name == "sampling_params":
            paths += [PARAMS + nested.name for nested in field.message_type.fields]
        else:
            paths.append(field.name)
    return paths


PATHS = paths_of(pb.GenerateRequest.DESCRIPTOR)


def with_field(path: str, *, value: Any = None) -> pb.GenerateRequest:
    """A request with one more field; without a value, with one that asks for something."""
    request = pb.GenerateRequest(tokenized=PROMPT)
    message: Any = request.sampling_params if path.startswith(PARAMS) else request
    field = message.DESCRIPTOR.fields_by_name[path.removeprefix(PARAMS)]
    if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[3] = 0.5
    elif field.is_repeated:
        getattr(message, field.name).add()
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
    elif value is not None:
        setattr(message, field.name, value)
    else:
        values = {FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BOOL: True, FieldDescriptor.TYPE_FLOAT: 0.5}
        setattr(message, field.name, values.get(field.type, 2))
    return request


def test_the_tables_name_fields_that_exist() -> None:
    assert set(PATHS) > SERVED
    assert set(PATHS) - SERVED > NEUTRAL.keys()


@pytest.mark.parametrize("path", [path for path in PATHS if path not in SERVED])
def test_a_field_that_is_not_served_is_refused_by_name(path: str) -> None:
    with pytest.raises(FeatureNotServed) as caught:
        check_served(with_field(path))
    assert [violation.field for violation in caught.value.violations] == [path]


@pytest.mark.parametrize("path", NEUTRAL)
def test_a_neutral_value_is_as_good_as_none(path: str) -> None:
    request = with_field(path, value=NEUTRAL[path])
    assert request != pb.GenerateRequest(tokenized=PROMPT), "the value is on the wire"
    check_served(request)


def test_every_field_that_is_not_served_is_named_at_once() -> None:
    request = with_field("sampling_params.truncate_prompt_tokens", value=2)
    request.data_parallel_rank = 3
    with pytest.raises(FeatureNotServed) as caught:
        check_served(request)
    assert {one.field: (one.value, one.accepted) for one in caught.value.violations} == {
        "sampling_params.truncate_prompt_tokens": ("2", "unset: this server does not serve it"),
        "data_parallel_rank": ("3", "unset or 0: this server does not serve it"),
    }


def test_a_request_without_a_prompt_is_invalid() -> None:
    with pytest.raises(RequestInvalid, match="input: got none; accepted: one of tokenized, text"):
        check_served(pb.GenerateRequest())


def test_defaults_of_proto3_are_unset() -> None:
    call = call_from_pb(pb.GenerateRequest(tokenized=PROMPT), request_id="r")
    assert (call.request_id, call.prompt) == ("r", TokenPrompt((5, 6)))
    assert (call.sampling, call.max_new_tokens, call.logprobs) == ({}, None, None)
    assert (call.stop_strings, call.stop_token_ids, call.ignore_eos) == ((), (), False)


@pytest.mark.parametrize(
    ("request_id", "is_bare"),
    [
        ("cmpl-4L9QSildFrVAB0WtME5Grvbf-01a2214a-8a4b-75cb-acd5-710e53d127b6", True),
        ("cmpl-hJ7lGjvrSZ0l300YmDzMqeOl-p1-01a2214a-8a50-7715-a1cc-2e8d03947644", True),
        ("chatcmpl-6e8XXbmAjlu9WKyteXV2ZycT-01a2214a-8a45-7221-a02b-16323b227300", False),
        ("gnt-pd8C9d4WwpYPCa1CRl4kHF26-01a2214a-8a6d-721d-b7af-ecd28e9e5feb", False),
        ("msg_WNNFXz4QNts08fw8PXStCgge-01a2214a-8a80-76a3-8a0c-d3e86b483549", False),
        ("resp-2PWNEzzg70ZZgjOuaYbvjPlb-01a2214a-8a7b-766c-8c19-f5fbe1686fd4", False),
        # As vLLM's own server and its clients write them.
        ("cmpl-0f0c6b3d9a5e4c0f8b1d2e3f4a5b6c7d-0", False),
        ("cmpl-mine", False),
        ("", False),
    ],
)
def test_only_completions_of_smg_get_the_tokens_that_the_tokenizer_adds(request_id: str, is_bare: bool) -> None:
    call = call_from_pb(pb.GenerateRequest(request_id=request_id, tokenized=PROMPT), request_id="r")
    assert call.prompt == TokenPrompt((5, 6), bare=is_bare)


def test_values_arrive() -> None:
    sampling, stop = {"temperature": 0.0, "top_p": 1.0, "top_k": 4, "seed": 7}, {"stop": ["."], "stop_token_ids": [9]}
    params = pb.SamplingParams(**sampling, **stop, max_tokens=3, ignore_eos=True, logprobs=0)
    call = call_from_pb(pb.GenerateRequest(text="a cat", sampling_params=params), request_id="r")
    assert call.prompt == TextPrompt("a cat")
    assert call.sampling == sampling
    assert (call.max_new_tokens, call.stop_strings, call.stop_token_ids) == (3, (".",), (9,))
    assert (call.ignore_eos, call.logprobs) == (True, 0)


def test_parameters_of_processors_arrive_under_their_names() -> None:
    penalties = {"min_p": 0.25, "frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5}
    params = pb.SamplingParams(**penalties, logit_bias={5: -100}, min_tokens=3)
    call = call_from_pb(pb.GenerateRequest(tokenized=PROMPT, sampling_params=params), request_id="r")
    assert call.sampling == penalties | {"logit_bias": {5: -100}, "min_new_tokens": 3}
    with pytest.raises(FeatureNotServed) as caught:
        check_call(call, Capabilities.from_manifest(make_manifest(flags=("noise_keys", "sampling_params", "tokens"))))
    names = [*penalties, "logit_bias", "min_tokens"]
    assert {one.field for one in rename_fields(caught.value).violations} == {f"{PARAMS}{name}" for name in names}


def test_a_negative_seed_is_one_of_64_bits() -> None:
    request = pb.GenerateRequest(tokenized=PROMPT, sampling_params=pb.SamplingParams(seed=-1))
    assert call_from_pb(request, request_id="r").sampling == {"seed": 2**64 - 1}


def test_admissions_errors_get_the_names_of_this_api() -> None:
    sampling, stop = {"temperature": -1, "top_p": 2, "top_k": 1000}, {"stop": ["", "x"], "stop_token_ids": [10**6]}
    params = pb.SamplingParams(**sampling, **stop, max_tokens=0, logprobs=-1)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, 10**6]), sampling_params=params)
    with pytest.raises(RequestInvalid) as caught:
        check_call(call_from_pb(request, request_id="r"), Capabilities.from_manifest(make_manifest()))
    renamed = rename_fields(caught.value)
    assert isinstance(renamed, RequestInvalid)
    assert [one.field for one in renamed.violations] == [
        "tokenized.input_ids[1]",
        "sampling_params.temperature",
        "sampling_params.top_k",
        "sampling_params.top_p",
        "sampling_params.max_tokens",
        "sampling_params.stop[0]",
        "sampling_params.stop_token_ids[0]",
        "sampling_params.logprobs",
        "sampling_params.stop",
    ]


def test_accepted_fields_are_named_as_in_this_api_too() -> None:
    request = pb.GenerateRequest(text="a cat")
    with pytest.raises(FeatureNotServed) as caught:
        check_call(call_from_pb(request, request_id="r"), Capabilities.from_manifest(make_manifest()))
    (violation,) = rename_fields(caught.value).violations
    assert (violation.field, violation.accepted) == ("text", "tokenized.input_ids: the bundle has no tokenizer")


def test_a_prompt_that_is_too_long_is_named_too() -> None:
    renamed = rename_fields(PromptTooLong("token_ids", 9, 8))
    assert isinstance(renamed, PromptTooLong)
    assert renamed.violations[0].field == renamed.metadata["field"] == "tokenized.input_ids"
    assert str(renamed.violations[0]) == "tokenized.input_ids: got 9 tokens; accepted: at most 8 tokens"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("json_schema", "{}", Constraint(kind="json_schema", text="{}")),
        ("json_object", True, Constraint(kind="json_object")),
        ("json_object", False, None),
        ("regex", "a+", Constraint(kind="regex", text="a+")),
        ("grammar", "start: A", Constraint(kind="grammar", text="start: A")),
        ("structural_tag", "{}", Constraint(kind="structural_tag", text="{}")),
        ("choice", pb.ChoiceConstraint(choices=["a", "b"]), Constraint(kind="choices", choices=("a", "b"))),
    ],
)
def test_constraints_arrive(field: str, value: Any, expected: Constraint | None) -> None:
    params = pb.SamplingParams(grammar_from_first_token=True, **{field: value})
    request = pb.GenerateRequest(tokenized=PROMPT, sampling_params=params)
    check_served(request)
    assert call_from_pb(request, request_id="r").constraint == expected


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"min_p": -0.5}, "min_p"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"logit_bias": {5: 200}}, "logit_bias[5]"),
        ({"logit_bias": {-1: 1}}, "logit_bias[-1]"),
        ({"n": 17}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"json_schema": ""}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"grammar": "x" * 300_000}, "grammar"),
        ({"structural_tag": ""}, "structural_tag"),
        ({"choice": pb.ChoiceConstraint(choices=[])}, "choice.choices"),
        ({"choice": pb.ChoiceConstraint(choices=["x" * 300_000])}, "choice"),
        ({"json_object": True, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_values_are_refused_under_the_names_of_this_api(params: dict[str, Any], field: str) -> None:
    request = pb.GenerateRequest(tokenized=PROMPT, sampling_params=pb.SamplingParams(**params))
    with pytest.raises(RequestInvalid) as caught:
        check_call(call_from_pb(request, request_id="r"), Capabilities.from_manifest(make_manifest()))
    renamed = rename_fields(caught.value)
    assert isinstance(renamed, RequestInvalid)
    assert renamed.violations[0].field == PARAMS + field


def test_a_constraint_that_takes_too_long_is_named_too() -> None:
    renamed = rename_fields(ConstraintLimitExceeded("constraint.choices", "1 s of processor time"))
    assert isinstance(renamed, ConstraintLimitExceeded)
    assert (renamed.violations[0].field, renamed.limit) == (PARAMS + "choice", "1 s of processor time")
