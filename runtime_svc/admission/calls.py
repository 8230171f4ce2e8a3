"""Validates Generate calls. One error names every mistake: its field, its value and the accepted values."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from bundle.errors import FieldViolation
from edge.request_id import REQUEST_ID, make_id_violation
from execution.sampling_parameters import CHOSEN, MAX_TOKENS, PARAMETERS, Domain, Need, SamplingParams, is_close
from execution.step import MAX_TOP_LOGPROBS
from execution.text.call_forms import ToolChoice
from execution.text.constraint import Constraint
from execution.text.prompt import ChatPrompt, Prompt, PromptSize, TextPrompt, TokenPrompt
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.admission.chats import find_chat_violations, find_template_violations, find_unserved_parts
from runtime_svc.admission.limits import RequestLimits
from runtime_svc.admission.output import find_output_violations, find_unserved_output
from runtime_svc.admission.quotes import MAX_VIOLATIONS_PER_LIST, quote_value
from runtime_svc.admission.sessions import SessionCall
from runtime_svc.admission.stalls import StallCall
from runtime_svc.engine.capture import MAX_STEPS, InputCapture
from runtime_svc.engine.prompt_reports import PromptLogprobs
from runtime_svc.engine.request import Request, StopConditions, Timeline
from runtime_svc.errors import FeatureNotServed, PromptTooLong, RequestInvalid

MAX_STOP_STRING_CHARS: Final = 256
#: Characters of a request's cache salt.
MAX_SALT_CHARS: Final = 256

#: Fields of a Generate request that no deployment serves yet, each with the value that changes nothing, if it has one.
UNSERVED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "priority": 0,
    }
)


@dataclass(frozen=True, slots=True)
class CaptureCall:
    """The steps whose inputs the client wants; None means unset."""

    first_step: int
    num_steps: int | None


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A Generate call as its caller (`Principal.key`) sent it; None means unset."""

    request_id: str
    prompt: Prompt | None
    caller: str = ""
    #: The parameters that the client set, by their names in `SamplingParams`.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits: bool = False
    #: Whether the client wants the prompt's tokens and text, too.
    echo: bool = False
    prompt_logprobs: int | None = None
    capture: CaptureCall | None = None
    stall: StallCall | None = None
    session: SessionCall | None = None
    cache_salt: str = ""
    #: Name of the adapter; empty for none.
    adapter: str = ""
    num_sequences: int = 1
    constraint: Constraint | None = None
    tool_choice: ToolChoice | None = None
    #: Values of the fields in UNSERVED that the client set.
    unserved: Mapping[str, object] = field(default_factory=dict)

    @property
    def tells_prompt(self) -> bool:
        """Whether the answer begins with the tokens of the prompt."""
        return self.echo or self.prompt_logprobs is not None


def check_call(call: GenerationCall, capabilities: Capabilities) -> None:
    """Checks all that can be checked before the prompt is tokenized."""
    unserved = [*_unserved_prompt(call.prompt, capabilities), *_unserved_options(call, capabilities)]
    invalid = [
        *([] if REQUEST_ID.fullmatch(call.request_id) else [make_id_violation("request_id", call.request_id)]),
        *_prompt_violations(call.prompt, capabilities),
        *_sampling_violations(call.sampling, capabilities),
        *_stop_violations(call, capabilities),
        *_output_violations(call, capabilities),
        *_salt_violations(call.cache_salt),
        *_sequence_violations(call, capabilities),
        *find_output_violations(
            call.constraint, call.tool_choice, call.prompt, call.sampling, ignore_eos=call.ignore_eos
        ),
        *([] if call.session is None else call.session.find_violations(capabilities.session_limits)),
    ]
    if invalid:
        fields = {violation.field for violation in invalid}
        raise RequestInvalid([*invalid, *(violation for violation in unserved if violation.field not in fields)])
    if unserved:
        raise FeatureNotServed(unserved)


