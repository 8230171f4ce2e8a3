"""The stage that tries a checkpoint's tokenizer and chat template, before anything is compiled for it.

A bundle whose text does not load is worth nothing, and a runtime would find that out only when it loads it. They run as
in a runtime: in a text process, within the same limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bundle.manifest import Tokens
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.tokenizer_sources import TOKENIZER_CONFIG, TOKENIZER_FILE, has_tokenizer_file
from execution.forkserver.client import ForkserverClient
from execution.text.control import EncodeChat, Encoded, EncodeText, Load
from execution.text.errors import TextInvalid, TextLimitExceeded, TextRefused
from execution.text.handle import TextLimits, TextProcess
from execution.text.prompt import ChatMessage, ChatPrompt

_CHAT_TEMPLATE: Final = "chat template"
#: Regular expressions that backtrack do so over runs of one character.
_PROBE: Final = "Hello, world! 1 + 1 = 2. 你好 🙂\n" + "".join(character * 64 for character in "aA1 .-=_\n你")
_TURNS: Final = (ChatMessage("user", "Hello"), ChatMessage("assistant", "Hi."), ChatMessage("user", "1 + 1?"))
_CHATS: Final = (ChatPrompt(_TURNS[:1]), ChatPrompt(_TURNS))


def check_text(
    checkpoint: Checkpoint, tokens: Tokens, forkserver: ForkserverClient, limits: TextLimits | None = None
) -> tuple[str, ...]:
    """Loads a checkpoint's tokenizer and chat templates, makes tokens of a probe and renders two chats by each.

    Returns warnings: a template may refuse a chat and take others. None for `limits` is what a process may take in a
    runtime.
    """
    if not has_tokenizer_file(checkpoint):
        return ()
    load = describe_text(checkpoint, tokens)
    chats = [replace(chat, template=name) for name in checkpoint.chat_templates for chat in _CHATS]
    try:
        return asyncio.run(_try(load, chats, forkserver, limits or TextLimits()))
    except TextInvalid as error:
        raise CheckpointInvalid(checkpoint.path, error.subject, error.detail, "what can be read") from error
    except TextRefused as error:
        subject = _CHAT_TEMPLATE if error.is_unbounded else TOKENIZER_FILE
        raise CheckpointInvalid(checkpoint.path, subject, error.detail, "what takes any text") from error
    except TextLimitExceeded as error:
        subject = f"{TOKENIZER_FILE}, {_CHAT_TEMPLATE}"
        value = f"{error.work} took more than {error.limit}"
        raise CheckpointInvalid(checkpoint.path, subject, value, "what ends within the limits of a runtime") from error


def describe_text(checkpoint: Checkpoint, tokens: Tokens) -> Load:
    """Describes a checkpoint's files as a runtime loads them; a `tokenizer.json` that it has not comes later."""
    files = {file.name: file for file in checkpoint.tokenizer_files}
    return Load.of(
        files.get(TOKENIZER_FILE, checkpoint.path / TOKENIZER_FILE),
        files.get(TOKENIZER_CONFIG),
        chat_templates=checkpoint.chat_templates,
        tokens=tokens,
    )


async def _try(
    load: Load, chats: Sequence[ChatPrompt], forkserver: ForkserverClient, limits: TextLimits
) -> tuple[str, ...]:
    process = await TextProcess.start(load, forkserver, limits)
    warnings = []
    one_of_one = len({chat.template for chat in chats}) == 1
    try:
        await process.call(EncodeText(text=_PROBE), Encoded, "making tokens of a probe")
        for chat in chats:
            try:
                await process.call(EncodeChat(prompt=chat), Encoded, "rendering a chat")
            except TextRefused as error:
                if error.is_unbounded:
                    raise
                count = len(chat.messages)
                template = "the chat template" + ("" if one_of_one else f" {chat.template!r}")
                warnings.append(f"{template} refuses a chat of {count} turns that users have: {error.detail}")
    finally:
        await process.close()
    return tuple(warnings)
