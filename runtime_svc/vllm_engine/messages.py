"""Converts the messages of a Generate in vLLM's engine API."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from smg_grpc_proto import vllm_engine_pb2 as pb

from bundle.errors import FieldViolation, KilnError
from edge.access.principal import ANONYMOUS, Principal
from execution.sampling_parameters import PARAMETERS
from execution.text.constraint import Constraint, Kind
from execution.text.prompt import Prompt, PromptSize, TextPrompt, TokenPrompt
from runtime_svc.admission.calls import GenerationCall
from runtime_svc.admission.constraints import MAX_CHOICES
from runtime_svc.admission.embeds import EmbedCall
from runtime_svc.admission.quotes import quote_value
from runtime_svc.api.generation import ABORT_CAUSE
from runtime_svc.api.generation_wire import sampling_from_pb
from runtime_svc.engine.events import Accepted, Event, Finished, GeneratedToken, PromptDelta, TokenDelta
from runtime_svc.engine.request import Finish, FinishReason
from runtime_svc.errors import (
    ConstraintLimitExceeded,
    FeatureNotServed,
    PromptTooLong,
    RequestAborted,
    RequestInvalid,
)

#: What this API calls the kinds of constraints.
_CONSTRAINTS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "json_schema": "json_schema",
        "json_object": "json_object",
        "regex": "regex",
        "grammar": "grammar",
        "choice": "choices",
        "structural_tag": "structural_tag",
    }
)

#: Fields of a request that Kiln reads, or that change nothing because they concern text: answers have token ids only.
SERVED: Final = frozenset(
    {
        "request_id",
        "tokenized",
        "text",
        "stream",
        *(f"sampling_params.{name}" for name in PARAMETERS if name in pb.SamplingParams.DESCRIPTOR.fields_by_name),
        "sampling_params.n",
        "sampling_params.max_tokens",
        "sampling_params.min_tokens",
        "sampling_params.stop",
        "sampling_params.stop_token_ids",
        "sampling_params.ignore_eos",
        "sampling_params.logprobs",
        "sampling_params.prompt_logprobs",
        "sampling_params.skip_special_tokens",
        "sampling_params.spaces_between_special_tokens",
        "sampling_params.include_stop_str_in_output",
        # Constraints always start with the first token.
        "sampling_params.grammar_from_first_token",
        *(f"sampling_params.{name}" for name in _CONSTRAINTS),
    }
)

#: Neutral values of fields that Kiln does not serve: routers send them. A default of proto3 is not even a value.
NEUTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {
        "data_parallel_rank": 0,
    }
)

#: Beginnings of the names that admission has for fields, and what this API calls them. The first that fits counts.
_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "token_ids.ids": "tokenized.input_ids",
        "token_ids": "tokenized.input_ids",
        "stop.max_new_tokens": "sampling_params.max_tokens",
        "stop.stop_strings": "sampling_params.stop",
        "stop.stop_token_ids": "sampling_params.stop_token_ids",
        "output.logprobs": "sampling_params.logprobs",
        "output.prompt_logprobs": "sampling_params.prompt_logprobs",
        "inputs[0].token_ids.ids": "tokenized.input_ids",
        "inputs[0].token_ids": "tokenized.input_ids",
        "num_sequences": "sampling_params.n",
        "sampling.min_new_tokens": "sampling_params.min_tokens",
        "stop.ignore_eos": "sampling_params.ignore_eos",
        "constraint.choices.texts": "sampling_params.choice.choices",
        "constraint.choices": "sampling_params.choice",
        "constraint.": "sampling_params.",
        "sampling.": "sampling_params.",
    }
)

#: Request ids that SMG makes for /v1/completions, whose texts it makes tokens of without those that a tokenizer adds.
#: Nothing else tells them from chats, whose templates write such tokens, and from ids that a client sent.
_BARE_REQUEST_ID: Final = re.compile(r"cmpl-[A-Za-z0-9]{24}(-p\d+)?-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_FINISH_REASONS: Final = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


def check_served(request: pb.GenerateRequest) -> None:
    """Checks that a request asks only for what Kiln does."""
    violations = []
    for path, value in _list_fields(request):
        if path not in SERVED and value != NEUTRAL.get(path):
            unset = f"unset or {quote_value(NEUTRAL[path])}" if path in NEUTRAL else "unset"
            shown = "set" if isinstance(value, str) else quote_value(value)
            violations.append(FieldViolation(path, shown, f"{unset}: this server does not serve it"))
    if violations:
        raise FeatureNotServed(violations)
    if request.WhichOneof("input") is None:
        raise RequestInvalid([FieldViolation("input", "none", "one of tokenized, text")])


def call_from_pb(
    request: pb.GenerateRequest, *, request_id: str, caller: Principal = ANONYMOUS, adapter: str = ""
) -> GenerationCall:
    """Converts a request that passed `check_served`.

    Fields without presence are unset at 0, and `n` 0 is 1: the API cannot tell them from unset.
    """
    params = request.sampling_params
    sampling = sampling_from_pb(params)
    if "seed" in sampling:
        # Kiln's seeds are unsigned: a negative one is the number of 64 bits that has its bits.
        sampling["seed"] %= 1 << 64
    if params.min_tokens:
        sampling["min_new_tokens"] = params.min_tokens
    return GenerationCall(
        request_id=request_id,
        prompt=_prompt_from_pb(request),
        caller=caller.key,
        sampling=sampling,
        max_new_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        stop_strings=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        num_sequences=params.n or 1,
        constraint=_constraint_from_pb(params),
        adapter=adapter,
    )


def embed_from_pb(
    request: pb.EmbedRequest, *, request_id: str, caller: Principal = ANONYMOUS, adapter: str = ""
) -> EmbedCall:
    """Converts an Embed request."""
    prompt = TokenPrompt(tuple(request.tokenized.input_ids))
    return EmbedCall(request_id=request_id, prompts=(prompt,), caller=caller.key, adapter=adapter)


def prompt_size_from_pb(request: pb.GenerateRequest) -> PromptSize:
    """Measures the prompt without a look at its ids."""
    if request.HasField("tokenized"):
        return PromptSize("token_ids", request.tokenized.ByteSize(), len(request.tokenized.input_ids))
    return PromptSize("text", len(request.text.encode()))


def rename_fields(error: RequestInvalid | FeatureNotServed | PromptTooLong | ConstraintLimitExceeded) -> KilnError:
    """Returns admission's error with the names that fields have in this API."""
    if isinstance(error, ConstraintLimitExceeded):
        return ConstraintLimitExceeded(_rename(error.field), error.limit)
    if isinstance(error, PromptTooLong):
        return PromptTooLong(_rename(error.field), error.size, error.limit, error.unit)
    return type(error)(
        [replace(one, field=_rename(one.field), accepted=_rename(one.accepted)) for one in error.violations]
    )


