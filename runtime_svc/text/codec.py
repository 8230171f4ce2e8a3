"""Converts prompts and text to tokens and back, with the tokenizer and chat template of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from bundle.errors import KilnError
from execution.forkserver.client import ForkserverClient
from execution.text.control import (
    Decode,
    Decoded,
    DecodedStep,
    DecodeStep,
    EncodeChat,
    Encoded,
    EncodeText,
    Load,
    Loaded,
    pack_ids,
    unpack_ids,
)
from execution.text.handle import TextLimits, TextProcess
from execution.text.prompt import Prompt, TextPrompt, TokenPrompt, prompt_size
from execution.text.token_table import make_decoder
from runtime_svc.text.output import NoText, PiecewiseText, SequenceText
from runtime_svc.text.text_queue import TextQueue
from runtime_svc.text.workers import TextWorkers

_ENCODING: Final = "making tokens of the prompt"
_DECODING: Final = "making text of tokens"


class TextCodec:
    """Converts prompts to tokens and tokens to text, for one deployment; construct with `open`.

    A text process makes the tokens. Text is made here, from a table of the tokens' bytes, or in the process if the
    bundle's decoder needs more than a table. If the bundle has no tokenizer, the codec takes only token ids.
    """

    def __init__(self, queue: TextQueue | None, loaded: Loaded | None, workers: TextWorkers) -> None:
        """Takes a queue in front of a process and what the process told; None of both without a tokenizer."""
        self._queue = queue
        self._workers = workers
        self._decoder = None if loaded is None or loaded.table is None else make_decoder(loaded.table)
        self._texts = () if loaded is None else tuple(loaded.texts)
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
        """Starts the text process of a deployment.

        Args:
            deployment_id: Of the deployment.
            load: The files of its bundle; None if it has no tokenizer.
            forkserver: Where the process comes from, as do those that replace it.
            limits: What the process may take.
            workers: Threads for long text.

        Raises:
            TextError: See `TextProcess.start`.
        """
        if load is None:
            return cls(None, None, workers)
        start = partial(TextProcess.start, load, forkserver, limits)
        process = await start()
        return cls(TextQueue(deployment_id, process, start), process.loaded, workers)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the bundle has a tokenizer."""
        return self._queue is not None

    @property
    def num_restarts(self) -> int:
        """How often the text process was replaced."""
        return 0 if self._queue is None else self._queue.num_restarts

    @property
    def decodes_steps(self) -> bool:
        """Whether text of new tokens must be made by `decode_step`."""
        return self._queue is not None and self._decoder is None

    async def encode(self, prompt: Prompt) -> Sequence[int]:
        """Returns the token ids of a prompt that admission has checked.

        Raises:
            QueueFull, DeploymentNotReady, TextRefused, TextLimitExceeded, TextProcessLost: See `TextQueue.run`.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        assert self._queue is not None
        call = EncodeText(text=prompt.text) if isinstance(prompt, TextPrompt) else EncodeChat(prompt=prompt)
        answer = await self._queue.run(prompt_size(prompt), call, Encoded, _ENCODING)
        return unpack_ids(answer.token_ids)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of tokens. Bytes that form no character show as U+FFFD.

        Raises:
            QueueFull, DeploymentNotReady, TextLimitExceeded, TextProcessLost: See `TextQueue.run`.
        """
        num_ids = len(token_ids)
        if self._decoder is not None:
            decode = partial(self._decoder.decode, skip_special_tokens=skip_special_tokens)
            return await self._workers.run_if_large(num_ids, decode, token_ids)
        assert self._queue is not None
        call = Decode(token_ids=pack_ids(list(token_ids)), skip_special_tokens=skip_special_tokens)
        return (await self._queue.run(num_ids, call, Decoded, _DECODING)).text

    def sequence_text(self, stop_strings: Sequence[str]) -> SequenceText | PiecewiseText | NoText:
        """Makes the output text of a new sequence."""
        if self._decoder is not None:
            return SequenceText(self._decoder, stop_strings)
        return PiecewiseText(self._texts, stop_strings) if self.has_tokenizer else NoText()

    async def decode_step(self, new_tokens: Sequence[tuple[PiecewiseText, Sequence[int]]]) -> list[KilnError | None]:
        """Makes the text of the tokens that a step gives to sequences, all in one call.

        Args:
            new_tokens: Sequences, each with its new tokens.

        Returns:
            For each sequence the error that ends it; None if its text is there.
        """
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
        """Ends the process. Calling it again is harmless."""
        if self._queue is not None:
            await self._queue.close()

    async def _decode_alone(self, new_tokens: tuple[PiecewiseText, Sequence[int]]) -> KilnError | None:
        (error,) = await self.decode_step([new_tokens])
        return error