def check_prompt_size(size: PromptSize, limits: RequestLimits) -> None:
    """Checks the size of a prompt before it is converted. What passes may still have too many tokens."""
    match size.field.rpartition(".")[2]:
        case "text":
            bounds = [(size.num_bytes, limits.max_text_bytes, "bytes")]
        case "chat":
            bounds = [
                (size.num_items, limits.max_chat_messages, "messages"),
                (size.num_bytes, limits.max_chat_bytes, "bytes"),
            ]
        case _:
            bounds = [(size.num_items, limits.max_prompt_ids, "tokens")]
    for number, limit, unit in bounds:
        if number > limit:
            raise PromptTooLong(size.field, number, limit, unit)


def check_num_token_ids(field: str, num_ids: int, limits: RequestLimits) -> None:
    """Checks the number of token ids to be turned into text."""
    if num_ids > limits.max_sequence_ids:
        raise RequestInvalid([FieldViolation(field, f"{num_ids} ids", f"at most {limits.max_sequence_ids} ids")])


def check_prompt(prompt: Prompt | None, capabilities: Capabilities) -> None:
    """Checks the prompt of a Tokenize call."""
    invalid = [*_prompt_violations(prompt, capabilities)]
    if invalid:
        raise RequestInvalid(invalid)
    unserved = [*_unserved_prompt(prompt, capabilities)]
    if unserved:
        raise FeatureNotServed(unserved)


def check_token_ids(field: str, token_ids: Sequence[int], capabilities: Capabilities) -> None:
    """Checks that ids are in the vocabulary."""
    invalid = [*_token_id_violations(field, token_ids, capabilities)]
    if invalid:
        raise RequestInvalid(invalid)


def admit(
    call: GenerationCall, token_ids: Sequence[int], capabilities: Capabilities, *, now_s: float
) -> tuple[Request, ...]:
    """Makes the request of each sequence of a checked call: fills in defaults, cuts a long prompt if the bundle does.

    `now_s` is the time by the event loop's clock.
    """
    field = prompt_field(call.prompt)
    if not token_ids:
        raise RequestInvalid([FieldViolation(field, "no tokens", "a prompt of at least one token")])
    num_surplus = max(0, len(token_ids) - capabilities.max_context_length)
    if num_surplus and not capabilities.input_truncation:
        raise PromptTooLong(field, len(token_ids), capabilities.max_context_length)
    # Keeps the end, because generation continues it.
    prompt_token_ids = tuple(token_ids[num_surplus:])
    # The tokenizer may know more tokens than the model. A step with such a token would fail for all of its rows.
    if max(prompt_token_ids) >= capabilities.vocab_size:
        found, accepted = max(prompt_token_ids), f"tokens 0 to {capabilities.vocab_size - 1} of the model"
        raise RequestInvalid([FieldViolation(field, f"token {found}", accepted)])
    limits = (capabilities.max_length - len(prompt_token_ids), call.max_new_tokens, capabilities.max_new_tokens)
    stop_token_ids = set(call.stop_token_ids) | (set() if call.ignore_eos else set(capabilities.eos_token_ids))
    request = Request(
        request_id=call.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_resolve_sampling({"seed": secrets.randbits(64), **call.sampling}, capabilities.default_sampling),
        stop=StopConditions(
            max_new_tokens=min(limit for limit in limits if limit is not None),
            stop_strings=call.stop_strings,
            stop_token_ids=frozenset(stop_token_ids),
        ),
        timeline=Timeline(arrived_s=now_s),
        num_truncated_tokens=num_surplus,
        top_logprobs=call.logprobs,
        wants_logits=call.logits,
        report=PromptLogprobs(prompt_token_ids, call.prompt_logprobs) if call.tells_prompt else None,
        owner=call.caller,
        cache_salt=call.cache_salt,
        session=None if call.session is None else call.session.resolve(call.caller, capabilities.session_limits, now_s),
        capture=_resolve_capture(call.capture),
        stall=None if call.stall is None else call.stall.resolve(capabilities.stall_timeouts),
    )
    return request.fan_out(call.num_sequences)


