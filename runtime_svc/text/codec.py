"""Converts prompts and text to tokens and back, with the tokenizer and chat template of a bundle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from bundle.errors import KilnError
from execution.forkserver.client import ForkserverClient
from execution.text.call_forms import CallForm
from execution.text.constraint import Constraint
from execution.text.control import (
    CallFormFound,
    Decode,
    Decoded,
    DecodedStep,
    DecodeStep,
    EncodeChat,
    Encoded,
    EncodeText,
    FindCallForm,
    Load,
    Loaded,
    SequenceTokens,
    TokenPiece,
    pack_ids,
    unpack_ids,
)
from execution.text.decoder import TokenDecoder
from execution.text.detokenizer import Detokenizer
from execution.text.errors import TextInvalid
from execution.text.handle import TextLimits, TextProcess
from execution.text.prompt import Prompt, TextPrompt, TokenPrompt, prompt_size
from execution.text.token_table import find_dependence, make_decoder
from runtime_svc.text.constraints import ConstrainedOutput, ConstraintProcesses
from runtime_svc.text.text_queue import TextQueue, TextWorkers

_ENCODING: Final = "making tokens of the prompt"
_PROBING: Final = "finding out how the chat template writes calls of tools"
_DECODING: Final = "making text of tokens"


class TextCodec:
    """Converts prompts to tokens and tokens to text, for one deployment; construct with `open`.

    A text process makes the tokens. Text is made here, from a table of the tokens' bytes, or in the process if the
    bundle's decoder needs more than a table. If the bundle has no tokenizer, the codec takes only token ids.
    """

    def __init__(
        self,
        queue: TextQueue | None,
        loaded: Loaded | None,
        workers: TextWorkers,
        constraints: ConstraintProcesses | None = None,
    ) -> None:
        self._queue = queue
        #: What keeps text within constraints; None without a tokenizer.
        self.constraints = constraints
        self._workers = workers
        self._decoder = None if loaded is None or loaded.table is None else make_decoder(loaded.table)
        self._dependence = None if loaded is None else find_dependence(loaded.table)
        self._texts = () if loaded is None else tuple(loaded.texts)
        self._added = ([], []) if loaded is None else loaded.added
        # By the name of the chat template.
        self._call_forms: dict[str, CallForm | None] = {}
        #: The longest text of one token, in UTF-8; 0 without a tokenizer.
        self.max_token_bytes = 0 if loaded is None else loaded.max_token_bytes

    @classmethod
    async def open(
        cls,
        deployment_id: str,
        load: Load | None,
        *,
        forkserver: ForkserverClient,
        limits: TextLimits,
        workers: TextWorkers,
    ) -> TextCodec:
        """Starts the text process of a deployment; `load` is None if its bundle has no tokenizer."""
        if load is None:
            return cls(None, None, workers)
        start = partial(TextProcess.start, load, forkserver, limits)
        process = await start()
        constraints = ConstraintProcesses(deployment_id, load, forkserver, limits)
        return cls(TextQueue(deployment_id, process, start), process.loaded, workers, constraints)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the bundle has a tokenizer."""
        return self._queue is not None

    @property
    def num_restarts(self) -> int:
        """How often the text process was replaced, or one for constraints."""
        own = 0 if self._queue is None else self._queue.num_restarts
        return own + (0 if self.constraints is None else self.constraints.num_restarts)

    @property
    def decodes_steps(self) -> bool:
        """Whether text of new tokens must be made by `decode_step`."""
        return self._queue is not None and self._decoder is None

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Returns the token ids of a prompt that admission has checked."""
        if isinstance(prompt, TokenPrompt):
            before, behind = self._added if prompt.bare else ([], [])
            return (*before, *prompt.token_ids, *behind)
        assert self._queue is not None
        call = EncodeText(text=prompt.text) if isinstance(prompt, TextPrompt) else EncodeChat(prompt=prompt)
        answer = await self._queue.run(prompt_size(prompt), call, Encoded, _ENCODING)
        return unpack_ids(answer.token_ids)

    async def find_call_form(self, template: str) -> CallForm | None:
        """Finds how the chat template of a name that admission has checked writes calls; None if in no known form."""
        assert self._queue is not None, "there is a template"
        if template not in self._call_forms:
            call = FindCallForm(template=template)
            self._call_forms[template] = (await self._queue.run(0, call, CallFormFound, _PROBING)).form
        return self._call_forms[template]

    async def compile(self, constraint: Constraint) -> bytes:
        """Returns the mask of the first token; raises TextInvalid if a token's text depends on those beside it."""
        assert self.constraints is not None, "there is a tokenizer"
        if self._dependence is not None:
            raise TextInvalid("tokenizer", self._dependence)
        return await self.constraints.compile(constraint)

    def constrain(self, constraint: Constraint | None, mask: bytes | None) -> ConstrainedOutput | None:
        """Makes the output of a new sequence with a constraint, whose first mask `compile` has found."""
        if constraint is None or mask is None or self.constraints is None:
            return None
        return self.constraints.begin(constraint, mask)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of tokens. Bytes that form no character show as U+FFFD."""
        num_ids = len(token_ids)
        if self._decoder is not None:
            decode = partial(self._decoder.decode, skip_special_tokens=skip_special_tokens)
            return await self._workers.run_if_large(num_ids, decode, token_ids)
        assert self._queue is not None
        call = Decode(token_ids=pack_ids(list(token_ids)), skip_special_tokens=skip_special_tokens)
        return (await self._queue.run(num_ids, call, Decoded, _DECODING)).text

    def sequence_text(
        self, stop_strings: Sequence[str], *, is_constrained: bool = False
    ) -> SequenceText | PiecewiseText | NoText:
        """Makes the output text of a new sequence; a constrained one has the text that its grammar reads."""
        if self._decoder is not None:
            decode = self._decoder.decode_matched if is_constrained else self._decoder.decode
            return SequenceText(self._decoder, stop_strings, decode)
        return PiecewiseText(self._texts, stop_strings) if self.has_tokenizer else NoText()

    async def prompt_text(self, token_ids: Sequence[int]) -> SequenceText | PiecewiseText | NoText:
        """Makes the text of a prompt, whose tokens can be pushed then."""
        text = self.sequence_text(())
        if isinstance(text, PiecewiseText):
            for error in await self.decode_step([(text, token_ids)]):
                if error is not None:
                    raise error
        return text

    async def decode_step(self, new_tokens: Sequence[tuple[PiecewiseText, Sequence[int]]]) -> list[KilnError | None]:
        """Makes the text of the tokens that a step gives, in one call; returns each sequence's error or None."""
        assert self._queue is not None
        call = DecodeStep(sequences=[text.describe(token_ids) for text, token_ids in new_tokens])
        try:
            # It counts for no bound: a step is small, and cannot come again later.
            answer = await self._queue.run(None, call, DecodedStep, _DECODING)
        except KilnError as error:
            if len(new_tokens) == 1:
                return [error]
            # Only the sequence that the decoder does not end with fails.
            return [await self._decode_alone(one) for one in new_tokens]
        for (text, _), pieces in zip(new_tokens, answer.sequences, strict=True):
            text.take(pieces)
        return [None] * len(new_tokens)

    async def close(self) -> None:
        """Ends the processes. Calling it again is harmless."""
        if self._queue is not None:
            await self._queue.close()
        if self.constraints is not None:
            await self.constraints.close()

    async def _decode_alone(self, new_tokens: tuple[PiecewiseText, Sequence[int]]) -> KilnError | None:
        (error,) = await self.decode_step([new_tokens])
        return error


