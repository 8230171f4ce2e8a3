"""Validates Embed calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bundle.errors import FieldViolation
from execution.text.prompt import Prompt
from runtime_svc.admission.calls import GenerationCall, admit, check_call
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.engine.prompt_reports import POOLINGS, Pooling, PromptEmbedding
from runtime_svc.engine.request import Request
from runtime_svc.errors import FeatureNotServed, PromptLimitExceeded, PromptTooLong, RequestInvalid


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """An Embed call as its caller (`Principal.key`) sent it; a pooling that this code does not know is a number."""

    request_id: str
    prompts: Sequence[Prompt | None]
    caller: str = ""
    pooling: Pooling | int = "last"
    adapter: str = ""
    cache_salt: str = ""

    def list_generations(self) -> list[GenerationCall]:
        """What each prompt's sequence is: the prompt, and one token, which its last step gives besides."""
        return [
            GenerationCall(
                request_id=self.request_id,
                prompt=prompt,
                caller=self.caller,
                max_new_tokens=1,
                adapter=self.adapter,
                cache_salt=self.cache_salt,
            )
            for prompt in self.prompts
        ]


def check_embed(call: EmbedCall, capabilities: Capabilities) -> None:
    """Checks all that can be checked before the prompts are tokenized."""
    if not capabilities.embeddings:
        accepted = "nothing: the bundle tells no hidden states; compile it with output_embeddings: true"
        raise FeatureNotServed([FieldViolation("inputs", "set", accepted)])
    count, most = len(call.prompts), capabilities.max_num_sequences
    if not 1 <= count <= most:
        raise RequestInvalid([FieldViolation("inputs", f"{count} prompts", f"1 to {most} prompts")])
    if call.pooling not in POOLINGS:
        accepted = " or ".join(one.upper() for one in POOLINGS)
        raise RequestInvalid([FieldViolation("pooling", str(call.pooling), accepted)])
    for index, one in enumerate(call.list_generations()):
        with naming_input(index):
            check_call(one, capabilities)


def admit_embed(
    call: EmbedCall, token_ids: Sequence[Sequence[int]], capabilities: Capabilities, *, now_s: float
) -> list[Request]:
    """Makes the request of each prompt of a checked call, given its tokens."""
    assert not isinstance(call.pooling, int), "the call is checked"
    requests = []
    for index, (one, ids) in enumerate(zip(call.list_generations(), token_ids, strict=True)):
        with naming_input(index):
            (request,) = admit(one, ids, capabilities, now_s=now_s)
        request.sequence_index = index
        request.report = PromptEmbedding(len(request.prompt_token_ids), call.pooling)
        requests.append(request)
    return requests


@contextmanager
def naming_input(index: int) -> Iterator[None]:
    """Names the input in errors about a prompt."""

    def rename(name: str) -> str:
        return f"inputs[{index}].{name}" if name.partition(".")[0].partition("[")[0] in _OF_PROMPTS else name

    try:
        yield
    except (RequestInvalid, FeatureNotServed) as error:
        raise type(error)([replace(one, field=rename(one.field)) for one in error.violations]) from error
    except PromptTooLong as error:
        raise PromptTooLong(rename(error.field), error.size, error.limit, error.unit) from error
    except PromptLimitExceeded as error:
        raise PromptLimitExceeded(rename(error.field), error.limit) from error


_OF_PROMPTS = {"prompt", "text", "token_ids"}
