"""The process that makes a `tokenizer.json` of the other forms in which checkpoints keep a tokenizer, or compares one.

It reads what strangers have written with libraries of C++ and Rust, so it has the limits of a text process, and its
parent reads its answer as data. transformers converts. It picks the tokenizer's class by the model's type, and for some
types that class reads a sentencepiece model without its normalization, so that a conversion must spell texts as
sentencepiece itself does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from bundle.host.confinement import TEXT, confine, measure_data
from compiler_svc.builds.tokenizer_comparison import (
    RARE_TEXTS,
    TEXTS,
    Reading,
    compare,
    describe_error,
    raise_memory_error,
    write_files,
)
from compiler_svc.builds.tokenizer_orders import Answer, Comparison, Conversion, Made, NotMade, Order, OutOfMemory
from compiler_svc.weights.tokenizer_sources import BYTE_LEVEL, GGUF, SENTENCEPIECE, TOKENIZER_CONFIG, TOKENIZER_FILE
from execution.forkserver.task import decode, serve_order
from execution.text.chat_template import ChatTemplateError

#: The class of transformers that takes a sentencepiece model as it is, without a space before the first word.
_PLAIN_CLASS: Final = PreTrainedTokenizerFast.__name__
_BPE: Final = "BPE"
#: Names in GGUF files of the plain way to split words, which is that of transformers where it knows no other.
_PLAIN_SPLITS: Final = ("gpt-2",)
_MODEL_TYPES: Final = ("UNIGRAM", _BPE)

#: What a conversion gives: the tokenizer, and warnings.
_Tokenizer = tuple[PreTrainedTokenizerFast, tuple[str, ...]]


class _UnconvertibleError(Exception):
    def __init__(self, file: str, detail: str, accepted: str) -> None:
        super().__init__(detail)
        self.answer = NotMade(file, detail, accepted)


def answer_order(max_memory_bytes: int, order_fd: int, answer_fd: int) -> None:
    """Does one `Order`, and leaves an `Answer`. The limit is on memory that the process may take beyond what it begins
    with.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    confine(msgspec.structs.replace(TEXT, data_bytes=measure_data() + max_memory_bytes))

    serve_order(order_fd, answer_fd, lambda order: _answer(decode(order, Order)))  # type: ignore[arg-type]


def _answer(order: Order) -> Answer:
    try:
        return compare(order) if isinstance(order, Comparison) else convert(order)
    except MemoryError:
        return OutOfMemory()


def convert(given: Conversion) -> Made | NotMade:
    """Converts a tokenizer. Where its class knows other special tokens than a runtime reads, templates get these."""
    try:
        tokenizer, warnings = _CONVERTERS[given.kind](given.directory, _list_classes(given.directory, given.classes))
    except _UnconvertibleError as error:
        return error.answer
    files = {TOKENIZER_FILE: str(tokenizer.backend_tokenizer.to_str()).encode()}
    try:
        reading = Reading.of(write_files(given.load, files, given.directory))
    except (ChatTemplateError, ValueError):
        # The stage that tries texts says what is wrong with a template.
        return Made(files, warnings)
    if (difference := reading.find_token_difference(tokenizer, given.vocab_size)) is not None:
        files[TOKENIZER_CONFIG] = reading.write_config(tokenizer, given.vocab_size)
        if given.kind == GGUF.kind:  # it has no such file
            return Made(files, warnings)
        made_by = f"the bundle has that of {type(tokenizer).__name__} of transformers"
        warnings = (*warnings, f"{TOKENIZER_CONFIG}: {made_by}; with the checkpoint's, {difference}")
    return Made(files, warnings)


def _convert_sentencepiece(directory: Path, classes: Sequence[str]) -> _Tokenizer:
    (file,) = SENTENCEPIECE.files
    accepted = f"a sentencepiece model of kind {' or '.join(_MODEL_TYPES)}, or a {TOKENIZER_FILE} beside it"
    data = (directory / file).read_bytes()
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(data)
        reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    except Exception as error:
        raise_memory_error(error)
        raise _UnconvertibleError(file, f"no sentencepiece model ({describe_error(error)})", accepted) from error
    if not model.pieces:
        raise _UnconvertibleError(file, "no sentencepiece model (it has no pieces)", accepted)
    model_type = model.trainer_spec.ModelType.Name(model.trainer_spec.model_type)
    if model_type not in _MODEL_TYPES:
        raise _UnconvertibleError(file, f"a sentencepiece model of kind {model_type}", accepted)

    def find_fault(tokenizer: PreTrainedTokenizerFast) -> str | None:
        if len(tokenizer) < len(model.pieces):
            return f"has {len(tokenizer)} tokens, the file {len(model.pieces)}"
        text = next(_list_differences(tokenizer, reference, TEXTS), None)
        return None if text is None else f"spells {text!r} otherwise than sentencepiece"

    tokenizer = _choose_tokenizer(directory, file, [*classes, _PLAIN_CLASS], find_fault, accepted)
    warnings = []
    if differences := list(_list_differences(tokenizer, reference, RARE_TEXTS)):
        warnings.append(
            f"{file}: {type(tokenizer).__name__} of transformers, which converts it, spells texts such as "
            f"{differences[0]!r} otherwise than sentencepiece"
        )
    adds_none = not tokenizer.num_special_tokens_to_add()
    if adds_none and "add_bos_token" not in _read_object(directory / TOKENIZER_CONFIG):
        warnings.append(
            f"{file}: {TOKENIZER_CONFIG} does not say add_bos_token, so prompts begin without such a token, as with "
            "transformers"
        )
    return tokenizer, tuple(warnings)


