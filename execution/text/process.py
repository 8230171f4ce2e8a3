"""The main function of a text process.

The process answers one call after another, and ends when its parent ends, hangs up or kills it. What strangers have
written runs in it, so it trusts nothing that it computes: its parent reads answers, never code.
"""

from __future__ import annotations

import os
import re
import resource
import socket
from importlib import import_module
from pathlib import Path
from typing import IO, Final

from execution.text.bundle_text import BundleText
from execution.text.chat_template import ChatTemplateError, ChatTemplateUnbounded
from execution.text.control import (
    LENGTH,
    Answer,
    Call,
    Decode,
    Decoded,
    DecodedStep,
    DecodeStep,
    EncodeChat,
    Encoded,
    EncodeText,
    Load,
    Loaded,
    OutOfMemory,
    Refused,
    Unreadable,
    Work,
    decode_call,
    encode,
    pack_ids,
    unpack_ids,
)

#: Modules that Jinja imports at the first error of a template.
_LOADED: Final = ("jinja2.debug",)


def preload() -> None:
    """Imports what text processes need. Importing this module did the rest."""
    for module in _LOADED:
        import_module(module)


def serve_parent(max_memory_bytes: int, control_fd: int) -> None:
    """Serves one parent until it hangs up.

    Args:
        max_memory_bytes: Memory that the process may take beyond what it begins with.
        control_fd: Socket of the calls.
    """
    # Threads would hide what a call costs.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _limit_memory(max_memory_bytes)
    with (
        socket.socket(fileno=control_fd) as control,
        control.makefile("rb") as calls,
        control.makefile("wb") as answers,
    ):
        text: BundleText | None = None
        while (call := _receive(calls)) is not None:
            if isinstance(call, Load):
                text, answer = _load(call)
            else:
                assert text is not None, "a parent loads first"
                answer = _answer(text, call)
            packet = encode(answer)
            answers.write(LENGTH.pack(len(packet)))
            answers.write(packet)
            answers.flush()


def _limit_memory(max_memory_bytes: int) -> None:
    # Data memory is what allocations take; the address space would count what the forkserver has mapped, too.
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    limit = max_memory_bytes + (1024 * int(found[1]) if found else 0)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _receive(calls: IO[bytes]) -> Call | None:
    """Returns the next call; None once the parent has hung up."""
    header = calls.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    return decode_call(calls.read(size))


def _load(load: Load) -> tuple[BundleText | None, Answer]:
    try:
        text = BundleText.load(load)
        tokenizer = text.tokenizer
        table = tokenizer.make_table()
        texts = [] if table is not None else tokenizer.list_texts()
        return text, Loaded(max_token_bytes=tokenizer.max_token_bytes, table=table, texts=texts)
    except ChatTemplateError as error:
        return None, Unreadable(subject="chat template", detail=str(error))
    except MemoryError:
        return None, OutOfMemory()
    # Panics of the tokenizer's library are no Exception.
    except BaseException as error:  # noqa: BLE001 - as above
        return None, Unreadable(subject="tokenizer", detail=_describe(error))


def _answer(text: BundleText, work: Work) -> Answer:
    try:
        return _do(text, work)
    except ChatTemplateError as error:
        return Refused(detail=str(error), is_unbounded=isinstance(error, ChatTemplateUnbounded))
    except MemoryError:
        return OutOfMemory()
    # Goes to the client alone: a log must not hold what prompts say.
    except BaseException as error:  # noqa: BLE001 - as above
        return Refused(detail=_describe(error))


def _do(text: BundleText, work: Work) -> Answer:
    match work:
        case EncodeText(text=prompt):
            return Encoded(token_ids=pack_ids(text.encode_text(prompt)))
        case EncodeChat(prompt=chat):
            return Encoded(token_ids=pack_ids(text.encode_chat(chat)))
        case Decode(token_ids=packed, skip_special_tokens=skip):
            return Decoded(text=text.tokenizer.decode(unpack_ids(packed).tolist(), skip_special_tokens=skip))
        case DecodeStep(sequences=sequences):
            return DecodedStep(sequences=[text.detokenize(one) for one in sequences])


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
