"""The sizes of requests that a deployment takes, which follow from its model; checked before anything is converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from edge.request_limit import RequestLimit
from runtime_svc.admission.capabilities import Capabilities

#: Text of this size is tokenized in milliseconds, so it is always taken: the client learns its length in tokens. Also,
#: tokenizers may drop some text, such as repeated spaces, so that the limit of a short context would be too strict.
MIN_TEXT_BYTES: Final = 64 << 10
MIN_CHAT_MESSAGES: Final = 1024
#: What Tokenize makes of such text, Detokenize takes.
MIN_SEQUENCE_IDS: Final = MIN_TEXT_BYTES
#: A prompt whose beginning would be cut off may have at most this many times the tokens that are left.
TRUNCATED_LENGTHS: Final = 8
#: Chat templates leave text out, such as former reasoning, so that a chat may have this many times a prompt's text.
CHAT_TEXTS: Final = 2
#: Fields of one message of a chat on the wire, itself, its parts and its calls included, on average.
CHAT_FIELDS: Final = 8
#: Stands for the longest token's text while a deployment is being loaded; common vocabularies have 128 spaces in one.
ASSUMED_TOKEN_BYTES: Final = 128
#: A token id on the wire, with the key of its field if the list is not packed.
MAX_ID_BYTES: Final = 6
#: Room for what is not the prompt: options, stop strings, stop tokens.
OTHER_BYTES: Final = 64 << 10
OTHER_FIELDS: Final = 4096


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The largest sizes of what requests of one deployment hold.

    Text prompts count in UTF-8, chats on the wire, with their tools; `max_sequence_ids` is of prompt and output.
    """

    max_text_bytes: int
    max_chat_bytes: int
    max_chat_messages: int
    max_prompt_ids: int
    max_sequence_ids: int

    @classmethod
    def of(cls, capabilities: Capabilities, max_token_bytes: int = ASSUMED_TOKEN_BYTES) -> Self:
        """Returns the limits; the longest token has `max_token_bytes` in UTF-8, or 0 without a tokenizer."""
        num_tokens = capabilities.max_context_length * (TRUNCATED_LENGTHS if capabilities.input_truncation else 1)
        text_bytes = max(MIN_TEXT_BYTES, num_tokens * max_token_bytes)
        return cls(
            max_text_bytes=text_bytes,
            max_chat_bytes=CHAT_TEXTS * text_bytes,
            max_chat_messages=max(MIN_CHAT_MESSAGES, num_tokens),
            max_prompt_ids=num_tokens,
            max_sequence_ids=max(MIN_SEQUENCE_IDS, num_tokens, capabilities.max_length),
        )

    @property
    def on_the_wire(self) -> RequestLimit:
        """The size of the largest request on the wire."""
        return RequestLimit(
            max_bytes=max(self.max_chat_bytes, self.max_sequence_ids * MAX_ID_BYTES) + OTHER_BYTES,
            max_fields=self.max_sequence_ids + CHAT_FIELDS * self.max_chat_messages + OTHER_FIELDS,
        )
