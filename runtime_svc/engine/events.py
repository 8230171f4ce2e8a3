"""The events of a stream. They are msgspec structs, which are cheap, because every token makes several."""

from __future__ import annotations

import msgspec

from bundle.errors import KilnError
from execution.sampling_parameters import SamplingParams
from runtime_svc.engine.prompt_reports import PromptLogprobs
from runtime_svc.engine.request import Finish, Usage


class Accepted(msgspec.Struct, frozen=True):
    """The request was queued."""

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    max_new_tokens: int
    num_truncated_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True):
    """An alternative token and the natural logarithm of its probability."""

    token_id: int
    text: str
    logprob: float


class GeneratedToken(msgspec.Struct, frozen=True):
    """One token; without text if it stopped the sequence. `logits` are f32 [vocab_size], None unless asked for.

    `text_offset` counts the characters of the sequence's text before that of the token; None unless log probabilities
    are asked for.
    """

    token_id: int
    text: str
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]
    logits: memoryview[float] | None = None
    text_offset: int | None = None


class PromptDelta(msgspec.Struct, frozen=True):
    """Tokens of the prompt from a position on. Their text is made when they are listed, once and in order: thousands
    would hold up the engine.
    """

    prompt: PromptLogprobs
    start: int
    count: int

    def list_tokens(self) -> tuple[str, list[GeneratedToken]]:
        """The text of the tokens, and these; with the last one of the prompt, all text that is left."""
        pieces, tokens, text = [], [], self.prompt.text
        assert text is not None, "admission gives the prompt its text"
        for position in range(self.start, self.start + self.count):
            token_id, offset = self.prompt.token_ids[position], text.num_chars
            pieces.append(text.push(token_id))
            top = [TokenLogprob(one, text.token_text(one), number) for one, number in self.prompt.list_top(position)]
            logprob = self.prompt.find_logprob(position)
            tokens.append(GeneratedToken(token_id, text.token_text(token_id), logprob, tuple(top), text_offset=offset))
        if self.start + self.count == len(self.prompt.token_ids):
            pieces.append(text.flush())
        return "".join(pieces), tokens


class TokenDelta(msgspec.Struct, frozen=True):
    """Text and tokens since the previous event."""

    text: str
    tokens: tuple[GeneratedToken, ...]


class Finished(msgspec.Struct, frozen=True):
    """The end of a stream: the cost, and the file of captured inputs or the error that prevented it."""

    finish: Finish
    usage: Usage
    captured_inputs_path: str = ""
    capture_error: KilnError | None = None
    #: Sum of the log probabilities of the tokens; None unless the request wants these.
    cumulative_logprob: float | None = None


Payload = Accepted | PromptDelta | TokenDelta | Finished


class Event(msgspec.Struct, frozen=True):
    """One event: its place in the stream, the weight epoch that produced it, and the sequence that it belongs to."""

    sequence_number: int
    weight_epoch: int
    payload: Payload
    sequence_index: int = 0