def prompt_field(prompt: Prompt | None) -> str:
    """Returns the name of the API's field that holds the prompt."""
    match prompt:
        case TextPrompt():
            return "text"
        case ChatPrompt():
            return "chat"
        case TokenPrompt():
            return "token_ids"
        case None:
            return "prompt"


def _resolve_sampling(asked: Mapping[str, Any], default: SamplingParams) -> SamplingParams:
    resolved = replace(default, **asked)
    return replace(resolved, top_k=max(resolved.top_k, 0))


def _resolve_capture(capture: CaptureCall | None) -> InputCapture | None:
    if capture is None:
        return None
    return InputCapture(capture.first_step, 1 if capture.num_steps is None else capture.num_steps)


def _prompt_violations(prompt: Prompt | None, capabilities: Capabilities) -> Iterator[FieldViolation]:
    match prompt:
        case None:
            yield FieldViolation("prompt", "none", "one of text, chat, token_ids")
        case TextPrompt(text=""):
            yield FieldViolation("text", "''", "at least one character")
        case ChatPrompt():
            yield from find_chat_violations(prompt)
            yield from find_template_violations(prompt, capabilities.chat_templates)
        case TokenPrompt(token_ids=()):
            yield FieldViolation("token_ids.ids", "none", "at least one token id")
        case TokenPrompt(token_ids=token_ids):
            yield from _token_id_violations("token_ids.ids", token_ids, capabilities)
        case TextPrompt():
            pass


def _unserved_prompt(prompt: Prompt | None, capabilities: Capabilities) -> Iterator[FieldViolation]:
    if isinstance(prompt, TextPrompt) and not capabilities.text:
        yield FieldViolation("text", "set", "token_ids: the bundle has no tokenizer")
    if isinstance(prompt, ChatPrompt) and not capabilities.chat:
        accepted = "text or token_ids: the bundle has no chat template"
        yield FieldViolation("chat", "set", accepted if capabilities.text else "token_ids: the bundle has no tokenizer")
    if isinstance(prompt, ChatPrompt):
        yield from islice(find_unserved_parts(prompt), MAX_VIOLATIONS_PER_LIST)


def _sampling_violations(asked: Mapping[str, Any], capabilities: Capabilities) -> Iterator[FieldViolation]:
    for name, value in asked.items():
        domain = PARAMETERS[name].domain
        if name == "top_k":
            domain = replace(domain, largest=capabilities.max_top_k or capabilities.vocab_size)
        if isinstance(value, Mapping):
            yield from _pair_violations(f"sampling.{name}", value, domain, capabilities)
        elif isinstance(value, tuple):
            yield from _listed_violations(f"sampling.{name}", value, domain, capabilities)
        elif value not in domain:
            yield FieldViolation(f"sampling.{name}", quote_value(value), str(domain))


def _pair_violations(
    field: str, pairs: Mapping[int, float], domain: Domain, capabilities: Capabilities
) -> Iterator[FieldViolation]:
    if len(pairs) > MAX_TOKENS:
        yield FieldViolation(field, f"{len(pairs)} tokens", f"at most {MAX_TOKENS}")
        return
    accepted = f"{domain}, for tokens 0 to {capabilities.vocab_size - 1}"
    outside = (one for one in pairs.items() if not (0 <= one[0] < capabilities.vocab_size and one[1] in domain))
    for token_id, number in islice(outside, MAX_VIOLATIONS_PER_LIST):
        yield FieldViolation(f"{field}[{token_id}]", quote_value(number), accepted)


def _listed_violations(
    field: str, listed: Sequence[int | tuple[int, ...]], domain: Domain, capabilities: Capabilities
) -> Iterator[FieldViolation]:
    words = [one if isinstance(one, tuple) else (one,) for one in listed]
    if (count := sum(map(len, words))) > MAX_TOKENS:
        yield FieldViolation(field, f"{count} tokens", str(domain))
        return
    outside = ((index, word) for index, word in enumerate(words) if not word or not _is_known(word, capabilities))
    for index, word in islice(outside, MAX_VIOLATIONS_PER_LIST):
        shown = ", ".join(map(str, word[:MAX_VIOLATIONS_PER_LIST])) or "none"
        yield FieldViolation(f"{field}[{index}]", shown, f"tokens 0 to {capabilities.vocab_size - 1}")


