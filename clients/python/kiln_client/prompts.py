"""Makes generation requests from Python values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from google.protobuf import json_format
from kiln.runtime.v1.generation_pb2 import (
    Chat,
    Choices,
    GenerateRequest,
    InputCapture,
    OutputConstraint,
    OutputOptions,
    SamplingParams,
    StallPolicy,
    StopConditions,
    TokenIds,
    ToolChoice,
)

from kiln_client.enums import enum_number
from kiln_client.errors import InvalidArgument
from kiln_client.options import check_options

_CONSTRAINTS = [field.name for field in OutputConstraint.DESCRIPTOR.oneofs_by_name["constraint"].fields]
_SAMPLING = SamplingParams.DESCRIPTOR.fields_by_name.keys()
_OUTPUT = {*OutputOptions.DESCRIPTOR.fields_by_name} - {"capture_inputs"}
# What OpenAI's clients call a part that is no text.
_MEDIA = {"image_url": "image", "audio_url": "audio", "video_url": "video"}

Pooling: TypeAlias = Literal["last", "mean"]
"""Which hidden state stands for a prompt: that of its last token, or the mean of all."""
StallAction: TypeAlias = Literal["abort", "pause", "coalesce"]
"""What a sequence does while its client does not read, before the timeout ends it: it stands still, briefly or for
long, or goes on, and what waits for the client becomes one event."""
Prompt: TypeAlias = str | Sequence[int] | Chat
"""Text, token ids, or a conversation made by `chat`."""


class GenerateOptions(TypedDict, total=False):
    """Options of a generation. The server's defaults apply to omitted options; its Accepted event reports them."""

    request_id: str
    """Id for `abort` and logs: 1 to 128 printable characters of ASCII, no spaces. Default: the server chooses one."""
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
    min_p: float
    """Drops tokens less likely than this share of the most likely one, in [0, 1]. Like the penalties and `logit_bias`
    only where the deployment's `logit_processors` is true."""
    frequency_penalty: float
    """Taken off a token's logit for each time that it was generated, in [-2, 2]."""
    presence_penalty: float
    """Taken off a token's logit once it was generated, in [-2, 2]."""
    repetition_penalty: float
    """Divides positive logits and multiplies negative ones of tokens of prompt and output; above 0, and 1 is none."""
    logit_bias: Mapping[int, float]
    """Added to logits, by token id: each in [-100, 100]."""
    typical_p: float
    """Keeps the tokens whose information is closest to the expected one, until their probability reaches this mass."""
    no_repeat_ngram_size: int
    """Excludes tokens that would repeat so many tokens in a row of prompt and output."""
    bad_words: Sequence[Sequence[int]]
    """Sequences of tokens that are not generated."""
    min_new_tokens: int
    """Excludes the tokens that would end the sequence until it has so many."""
    allowed_token_ids: Sequence[int]
    """Excludes all other tokens."""
    forced_token_ids: Sequence[int]
    """The first tokens of the output."""
    json_schema: Mapping[str, Any] | str
    """Schema of the JSON that the output is, as a mapping or as text. At most one of this, `json_object`, `regex`,
    `grammar`, `choices` and `structural_tag`, and only where the deployment's `constraints` is true."""
    json_object: bool
    """The output is a JSON object."""
    json_whitespace: bool
    """JSON may have white space where JSON allows it, without bound."""
    regex: str
    """Regular expression that the whole output matches."""
    grammar: str
    """Context-free grammar of the output, in EBNF or in Lark."""
    choices: Sequence[str]
    """The output is one of these texts."""
    structural_tag: Mapping[str, Any] | str
    """Structural tag that the output matches, as xgrammar defines it, as a mapping or as text."""
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any]
    """Calls of the chat's tools that the output has, each kept to the tool's parameters: text and calls, no call, calls
    alone, or one call of a function, which OpenAI's clients name by `{"function": {"name": …}}`. Only where the
    deployment's `constraints` is true. Default: what the model writes."""
    parallel_tool_calls: bool
    """Whether there may be several calls. Default true; false without a `tool_choice` is as with `auto`."""
    num_sequences: int
    """Sequences to generate for the prompt, at most the deployment's `max_num_sequences`. Each has a seed of its own:
    `seed` plus its index. Default 1."""
    stop_strings: Sequence[str]
    """Texts that end generation."""
    stop_token_ids: Sequence[int]
    """Tokens that end generation, besides the bundle's own."""
    ignore_eos: bool
    """Go on past the bundle's end-of-sequence tokens."""
    logprobs: int
    """Return the log probability of each token, and of this many alternatives."""
    prompt_logprobs: int
    """Return the prompt's tokens first, with the log probability of each and of this many alternatives. Only where the
    deployment's `prompt_logprobs` is true."""
    echo: bool
    """Return the prompt's tokens and text first."""
    logits: bool
    """Return all logits of each token, by token id, before sampling parameters apply."""
    capture_inputs: tuple[int, int]
    """First step and number of steps whose inputs the runtime writes to a file. The completion names the file."""
    stall_action: StallAction
    """What the sequence does while this program does not read its events. Default `abort`."""
    stall_timeout_s: float
    """Longest time without reading, from 1 second to the server's bound for the action, which is the default."""
    cache_salt: str
    """Share cached prefixes with requests of the same salt only. At most 256 characters."""
    adapter: str
    """Adapter that changes the model for this request, one of `list_adapters`. Default: none."""
    session_id: str
    """Session that the request continues: what its prompt shares with the sequence before it is not computed again. One
    request at a time."""
    session_ttl_s: float
    """Time for which the session is kept after the request, from 1 second to the server's bound."""