def _convert_byte_level(directory: Path, classes: Sequence[str]) -> _Tokenizer:
    file, merges = BYTE_LEVEL.files
    accepted = f"a vocabulary and merges of byte-level BPE, as GPT-2 has, or a {TOKENIZER_FILE} beside them"
    vocabulary = _read_object(directory / file)
    if not vocabulary or not all(isinstance(token_id, int) for token_id in vocabulary.values()):
        raise _UnconvertibleError(file, "no JSON object of token ids", accepted)

    def find_fault(tokenizer: PreTrainedTokenizerFast) -> str | None:
        vocab = tokenizer.get_vocab()
        if any(vocab.get(token) != token_id for token, token_id in vocabulary.items()):
            return f"gives other ids than {file}"
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if tokenizer.decode(ids, clean_up_tokenization_spaces=False).removeprefix(" ") != text:
                return f"loses characters of {text!r}"
        return None

    tokenizer = _choose_tokenizer(directory, f"{file}, {merges}", classes, find_fault, accepted)
    return tokenizer, ()


def _convert_gguf(directory: Path, _: Sequence[str]) -> _Tokenizer:
    (file,) = GGUF.files
    try:
        architecture, vocabulary, config = get_gguf_tokenizer(str(directory / file))
        tokenizer, options = convert_gguf_tokenizer(architecture, vocabulary)
        converted = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **config | options)
    # As of other conversions.
    except BaseException as error:
        raise_memory_error(error)
        detail = f"a vocabulary that transformers does not convert ({describe_error(error)})"
        accepted = "a vocabulary of byte-level BPE or sentencepiece"
        raise _UnconvertibleError("tokenizer.ggml", detail, accepted) from error
    split = vocabulary.get("pre_tokenizer_type")
    if "scores" in vocabulary or split in {*GGUF_PRE_TOKENIZER_SPLITS, *_PLAIN_SPLITS}:
        return converted, ()
    return converted, (f"tokenizer.ggml.pre: transformers does not know {split!r}, and splits words in a plain way",)


def _choose_tokenizer(
    directory: Path,
    file: str,
    classes: Sequence[str],
    find_fault: Callable[[PreTrainedTokenizerFast], str | None],
    accepted: str,
) -> PreTrainedTokenizerFast:
    """Converts with the first class that does it well: `find_fault` says what is wrong with a conversion."""
    faults = {}
    for name in dict.fromkeys(classes):
        try:
            tokenizer = tokenizer_class_from_name(name).from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            fault = find_fault(tokenizer)
        # transformers may raise anything; panics of tokenizers' library are no Exception.
        except BaseException as error:  # noqa: BLE001 - as above
            raise_memory_error(error)
            fault = f"cannot read it ({describe_error(error)})"
        if fault is None:
            return tokenizer
        faults[name] = fault
    details = (
        "; ".join(f"{name} {fault}" for name, fault in faults.items()) or f"no class is known ({TOKENIZER_CONFIG})"
    )
    raise _UnconvertibleError(file, f"what transformers does not convert: {details}", accepted)


def _list_classes(directory: Path, of_family: Sequence[str]) -> list[str]:
    """Names of tokenizer classes that transformers has: the declared one, those of the family, that of the type."""
    model_type = _read_object(directory / "config.json").get("model_type")
    declared = _read_object(directory / TOKENIZER_CONFIG).get("tokenizer_class")
    mapped = TOKENIZER_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    names = [name for name in (declared, *of_family, mapped) if isinstance(name, str)]
    return [name for name in names if _is_convertible(tokenizer_class_from_name(name))]


def _is_convertible(tokenizer_class: Any) -> bool:
    return isinstance(tokenizer_class, type) and issubclass(tokenizer_class, PreTrainedTokenizerFast)


def _list_differences(tokenizer: PreTrainedTokenizerFast, reference: Any, texts: tuple[str, ...]) -> Iterator[str]:
    for text in texts:
        if tokenizer.encode(text, add_special_tokens=False) != reference.encode(text):
            yield text


_CONVERTERS: Final = {
    SENTENCEPIECE.kind: _convert_sentencepiece,
    BYTE_LEVEL.kind: _convert_byte_level,
    GGUF.kind: _convert_gguf,
}


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one if the file holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
