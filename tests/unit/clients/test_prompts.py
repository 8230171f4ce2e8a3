"""Python values become generation requests; what is unset stays unset."""

from __future__ import annotations

import re

import pytest
from kiln.runtime.v1.generation_pb2 import StallPolicy, ToolChoice
from kiln_client import Runtime, chat, errors
from kiln_client.prompts import chat_from_document, generate_request
from openai.types.chat import ChatCompletionMessage


def test_zero_is_not_unset() -> None:
    request = generate_request("demo", [], temperature=0.0, top_k=0, seed=0, ignore_eos=False, logprobs=0)
    assert request.WhichOneof("prompt") == "token_ids"
    for message, names in (
        (request.sampling, ("temperature", "top_k", "seed")),
        (request.stop, ("ignore_eos",)),
        (request.output, ("logprobs",)),
    ):
        assert [name for name in names if message.HasField(name)] == list(names)


def test_every_sampling_parameter_is_an_option() -> None:
    sampling = generate_request(
        "demo",
        "Once",
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        seed=7,
        min_p=0.25,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={5: -100},
        typical_p=0.75,
        no_repeat_ngram_size=3,
        bad_words=[[5, 6], [7]],
        min_new_tokens=2,
        allowed_token_ids=[5, 6],
        forced_token_ids=[6],
    ).sampling
    values = {field.name: value for field, value in sampling.ListFields()}
    assert list(values) == list(sampling.DESCRIPTOR.fields_by_name)
    assert dict(values.pop("logit_bias")) == {5: -100}
    assert [word.ids for word in values.pop("bad_words")] == [[5, 6], [7]]
    assert list(values.values()) == [0.5, 4, 0.5, 7, 0.25, 1, -1, 1.5, 0.75, 3, 2, [5, 6], [6]]


def test_one_constraint_is_sent() -> None:
    assert not generate_request("demo", "Once", json_object=False).HasField("constraint")
    schema = generate_request("demo", "Once", json_schema={"type": "object"}, json_whitespace=True).constraint
    assert (schema.json_schema, schema.json_whitespace) == ('{"type": "object"}', True)
    assert generate_request("demo", "Once", json_schema="{}").constraint.json_schema == "{}"
    assert generate_request("demo", "Once", json_object=True).constraint.json_object
    assert generate_request("demo", "Once", regex="a+").constraint.regex == "a+"
    assert generate_request("demo", "Once", grammar="start: A").constraint.grammar == "start: A"
    assert generate_request("demo", "Once", choices=["a", "b"]).constraint.choices.texts == ["a", "b"]
    tag = generate_request("demo", "Once", structural_tag={"format": {"type": "any_text"}}).constraint
    assert tag.structural_tag == '{"format": {"type": "any_text"}}'
    with pytest.raises(ValueError, match="got json_schema and regex; accepted: one constraint"):
        generate_request("demo", "Once", json_schema="{}", regex="a")


def test_choice_of_tools() -> None:
    assert not generate_request("demo", "Once").HasField("tool_choice")
    required = generate_request("demo", "Once", tool_choice="required").tool_choice
    assert (required.mode, required.HasField("parallel_calls")) == (ToolChoice.MODE_REQUIRED, False)
    named = generate_request("demo", "Once", tool_choice={"type": "function", "function": {"name": "find"}}).tool_choice
    assert (named.WhichOneof("choice"), named.function) == ("function", "find")
    alone = generate_request("demo", "Once", parallel_tool_calls=False).tool_choice
    assert (alone.WhichOneof("choice"), alone.HasField("parallel_calls"), alone.parallel_calls) == (None, True, False)
    with pytest.raises(ValueError, match="Mode: got 'any'; accepted: auto, none, required"):
        generate_request("demo", "Once", tool_choice="any")  # type: ignore[arg-type]


def test_stall_policy() -> None:
    assert not generate_request("demo", "Once").HasField("stall_policy")
    policy = generate_request("demo", "Once", stall_action="pause", stall_timeout_s=1.5).stall_policy
    assert (policy.action, policy.timeout.ToMilliseconds()) == (StallPolicy.ACTION_PAUSE, 1500)
    policy = generate_request("demo", "Once", stall_timeout_s=2).stall_policy
    assert (policy.action, policy.timeout.ToSeconds()) == (StallPolicy.ACTION_UNSPECIFIED, 2)
    assert not generate_request("demo", "Once", stall_action="coalesce").stall_policy.HasField("timeout")
    with pytest.raises(ValueError, match="accepted: abort, pause, coalesce"):
        generate_request("demo", "Once", stall_action="wait")  # type: ignore[arg-type]


def test_session() -> None:
    request = generate_request("demo", "Once", session_id="talk", session_ttl_s=1.5)
    assert (request.session_id, request.session_ttl.ToMilliseconds()) == ("talk", 1500)
    assert not generate_request("demo", "Once", session_id="talk").HasField("session_ttl")