def find_error(finish: Finish) -> KilnError | None:
    """Returns the error that a call ends with after this end of its sequence; None if the end is an answer.

    A sequence that its client ends by Abort has an answer here, as from vLLM.
    """
    error = finish.error
    is_clients_wish = isinstance(error, RequestAborted) and error.metadata["cause"] == ABORT_CAUSE
    return None if is_clients_wish else error


class Answer:
    """The messages that a client gets: for each sequence chunks of new tokens if it streams, and one at its end."""

    def __init__(self, call: GenerationCall, *, is_streamed: bool) -> None:
        self._call = call
        self._is_streamed = is_streamed
        self._num_prompt_tokens = 0
        # What is told of the prompt: with sequence 0, in the first message that it has.
        self._prompt_tokens: list[GeneratedToken] = []
        # Of each sequence.
        self._tokens: defaultdict[int, list[GeneratedToken]] = defaultdict(list)

    def add(self, event: Event) -> pb.GenerateResponse | None:
        """Takes the next event; returns the message that follows from it, if one does."""
        index = event.sequence_index
        match event.payload:
            case Accepted() as accepted:
                self._num_prompt_tokens = accepted.num_prompt_tokens
            case PromptDelta() as part:
                self._prompt_tokens += part.list_tokens()[1]
            case TokenDelta(tokens=tokens) if tokens:
                is_first = not self._tokens[index]
                self._tokens[index] += tokens
                if self._is_streamed:
                    return pb.GenerateResponse(chunk=self._make_chunk(tokens, index, is_first=is_first))
            case Finished() as finished if find_error(finished.finish) is None:
                return pb.GenerateResponse(complete=self._make_complete(finished, index))
        return None

    def _make_chunk(self, tokens: Sequence[GeneratedToken], index: int, *, is_first: bool) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=[token.token_id for token in tokens],
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(tokens),
            output_logprobs=self._make_logprobs(tokens),
            input_logprobs=self._make_prompt_logprobs(index) if is_first else None,
            index=index,
        )

    def _make_complete(self, finished: Finished, index: int) -> pb.GenerateComplete:
        usage, tokens = finished.usage, self._tokens[index]
        return pb.GenerateComplete(
            output_ids=[token.token_id for token in tokens],
            finish_reason=_FINISH_REASONS[finished.finish.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.generated_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            output_logprobs=self._make_logprobs(tokens),
            input_logprobs=self._make_prompt_logprobs(index),
            index=index,
            **self._find_matched_stop(finished.finish),
        )

    def _make_logprobs(self, tokens: Sequence[GeneratedToken]) -> pb.OutputLogProbs | None:
        if self._call.logprobs is None:
            return None
        message = pb.OutputLogProbs(
            token_ids=[token.token_id for token in tokens],
            token_logprobs=[token.logprob for token in tokens if token.logprob is not None],
        )
        _fill_top(message, tokens if self._call.logprobs else ())
        return message

    def _make_prompt_logprobs(self, index: int) -> pb.InputLogProbs | None:
        """What is told of the prompt, which is the same for all sequences."""
        if not self._prompt_tokens or index:
            return None
        tokens = self._prompt_tokens
        message = pb.InputLogProbs(
            token_ids=[token.token_id for token in tokens],
            token_logprobs=[pb.InputTokenLogProb(value=token.logprob) for token in tokens],
        )
        _fill_top(message, tokens if self._call.prompt_logprobs else ())
        return message

    def _find_matched_stop(self, finish: Finish) -> dict[str, Any]:
        """Names the stop that the request itself asked for: the model's own end is none."""
        if finish.stop_string is not None:
            return {"matched_stop_str": finish.stop_string}
        if finish.stop_token_id in self._call.stop_token_ids:
            return {"matched_token_id": finish.stop_token_id}
        return {}


def _fill_top(message: pb.OutputLogProbs | pb.InputLogProbs, tokens: Sequence[GeneratedToken]) -> None:
    for token in tokens:
        message.top_logprobs.add(
            token_ids=[other.token_id for other in token.top_logprobs],
            values=[other.logprob for other in token.top_logprobs],
        )


def _list_fields(request: pb.GenerateRequest) -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of each field that is set."""
    for field, value in request.ListFields():
        if field.name == "sampling_params":
            yield from ((f"sampling_params.{nested.name}", one) for nested, one in value.ListFields())
        else:
            yield field.name, value


def _prompt_from_pb(request: pb.GenerateRequest) -> Prompt:
    if request.HasField("tokenized"):
        is_bare = _BARE_REQUEST_ID.fullmatch(request.request_id) is not None
        return TokenPrompt(tuple(request.tokenized.input_ids), bare=is_bare)
    return TextPrompt(request.text)


def _constraint_from_pb(params: pb.SamplingParams) -> Constraint | None:
    name = params.WhichOneof("constraint")
    # `json_object` False is none.
    if name not in _CONSTRAINTS or getattr(params, name) is False:
        return None
    value = getattr(params, name)
    choices = tuple(islice(value.choices, MAX_CHOICES + 1)) if name == "choice" else ()
    return Constraint(kind=_CONSTRAINTS[name], text=value if isinstance(value, str) else "", choices=choices)


def _rename(name: str) -> str:
    for ours, theirs in _FIELD_NAMES.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
