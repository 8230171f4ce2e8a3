"""The main function of a text process.

The process answers one call after another, and ends when its parent ends, hangs up or kills it. What strangers have
written runs in it, so it trusts nothing that it computes: its parent reads answers, never code.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from typing import Final

import msgspec

from bundle.host.confinement import TEXT, confine, measure_data
from execution.forkserver.worker import Channel, ProgressSink, serve_calls
from execution.text.bundle_text import BundleText
from execution.text.chat_template import ChatTemplateError, ChatTemplateUnbounded
from execution.text.control import (
    Answer,
    CallFormFound,
    CompileConstraint,
    Compiled,
    Decode,
    Decoded,
    DecodedStep,
    DecodeStep,
    EncodeChat,
    Encoded,
    EncodeText,
    FindCallForm,
    Follow,
    Followed,
    Load,
    Loaded,
    OutOfMemory,
    Refused,
    Unreadable,
    Work,
    decode_load,
    decode_work,
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
    """Serves one parent until it hangs up. Takes at most `max_memory_bytes` beyond what the process begins with."""
    # Threads would hide what a call costs.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Data memory is what allocations take; the address space would count what the forkserver has mapped, too.
    confine(msgspec.structs.replace(TEXT, data_bytes=measure_data() + max_memory_bytes))
    with Channel(control_fd) as control:
        text, answer = _load(control.receive(decode_load))
        control.send(answer)
        if text is not None:
            serve_calls(control, decode_work, partial(_answer, text))


def _load(load: Load) -> tuple[BundleText | None, Answer]:
    try:
        text = BundleText.load(load)
        tokenizer = text.tokenizer
        if text.matchers is not None:
            return text, Loaded(max_token_bytes=0, table=None, texts=[])
        table = tokenizer.make_table()
        texts = [] if table is not None else tokenizer.list_texts()
        return text, Loaded(
            max_token_bytes=tokenizer.max_token_bytes, table=table, texts=texts, added=tokenizer.list_surrounding()
        )
    except ChatTemplateError as error:
        return None, Unreadable(subject="chat template", detail=str(error))
    except MemoryError:
        return None, OutOfMemory()
    # Panics of the tokenizer's library are no Exception.
    except BaseException as error:  # noqa: BLE001 - as above
        return None, Unreadable(subject="tokenizer", detail=_describe(error))


def _answer(text: BundleText, work: Work, _report: ProgressSink) -> Answer:
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
        case CompileConstraint(constraint=constraint) if text.matchers is not None:
            return Compiled(mask=text.matchers.compile(constraint))
        case Follow(sequences=sequences, ended=ended) if text.matchers is not None:
            text.matchers.forget(ended)
            return Followed(sequences=[text.matchers.follow(one) for one in sequences])
        case EncodeText() | EncodeChat():
            ids = text.encode_text(work.text) if isinstance(work, EncodeText) else text.encode_chat(work.prompt)
            return Encoded(token_ids=pack_ids(ids))
        case FindCallForm(template=template):
            return CallFormFound(form=text.find_call_form(template))
        case Decode(token_ids=packed, skip_special_tokens=skip):
            return Decoded(text=text.tokenizer.decode(unpack_ids(packed).tolist(), skip_special_tokens=skip))
        case DecodeStep(sequences=sequences):
            return DecodedStep(sequences=[text.detokenize(one) for one in sequences])
    raise ValueError("this process is for constraints alone, or for all else")


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