def _is_known(token_ids: Sequence[int], capabilities: Capabilities) -> bool:
    return all(0 <= token_id < capabilities.vocab_size for token_id in token_ids)


def _stop_violations(call: GenerationCall, capabilities: Capabilities) -> Iterator[FieldViolation]:
    if call.max_new_tokens is not None and call.max_new_tokens < 1:
        yield FieldViolation("stop.max_new_tokens", str(call.max_new_tokens), "at least 1")
    # What a checkpoint's defaults ask for at least may be more.
    elif call.max_new_tokens is not None and (least := call.sampling.get("min_new_tokens", 0)) > call.max_new_tokens:
        accepted = f"at most {call.max_new_tokens}, the most tokens that the request asks for"
        yield FieldViolation("sampling.min_new_tokens", str(least), accepted)
    max_strings, max_ids = capabilities.max_stop_strings, capabilities.max_stop_token_ids
    if len(call.stop_strings) > max_strings:
        yield FieldViolation("stop.stop_strings", f"{len(call.stop_strings)} strings", f"at most {max_strings}")
    for index, text in enumerate(call.stop_strings[:max_strings]):
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            value, accepted = f"{len(text)} characters", f"1 to {MAX_STOP_STRING_CHARS} characters"
            yield FieldViolation(f"stop.stop_strings[{index}]", value, accepted)
    if len(call.stop_token_ids) > max_ids:
        yield FieldViolation("stop.stop_token_ids", f"{len(call.stop_token_ids)} ids", f"at most {max_ids}")
    else:
        yield from _token_id_violations("stop.stop_token_ids", call.stop_token_ids, capabilities)


def _output_violations(call: GenerationCall, capabilities: Capabilities) -> Iterator[FieldViolation]:
    max_logprobs = capabilities.max_logprobs or MAX_TOP_LOGPROBS
    if call.logprobs is not None and not 0 <= call.logprobs <= max_logprobs:
        yield FieldViolation("output.logprobs", str(call.logprobs), f"0 to {max_logprobs}")
    most = min(MAX_TOP_LOGPROBS, capabilities.vocab_size)
    if call.prompt_logprobs is not None and not 0 <= call.prompt_logprobs <= most:
        yield FieldViolation("output.prompt_logprobs", str(call.prompt_logprobs), f"0 to {most}")
    if call.stall is not None:
        yield from call.stall.find_violations(capabilities.stall_timeouts, wants_logits=call.logits)
    if call.capture is not None:
        first_step, num_steps = call.capture.first_step, call.capture.num_steps
        if first_step < 0:
            yield FieldViolation("output.capture_inputs.first_step", str(first_step), "at least 0")
        if num_steps is not None and not 1 <= num_steps <= MAX_STEPS:
            yield FieldViolation("output.capture_inputs.num_steps", str(num_steps), f"1 to {MAX_STEPS}")


def _salt_violations(salt: str) -> Iterator[FieldViolation]:
    if len(salt) > MAX_SALT_CHARS:
        yield FieldViolation("cache_salt", f"{len(salt)} characters", f"at most {MAX_SALT_CHARS} characters")


def _sequence_violations(call: GenerationCall, capabilities: Capabilities) -> Iterator[FieldViolation]:
    count, largest = call.num_sequences, capabilities.max_num_sequences
    if not 1 <= count <= largest:
        yield FieldViolation("num_sequences", str(count), f"1 to {largest}")
    elif count > 1 and call.session is not None:
        yield FieldViolation("num_sequences", str(count), "1, beside session_id: a session goes on from one sequence")
    elif count > 1 and call.capture is not None:
        accepted = "1, beside output.capture_inputs: a file has the steps of one sequence"
        yield FieldViolation("num_sequences", str(count), accepted)