class SequenceText:
    """Detokenizes a sequence and watches for stop strings."""

    def __init__(
        self,
        decoder: TokenDecoder,
        stop_strings: Sequence[str],
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Takes a decoder; `decode` makes the text of its tokens in place of the decoder's own function."""
        self._decoder = decoder
        self._detokenizer = Detokenizer(decode or decoder.decode, decoder.decode_one)
        self._matcher = StopStringMatcher(stop_strings)
        #: Characters of the text so far, with those that are held back because a stop string may begin with them.
        self.num_chars = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has met; None before."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now. After a stop string, returns no text."""
        text = self._detokenizer.push(token_id)
        self.num_chars += len(text)
        return self._matcher.push(text)

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the sequence."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token alone."""
        return self._decoder.token_text(token_id)


class PiecewiseText:
    """The text of a sequence that a text process detokenizes: before a token is pushed, `take` has got its piece."""

    def __init__(self, texts: Sequence[str], stop_strings: Sequence[str]) -> None:
        self._texts = texts
        self._matcher = StopStringMatcher(stop_strings)
        self._pieces = deque[TokenPiece]()
        self._newest = TokenPiece(text="", rest="", window=[], num_emitted=0)
        #: As in `SequenceText`.
        self.num_chars = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has met; None before."""
        return self._matcher.matched

    def describe(self, token_ids: Sequence[int]) -> SequenceTokens:
        """Returns what the process needs to make the pieces of the next tokens."""
        return SequenceTokens(self._newest.window, self._newest.num_emitted, list(token_ids))

    def take(self, pieces: Sequence[TokenPiece]) -> None:
        """Takes the pieces of the next tokens, of which the sequence may leave the last ones out."""
        self._pieces = deque(pieces)

    def push(self, token_id: int) -> str:  # noqa: ARG002 - its piece is known
        """Takes the next token; returns the text that is certain now. After a stop string, returns no text."""
        self._newest = self._pieces.popleft()
        self.num_chars += len(self._newest.text)
        return self._matcher.push(self._newest.text)

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the sequence."""
        rest, self._newest = self._newest.rest, TokenPiece(text="", rest="", window=[], num_emitted=0)
        return self._matcher.push(rest) + self._matcher.flush()

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token alone."""
        return self._texts[token_id] if token_id < len(self._texts) else ""


class NoText:
    """The output text of a bundle without a tokenizer: it is always empty."""

    stop_string: str | None = None
    num_chars: int | None = None

    def push(self, token_id: int) -> str:  # noqa: ARG002
        """Takes the next token; returns no text."""
        return ""

    def flush(self) -> str:
        """Returns no text."""
        return ""

    def token_text(self, token_id: int) -> str:  # noqa: ARG002
        """Returns no text for any token."""
        return ""


class StopStringMatcher:
    """Finds the stop string that is complete first, in text that comes in pieces of any length.

    If two end at the same character, the one that begins earlier wins. The matcher holds back text that may begin a
    stop string. It delivers the text before a stop string, never the stop string or the text behind it.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings), "a stop string is empty"
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        #: The stop string that the text has met; None before.
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece; returns the text to deliver. After a stop string, returns no text."""
        if not self._stop_strings:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns the text that is still held back at the end: it became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