def test_conversation() -> None:
    prompt = chat([{"role": "user", "content": "hi"}], tools=[{"name": "f", "parameters": {"type": "object"}}])
    request = generate_request("demo", prompt)
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "hi")]
    assert [*request.chat.tools_json] == ['{"name": "f", "parameters": {"type": "object"}}']
    assert chat_from_document([{"role": "user", "content": "hi"}]) == chat([{"role": "user", "content": "hi"}])
    assert not chat_from_document({"messages": [], "add_generation_prompt": False}).add_generation_prompt


def test_turns_in_the_form_of_openai() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0}'}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"größe": 2}}},
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x", "detail": "low"}}]},
    ]
    user, assistant, tool, picture = chat(messages).messages
    assert ([part.text for part in user.content_parts], user.name) == (["a", "b"], "ann")
    assert not user.HasField("content")
    assert not assistant.HasField("content")
    assert assistant.reasoning_content == "hm"
    calls = [(call.id, call.name, call.arguments_json) for call in assistant.tool_calls]
    assert calls == [("1", "f", '{"a": 1.0}'), ("2", "g", '{"größe": 2}')]
    assert (tool.content, tool.tool_call_id) == ("3", "1")
    assert picture.content_parts[0].image.url == "http://x"


def test_answers_of_openais_client_are_turns() -> None:
    function = {"name": "f", "arguments": "{}"}
    message = ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "content": None,
            "annotations": [],
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }
    )
    (turn,) = chat([message]).messages
    assert not turn.HasField("content")
    assert [(call.id, call.name, call.arguments_json) for call in turn.tool_calls] == [("1", "f", "{}")]
    assert chat([message.model_dump()]) == chat([message])


def test_null_is_left_out_and_empty_is_not() -> None:
    call = {"id": None, "function": {"name": "f", "arguments": None}}
    nulls, empty = chat(
        [
            {"role": "assistant", "content": None, "name": None, "refusal": None, "tool_calls": [call]},
            {"role": "assistant", "content": [], "tool_calls": [], "reasoning_content": ""},
        ]
    ).messages
    assert not nulls.HasField("content")
    assert [(call.id, call.name, call.arguments_json) for call in nulls.tool_calls] == [("", "f", "")]
    assert (empty.HasField("content"), empty.content) == (True, "")
    assert empty.HasField("thinking"), "templates see an empty reasoning_content, as from transformers"


def test_turns_in_the_form_of_the_api() -> None:
    call = {"id": "1", "name": "f", "arguments_json": "{}"}
    (turn,) = chat([{"role": "user", "content_parts": [{"text": "a"}], "tool_calls": [call]}]).messages
    assert (turn.content_parts[0].text, turn.tool_calls[0].arguments_json) == ("a", "{}")


def test_tools_that_are_not_json() -> None:
    for value in (float("nan"), object()):
        with pytest.raises(errors.InvalidArgument, match="JSON") as caught:
            chat([], tools=[{"limit": value}])
        assert caught.value.reason == "REQUEST_INVALID"


def test_tools_are_written_as_they_were_given() -> None:
    tool = {"zeta": 1, "alpha": 1.0, "name": "größe", "big": 2**63}
    text = '{"zeta": 1, "alpha": 1.0, "name": "größe", "big": 9223372036854775808}'
    assert [*chat([], tools=[tool]).tools_json] == [text]
    assert [*chat_from_document({"messages": [], "tools": [tool]}).tools_json] == [text]


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"messages": [], "tools": {"name": "f"}}, "tools is no list of mappings"),
        ({"messages": [], "tools": ["f"]}, "tools is no list of mappings"),
        ({"messages": [], "tools": [{"name": "\ud800"}]}, "surrogate"),
        ([{"rôle": "user"}], "rôle"),
        ({"mesages": []}, "mesages"),
        ([{"role": 1}], "role"),
        (["hi"], "ChatMessage"),
        ([{"role": "user", "content": [{"type": "smell", "smell": "x"}]}], "type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": ["hi"]}], "get"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "name"),
        ({"messages": "hi"}, "messages"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_no_conversation(document: list[object] | dict[str, object], named: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        chat_from_document(document)
    assert caught.value.reason == "REQUEST_INVALID"
    assert caught.value.fields[0].field == "chat"
    assert named in caught.value.fields[0].description
    assert "accepted: a list of {role, content}" in caught.value.fields[0].description


@pytest.mark.parametrize(
    ("given", "suggestion"),
    [
        ("max_tokens", "did you mean 'max_new_tokens'?"),
        ("temprature", "did you mean 'temperature'?"),
        ("timeout", "did you mean 'timeout_s'?"),
        ("guidance", "accepted: request_id, max_new_tokens, temperature, "),
    ],
)
def test_an_unknown_option_is_refused_with_its_name(given: str, suggestion: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"there is no option {given!r}; {suggestion}")):
        generate_request("demo", "Once", **{given: 0})  # type: ignore[arg-type]
    # Not when its first event is read.
    with pytest.raises(TypeError, match=f"'{given}'"), Runtime("127.0.0.1:1") as runtime:
        runtime.generate("demo", "Once", **{given: 0})
    with pytest.raises(TypeError, match=f"'{given}'"), Runtime("127.0.0.1:1") as runtime:
        runtime.complete("demo", "Once", **{given: 0})
