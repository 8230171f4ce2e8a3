"""Makes generation requests from Python values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

from google.protobuf import json_format
from kiln.runtime.v1.generation_pb2 import (
    Chat,
    GenerateRequest,
    InputCapture,
    OutputOptions,
    SamplingParams,
    StopConditions,
    TokenIds,
)

from kiln_client.errors import FieldViolation, InvalidArgument

Prompt: TypeAlias = str | Sequence[int] | Chat
"""Text, token ids, or a conversation made by `chat`."""


class GenerateOptions(TypedDict, total=False):
    """Options of a generation. The server's defaults apply to omitted options; its Accepted event reports them."""

    request_id: str
    """Id for `abort` and logs. Default: the server chooses one."""
    max_new_tokens: int
    """Maximum number of tokens to generate. Default: as many as the sequence length allows."""
    temperature: float
    """Divides the logits; 0 is greedy."""
    top_k: int
    """Keeps the k most likely tokens; 0 keeps all candidates of the bundle."""
    top_p: float
    """Keeps the smallest set of tokens whose probability reaches p, in (0, 1]."""
    seed: int
    """Equal seeds give equal tokens, whichever requests share the batch. Default: random."""
    stop_strings: Sequence[str]
    """Texts that end generation."""
    stop_token_ids: Sequence[int]
    """Tokens that end generation, besides the bundle's own."""
    ignore_eos: bool
    """Go on past the bundle's end-of-sequence tokens."""
    logprobs: int
    """Return the log probability of each token, and of this many alternatives."""
    logits: bool
    """Return all logits of each token, by token id, before sampling parameters apply."""
    capture_inputs: tuple[int, int]
    """First step and number of steps whose inputs the runtime writes to a file. The completion names the file."""


def chat(messages: Sequence[Mapping[str, str]], *, tools: Sequence[Mapping[str, Any]] = ()) -> Chat:
    """Makes a conversation prompt.

    Args:
        messages: Turns, oldest first, each `{"role": …, "content": …}`.
        tools: Tools that the model may call, usually JSON schemas of functions. The chat template sees their keys in
            this order.

    Raises:
        InvalidArgument: Reason REQUEST_INVALID: a message has an unknown key or a value of the wrong type, or a tool is
            not JSON.
    """
    return chat_from_document({"messages": list(messages), "tools": [dict(tool) for tool in tools]})


def chat_from_document(document: dict[str, Any] | list[Any]) -> Chat:
    """Makes a conversation prompt from a parsed file: a list of messages, or a mapping with `messages` and `tools`.

    Raises:
        InvalidArgument: Reason REQUEST_INVALID: there is an unknown key or a value of the wrong type.
    """
    conversation = {"messages": document} if isinstance(document, list) else dict(document)
    try:
        tools = _tools_json(conversation.pop("tools", []))
        return json_format.ParseDict(conversation | {"tools_json": tools}, Chat())
    except (json_format.ParseError, AttributeError, TypeError, ValueError) as error:
        accepted = "a list of {role, content}, or a mapping with messages and tools"
        violation = FieldViolation("chat", f"{error}; accepted: {accepted}", "REQUEST_INVALID")
        raise InvalidArgument("the chat is invalid", reason="REQUEST_INVALID", fields=(violation,)) from None


def _tools_json(tools: Any) -> list[str]:
    """Writes each tool as JSON text, with its keys in the given order."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError("tools is no list of mappings")
    return [json.dumps(tool, ensure_ascii=False, allow_nan=False) for tool in tools]


def generate_request(deployment_id: str, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateRequest:
    """Makes the request for one generation. An option that is left out stays unset, which is not the same as zero."""
    request = GenerateRequest(
        deployment_id=deployment_id,
        request_id=options.get("request_id", ""),
        sampling=SamplingParams(
            temperature=options.get("temperature"),
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
            seed=options.get("seed"),
        ),
        stop=StopConditions(
            max_new_tokens=options.get("max_new_tokens"),
            stop_strings=options.get("stop_strings", ()),
            stop_token_ids=options.get("stop_token_ids", ()),
            ignore_eos=options.get("ignore_eos"),
        ),
        output=OutputOptions(logprobs=options.get("logprobs"), logits=options.get("logits", False)),
    )
    if (steps := options.get("capture_inputs")) is not None:
        request.output.capture_inputs.CopyFrom(InputCapture(first_step=steps[0], num_steps=steps[1]))
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(prompt)
    else:
        request.token_ids.CopyFrom(TokenIds(ids=prompt))
    return request