def _unserved_options(call: GenerationCall, capabilities: Capabilities) -> Iterator[FieldViolation]:
    no_logits = "the bundle outputs no logits; compile it with neuron_config.output_logits: true"
    for path, value in call.unserved.items():
        if value != (neutral := UNSERVED[path]):
            accepted = "unset" if neutral is None else f"unset or {neutral}"
            accepted = f"{accepted}: this server does not serve it yet"
            yield FieldViolation(path, quote_value(value), accepted, quotes_text=isinstance(value, str))
    if call.logprobs is not None and not capabilities.logprobs:
        yield FieldViolation("output.logprobs", str(call.logprobs), f"unset: {no_logits}")
    if call.prompt_logprobs is not None and not capabilities.prompt_logprobs:
        accepted = "unset: the bundle tells nothing of prompts; compile it with output_prompt_logprobs: true"
        yield FieldViolation("output.prompt_logprobs", str(call.prompt_logprobs), accepted)
    if call.logits and not capabilities.logits:
        cause = "the logits of a token exceed a message" if capabilities.logprobs else no_logits
        yield FieldViolation("output.logits", "true", f"false: {cause}")
    yield from _unserved_names(call, capabilities)
    if call.capture is not None and not capabilities.input_capture:
        yield FieldViolation("output.capture_inputs", "set", "unset: this runtime has no --capture-directory")
    if call.stop_strings and not capabilities.text:
        yield FieldViolation("stop.stop_strings", "set", "unset: the bundle has no tokenizer")
    yield from find_unserved_output(call.constraint, call.tool_choice, capabilities)
    yield from _unserved_sampling(call.sampling, capabilities)


def _unserved_sampling(asked: Mapping[str, Any], capabilities: Capabilities) -> Iterator[FieldViolation]:
    for name, value in asked.items():
        row = PARAMETERS[name]
        if row.need is Need.PROCESSORS and value != row.neutral and not capabilities.logit_processors:
            neutral = "" if isinstance(value, Mapping | tuple) else f" or {quote_value(row.neutral)}"
            yield FieldViolation(f"sampling.{name}", quote_value(value), f"unset{neutral}: {row.need.value}")
    default, resolved = capabilities.default_sampling, _resolve_sampling(asked, capabilities.default_sampling)
    if capabilities.dynamic_sampling or resolved.picks_like(default):
        return
    for name in CHOSEN:
        value, baked = getattr(resolved, name), getattr(default, name)
        if not is_close(value, baked):
            accepted = f"unset or {quote_value(baked)}: {Need.CHOICE.value}"
            yield FieldViolation(f"sampling.{name}", quote_value(value), accepted)


def _unserved_names(call: GenerationCall, capabilities: Capabilities) -> Iterator[FieldViolation]:
    """Finds an adapter or a session that the call names and the executables cannot serve."""
    if call.adapter and not capabilities.adapter_slots:
        accepted = "unset: the bundle has no room for adapters; compile it with neuron_config.lora_config"
        yield FieldViolation("adapter", quote_value(call.adapter), accepted)
    if call.session is not None and not capabilities.sessions:
        accepted = "unset: the bundle's executables cannot begin a prompt behind what the KV cache holds"
        if capabilities.padding_side == "left":
            accepted += ", because of neuron_config.padding_side: left"
        yield FieldViolation("session_id", quote_value(call.session.session_id), accepted, quotes_text=True)


def _token_id_violations(field: str, token_ids: Sequence[int], capabilities: Capabilities) -> Iterator[FieldViolation]:
    vocab_size = capabilities.vocab_size
    outside = [index for index, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size]
    for index in outside[:MAX_VIOLATIONS_PER_LIST]:
        yield FieldViolation(f"{field}[{index}]", str(token_ids[index]), f"0 to {vocab_size - 1}")
