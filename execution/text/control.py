"""What a service asks of its text process, and what that answers. `Load` comes first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from bundle.manifest import Tokens
from execution.text.call_forms import CallForm
from execution.text.constraint import ConstrainedSequence, Constraint, NextTokens
from execution.text.prompt import ChatPrompt
from execution.text.token_table import TokenTable

_ID_TYPE: Final = "i"


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A message that is tagged with its class's name."""


class Load(_Message, frozen=True):
    """Read the files. The answer is `Loaded` or `Unreadable`.

    Attributes:
        tokenizer: Path of a `tokenizer.json`.
        tokenizer_config: Path of a `tokenizer_config.json`, which has the special tokens that templates get.
        special_ids: Their ids if there is no such file, by name.
        chat_templates: Jinja source of each chat template, by name.
        vocab_size: Of the model.
        eos: The tokens that end a sequence.
        matches: Whether the process is for constraints alone.
    """

    tokenizer: str
    tokenizer_config: str | None = None
    special_ids: dict[str, int] = {}
    chat_templates: dict[str, str] = {}
    vocab_size: int = 0
    eos: tuple[int, ...] = ()
    matches: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: Path,
        tokenizer_config: Path | None = None,
        *,
        chat_templates: Mapping[str, str],
        tokens: Tokens,
    ) -> Self:
        """Describes the files of a bundle or a checkpoint, and the special tokens that its manifest has."""
        ids = {"bos_token": tokens.bos, "eos_token": tokens.eos[0] if tokens.eos else None, "pad_token": tokens.pad}
        return cls(
            tokenizer=str(tokenizer),
            tokenizer_config=None if tokenizer_config is None else str(tokenizer_config),
            special_ids={name: token_id for name, token_id in ids.items() if token_id is not None},
            chat_templates=dict(chat_templates),
            vocab_size=tokens.vocab_size,
            eos=tokens.eos,
        )


class EncodeText(_Message, frozen=True):
    """Tokenize a text, with the special tokens that the tokenizer adds. The answer is `Encoded`."""

    text: str


class EncodeChat(_Message, frozen=True):
    """Render a chat and tokenize the text. The answer is `Encoded`."""

    prompt: ChatPrompt


class FindCallForm(_Message, frozen=True):
    """Find out how the chat template of a name writes calls of tools. The answer is `CallFormFound`."""

    template: str


class Decode(_Message, frozen=True):
    """Turn tokens into text. The answer is `Decoded`."""

    #: As `pack_ids` packs them.
    token_ids: bytes
    skip_special_tokens: bool


class SequenceTokens(msgspec.Struct, frozen=True):
    """New tokens of one sequence, and the window of its detokenizer; see `detokenizer.Detokenizer`."""

    window: list[int]
    num_emitted: int
    token_ids: list[int]


class TokenPiece(msgspec.Struct, frozen=True):
    """What a detokenizer makes of one token.

    Attributes:
        text: Text that is certain now.
        rest: Text that is still held back: what the sequence ends with if it ends here.
        window: The detokenizer's window behind the token, whose first `num_emitted` tokens have been emitted as text.
    """

    text: str
    rest: str
    window: list[int]
    num_emitted: int


class DecodeStep(_Message, frozen=True):
    """Detokenize the tokens that a step gave to sequences. The answer is `DecodedStep`."""

    sequences: list[SequenceTokens]


class CompileConstraint(_Message, frozen=True):
    """Compile a constraint, to find out whether that ends. The answer is `Compiled`, or `Refused`."""

    constraint: Constraint


class Follow(_Message, frozen=True):
    """Find the tokens that may come next in sequences. The answer is `Followed`."""

    sequences: list[ConstrainedSequence]
    #: Numbers of sequences that have ended.
    ended: list[int]


class Loaded(_Message, frozen=True):
    """The files have been read.

    Attributes:
        max_token_bytes: The longest spelling of a token in UTF-8; the text of no token is longer.
        added: Special tokens that the tokenizer puts before a text, and those behind it.
        table: Decodes as the tokenizer does; None if no table can, and then `texts` has the text of each token alone.
    """

    max_token_bytes: int
    table: TokenTable | None
    texts: list[str]
    added: tuple[list[int], list[int]] = ([], [])


class Unreadable(_Message, frozen=True):
    """A file or the template cannot be read."""

    subject: str
    detail: str


class Encoded(_Message, frozen=True):
    """Token ids, as `pack_ids` packs them."""

    token_ids: bytes


class CallFormFound(_Message, frozen=True):
    """The form; None if it is none of those that are known."""

    form: CallForm | None


class Decoded(_Message, frozen=True):
    """The text."""

    text: str


class DecodedStep(_Message, frozen=True):
    """Of each sequence, a piece for each token."""

    sequences: list[list[TokenPiece]]


class Compiled(_Message, frozen=True):
    """The mask of the first token, as `NextTokens` has it."""

    mask: bytes


class Followed(_Message, frozen=True):
    """What may come next in each sequence."""

    sequences: list[NextTokens]


class Refused(_Message, frozen=True):
    """The template or the tokenizer refuses the prompt, or a constraint cannot be kept."""

    detail: str
    is_unbounded: bool = False


class OutOfMemory(_Message, frozen=True):
    """The work needs more memory than the process may have."""


Work = EncodeText | EncodeChat | FindCallForm | Decode | DecodeStep | CompileConstraint | Follow
Answer = (
    Loaded | Unreadable | Encoded | CallFormFound | Decoded | DecodedStep | Compiled | Followed | Refused | OutOfMemory
)

decode_load = msgspec.msgpack.Decoder(Load).decode
decode_work: Callable[[bytes], Work] = msgspec.msgpack.Decoder(Work).decode
decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode


def pack_ids(token_ids: list[int]) -> bytes:
    """Packs token ids, which are then copied rather than parsed; raises OverflowError if one exceeds 32 bits."""
    return array(_ID_TYPE, token_ids).tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """Returns token ids that `pack_ids` has packed."""
    return array(_ID_TYPE, packed)
