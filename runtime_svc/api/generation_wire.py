"""Converts messages of GenerationService."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, Final, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from kiln.runtime.v1 import generation_pb2 as pb

from bundle.errors import KilnError
from edge.access.principal import ANONYMOUS, Principal
from edge.status import status_from_error
from execution.sampling_parameters import PARAMETERS, SamplingParams
from execution.text.call_forms import MODES, ToolChoice
from execution.text.constraint import Constraint
from execution.text.prompt import (
    ChatMessage,
    ChatPrompt,
    ContentPart,
    Prompt,
    PromptSize,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from runtime_svc.admission.calls import UNSERVED, CaptureCall, GenerationCall
from runtime_svc.admission.constraints import MAX_CHOICES
from runtime_svc.admission.sessions import SessionCall
from runtime_svc.admission.stalls import StallCall
from runtime_svc.engine.events import Accepted, Event, Finished, GeneratedToken, PromptDelta, TokenDelta
from runtime_svc.engine.request import FinishReason, StallAction, Usage

#: What has a prompt.
PromptMessage: TypeAlias = pb.GenerateRequest | pb.TokenizeRequest | pb.EmbedInput

#: Of a list that may be longer than any that admission takes, only so many elements are converted.
MAX_LIST: Final = 64 << 10

#: Ours have the names that the API has for them.
_FINISH_REASONS = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_STALL_ACTIONS = {pb.StallPolicy.Action.Value(f"ACTION_{action.name}"): action for action in StallAction} | {
    pb.StallPolicy.ACTION_UNSPECIFIED: StallAction.ABORT
}
_CHOICE_MODES = {pb.ToolChoice.Mode.Value(f"MODE_{mode}"): mode for mode in MODES} | {
    pb.ToolChoice.MODE_UNSPECIFIED: "AUTO"
}


def call_from_pb(request: pb.GenerateRequest, *, request_id: str, caller: Principal = ANONYMOUS) -> GenerationCall:
    """Converts a Generate request; unset fields become None."""
    stop = request.stop
    return GenerationCall(
        request_id=request_id,
        prompt=prompt_from_pb(request),
        caller=caller.key,
        sampling=sampling_from_pb(request.sampling),
        max_new_tokens=stop.max_new_tokens if stop.HasField("max_new_tokens") else None,
        stop_strings=tuple(stop.stop_strings),
        stop_token_ids=tuple(islice(stop.stop_token_ids, MAX_LIST)),
        ignore_eos=stop.ignore_eos,
        logprobs=request.output.logprobs if request.output.HasField("logprobs") else None,
        logits=request.output.logits,
        echo=request.output.echo,
        prompt_logprobs=request.output.prompt_logprobs if request.output.HasField("prompt_logprobs") else None,
        capture=_capture_from_pb(request.output.capture_inputs) if request.output.HasField("capture_inputs") else None,
        stall=_stall_from_pb(request.stall_policy) if request.HasField("stall_policy") else None,
        session=_session_from_pb(request),
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        num_sequences=request.num_sequences if request.HasField("num_sequences") else 1,
        constraint=_constraint_from_pb(request.constraint) if request.HasField("constraint") else None,
        tool_choice=_tool_choice_from_pb(request.tool_choice),
        unserved=dict(_find_unserved(request)),
    )


def sampling_from_pb(message: Message) -> dict[str, Any]:
    """Reads the sampling parameters that are set off a message that has fields of their names, among others.

    A field without presence is set if it is not 0.
    """
    found = {field.name: value for field, value in message.ListFields()}
    return {name: _value_from_pb(found[name], row.neutral) for name, row in PARAMETERS.items() if name in found}


def prompt_from_pb(request: PromptMessage) -> Prompt | None:
    """Converts the prompt; None if the request has none that this code knows."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "chat" if not isinstance(request, pb.EmbedInput):
            return _chat_from_pb(request.chat)
        case "token_ids" if not isinstance(request, pb.TokenizeRequest):
            return TokenPrompt(tuple(request.token_ids.ids))
    return None


def prompt_size_from_pb(request: PromptMessage) -> PromptSize:
    """Measures the prompt without a look at its messages or ids."""
    match request.WhichOneof("prompt"):
        case "text":
            return PromptSize("text", len(request.text.encode()))
        case "chat" if not isinstance(request, pb.EmbedInput):
            return PromptSize("chat", request.chat.ByteSize(), len(request.chat.messages))
        case "token_ids" if not isinstance(request, pb.TokenizeRequest):
            return PromptSize("token_ids", request.token_ids.ByteSize(), len(request.token_ids.ids))
    return PromptSize("", 0)


def event_to_pb(event: Event) -> pb.GenerateResponse:
    """Converts one event of a stream."""
    response = pb.GenerateResponse(
        sequence_number=event.sequence_number,
        sequence_index=event.sequence_index,
        weight_epoch=event.weight_epoch,
    )
    match event.payload:
        case TokenDelta() as delta:
            # In place, because there is one for every token.
            message = response.delta
            message.text = delta.text
            for token in delta.tokens:
                _fill_token(message.tokens.add(), token)
        case PromptDelta() as part:
            response.prompt.text, tokens = part.list_tokens()
            for token in tokens:
                _fill_token(response.prompt.tokens.add(), token)
        case Accepted() as accepted:
            response.accepted.CopyFrom(_accepted_to_pb(accepted))
        case Finished() as finished:
            response.finished.CopyFrom(_finished_to_pb(finished))
    return response