def chat(messages: Sequence[Any], *, tools: Sequence[Mapping[str, Any]] = ()) -> Chat:
    """Makes a conversation prompt.

    Args:
        messages: Turns, oldest first, each `{"role": …, "content": …}`. Other keys are those of `ChatMessage`; a value
            of None, or a list of nothing, is left out. OpenAI's forms are taken too: content as a list of parts with
            `type`, calls of tools with `function`, and the messages that its client answers with.
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
        if isinstance(conversation.get("messages"), list):
            conversation["messages"] = [_turn(message) for message in conversation["messages"]]
        return json_format.ParseDict(conversation | {"tools_json": tools}, Chat())
    except (json_format.ParseError, AttributeError, LookupError, TypeError, ValueError) as error:
        accepted = "a list of {role, content}, or a mapping with messages and tools"
        description = f"{error}; accepted: {accepted}"
        raise InvalidArgument.about("chat", description, "the chat is invalid", reason="REQUEST_INVALID") from None


def _turn(message: Any) -> Any:
    """Writes a turn in OpenAI's form as the API's; a turn in the API's form stays as it is."""
    if callable(dump := getattr(message, "model_dump", None)):
        message = dump()
    if not isinstance(message, Mapping):
        return message
    turn = {name: value for name, value in message.items() if value is not None and value != []}
    match message.get("content"):
        case []:
            # Templates see the same, and a list of no parts could not be told from unset.
            turn["content"] = ""
        case [*parts]:
            del turn["content"]
            turn["content_parts"] = [_content_part(part) for part in parts]
    if "tool_calls" in turn:
        turn["tool_calls"] = [_tool_call(call) for call in turn["tool_calls"]]
    if turn.get("reasoning_content") == "":
        # Templates see the same, and under its own name an empty text could not be told from unset.
        turn.setdefault("thinking", "")
    return turn


def _content_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"text": part["text"]}
    # The server names the part that its model does not take.
    return {_MEDIA[kind]: {"url": part[kind]["url"]}} if kind in _MEDIA else part


def _tool_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" not in call:
        return call
    arguments = call["function"].get("arguments")
    is_json = arguments is None or isinstance(arguments, str)
    text = arguments if is_json else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return {"id": call.get("id"), "name": call["function"]["name"], "arguments_json": text}