def duration_to_pb(seconds: float) -> Duration:
    """Converts a time span from seconds."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _value_from_pb(value: Any, neutral: object) -> Any:
    match neutral:
        case Mapping():
            return dict(islice(value.items(), MAX_LIST))
        case tuple():
            return tuple(tuple(one.ids) if isinstance(one, pb.TokenIds) else one for one in islice(value, MAX_LIST))
    return value


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    """Converts all sampling parameters."""
    words = [pb.TokenIds(ids=word) for word in sampling.bad_words]
    return pb.SamplingParams(**asdict(sampling) | {"bad_words": words})


def _chat_from_pb(chat: pb.Chat) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(map(_message_from_pb, chat.messages)),
        tools_json=tuple(chat.tools_json),
        add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
        template=chat.chat_template,
    )


def _message_from_pb(message: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        parts=tuple(ContentPart(part.WhichOneof("part"), part.text) for part in message.content_parts),
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning_content,
        thinking=message.thinking if message.HasField("thinking") else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
    )


def _find_unserved(request: pb.GenerateRequest) -> Iterator[tuple[str, object]]:
    for path in UNSERVED:
        *parents, name = path.split(".")
        message: Message = request
        for parent in parents:
            message = getattr(message, parent)
        for field, value in message.ListFields():
            if field.name == name:
                yield path, value


def _capture_from_pb(capture: pb.InputCapture) -> CaptureCall:
    return CaptureCall(capture.first_step, capture.num_steps if capture.HasField("num_steps") else None)


def _constraint_from_pb(constraint: pb.OutputConstraint) -> Constraint:
    # Without a kind that this code knows, it is one that admission refuses.
    kind = constraint.WhichOneof("constraint") or "choices"
    text = getattr(constraint, kind)
    return Constraint(
        kind=kind,
        text=text if isinstance(text, str) else "",
        choices=tuple(islice(constraint.choices.texts, MAX_CHOICES + 1)),
        json_whitespace=constraint.json_whitespace,
    )


def _tool_choice_from_pb(choice: pb.ToolChoice) -> ToolChoice | None:
    """Converts a choice; None if it neither chooses nor forbids a second call."""
    is_parallel = not choice.HasField("parallel_calls") or choice.parallel_calls
    if choice.WhichOneof("choice") is None and is_parallel:
        return None
    return ToolChoice(
        mode=_CHOICE_MODES.get(choice.mode, str(choice.mode)),
        function=choice.function if choice.HasField("function") else None,
        parallel_calls=is_parallel,
    )


def _session_from_pb(request: pb.GenerateRequest) -> SessionCall | None:
    has_ttl = request.HasField("session_ttl")
    if not request.session_id and not has_ttl:
        return None
    return SessionCall(request.session_id, request.session_ttl.ToNanoseconds() / 1e9 if has_ttl else None)


def _stall_from_pb(policy: pb.StallPolicy) -> StallCall:
    timeout_s = policy.timeout.ToNanoseconds() / 1e9 if policy.HasField("timeout") else None
    return StallCall(_STALL_ACTIONS.get(policy.action, policy.action), timeout_s)


def _accepted_to_pb(accepted: Accepted) -> pb.Accepted:
    return pb.Accepted(
        request_id=accepted.request_id,
        prompt_token_count=accepted.num_prompt_tokens,
        sampling=sampling_to_pb(accepted.sampling),
        max_new_tokens=accepted.max_new_tokens,
        truncated_tokens=accepted.num_truncated_tokens,
    )


def _fill_token(message: pb.Token, token: GeneratedToken) -> None:
    message.id = token.token_id
    message.text = token.text
    if token.logprob is not None:
        message.logprob = token.logprob
    for other in token.top_logprobs:
        message.top_logprobs.add(id=other.token_id, text=other.text, logprob=other.logprob)
    if token.text_offset is not None:
        message.text_offset = token.text_offset
    if token.logits is not None:
        message.logits.extend(token.logits)


def _finished_to_pb(finished: Finished) -> pb.Finished:
    finish = finished.finish
    message = pb.Finished(
        reason=_FINISH_REASONS[finish.reason],
        usage=_usage_to_pb(finished.usage),
        status=_status_to_pb(finish.error),
        captured_inputs_path=finished.captured_inputs_path,
        capture_status=_status_to_pb(finished.capture_error),
        cumulative_logprob=finished.cumulative_logprob,
    )
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    if finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    return message


def _status_to_pb(error: KilnError | None) -> Any:
    return None if error is None else status_from_error(error)


def _usage_to_pb(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        generated_tokens=usage.generated_tokens,
        kv_blocks=usage.kv_blocks,
        kv_tokens=usage.kv_tokens,
        queue_duration=duration_to_pb(usage.queue_s),
        prefill_duration=duration_to_pb(usage.prefill_s),
        decode_duration=duration_to_pb(usage.decode_s),
        buckets=[
            pb.BucketUsage(
                submodel=one.key.submodel,
                bucket=one.key.bucket,
                steps=one.steps,
                padding_tokens=one.padding_tokens,
            )
            for one in usage.buckets
        ],
    )