def _tools_json(tools: Any) -> list[str]:
    """Writes each tool as JSON text, with its keys in the given order."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError("tools is no list of mappings")
    return [json.dumps(tool, ensure_ascii=False, allow_nan=False) for tool in tools]


def generate_request(deployment_id: str, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateRequest:
    """Makes the request for one generation. An option that is left out stays unset, which is not the same as zero.

    Raises:
        ValueError: `stall_action` or `tool_choice` is none, or there are several constraints.
        TypeError: There is no such option.
    """
    check_options(options, GenerateOptions, "timeout_s")
    sampling: dict[str, Any] = {"bad_words": [TokenIds(ids=word) for word in options.pop("bad_words", ())]}
    sampling |= {name: value for name, value in options.items() if name in _SAMPLING}
    output: dict[str, Any] = {name: value for name, value in options.items() if name in _OUTPUT}
    request = GenerateRequest(
        deployment_id=deployment_id,
        request_id=options.get("request_id", ""),
        sampling=SamplingParams(**sampling),
        stop=StopConditions(
            max_new_tokens=options.get("max_new_tokens"),
            stop_strings=options.get("stop_strings", ()),
            stop_token_ids=options.get("stop_token_ids", ()),
            ignore_eos=options.get("ignore_eos"),
        ),
        output=OutputOptions(**output),
        cache_salt=options.get("cache_salt", ""),
        session_id=options.get("session_id", ""),
        adapter=options.get("adapter", ""),
        num_sequences=options.get("num_sequences"),
        **prompt_fields(prompt),
    )
    if (constraint := _constraint(options)) is not None:
        request.constraint.CopyFrom(constraint)
    if (tool_choice := _tool_choice(options)) is not None:
        request.tool_choice.CopyFrom(tool_choice)
    if (steps := options.get("capture_inputs")) is not None:
        request.output.capture_inputs.CopyFrom(InputCapture(first_step=steps[0], num_steps=steps[1]))
    if (action := options.get("stall_action")) is not None:
        number = enum_number(StallPolicy.Action.DESCRIPTOR, action)
        request.stall_policy.action = StallPolicy.Action.ValueType(number)
    if (timeout_s := options.get("stall_timeout_s")) is not None:
        request.stall_policy.timeout.FromNanoseconds(round(timeout_s * 1e9))
    if (ttl_s := options.get("session_ttl_s")) is not None:
        request.session_ttl.FromNanoseconds(round(ttl_s * 1e9))
    return request


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """The field of a request or of an input that holds a prompt, as an argument of the message."""
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"chat": prompt} if isinstance(prompt, Chat) else {"token_ids": TokenIds(ids=prompt)}


def _constraint(options: Mapping[str, Any]) -> OutputConstraint | None:
    """Makes the constraint that one of the options asks for; None if none does."""
    given = {name: options[name] for name in _CONSTRAINTS if name in options and options[name] is not False}
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}; accepted: one constraint")
    if "choices" in given:
        return OutputConstraint(choices=Choices(texts=given["choices"]))
    for name, value in given.items():
        if isinstance(value, Mapping):
            given[name] = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return OutputConstraint(**given, json_whitespace=options.get("json_whitespace", False)) if given else None


def _tool_choice(options: Mapping[str, Any]) -> ToolChoice | None:
    """Makes the choice of tools that the options ask for; None if they ask for none."""
    choice, parallel_calls = options.get("tool_choice"), options.get("parallel_tool_calls")
    if choice is None and parallel_calls is None:
        return None
    message = ToolChoice(parallel_calls=parallel_calls)
    if isinstance(choice, Mapping):
        message.function = choice["function"]["name"]
    elif choice is not None:
        message.mode = ToolChoice.Mode.ValueType(enum_number(ToolChoice.Mode.DESCRIPTOR, choice))
    return message
