"""The process that makes a `tokenizer.json` of the other forms in which checkpoints keep a tokenizer.

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
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from bundle.host.confinement import TEXT, confine, measure_data
from compiler_svc.weights.tokenizer_sources import BYTE_LEVEL, SENTENCEPIECE, TOKENIZER_CONFIG, TOKENIZER_FILE
from execution.forkserver.task import decode, serve_order

#: The class of transformers that takes a sentencepiece model as it is, without a space before the first word.
_PLAIN_CLASS: Final = PreTrainedTokenizerFast.__name__
_BPE: Final = "BPE"
_MODEL_TYPES: Final = ("UNIGRAM", _BPE)
_MAX_DETAIL_CHARACTERS: Final = 300
#: How protobuf and the system say that an allocation is refused.
_OUT_OF_MEMORY: Final = ("alloc failed", "bad_alloc", "out of memory")

#: Texts that every conversion spells as the source does.
_TEXTS: Final = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog, and no one has ever counted its 1234567890 steps.",
    "def add(left, right):\n    if left is None:\n\t\treturn right  # nothing to add\n    return left + right\n",
    "Ça coûte 3,50 €. Grüße aus Köln; Привет, мир! 你好，世界。 こんにちは 안녕하세요 مرحبا 🙂👩‍👩‍👧",
    "https://example.org/a_b?c=d&e=%20 <tag attribute='value'> {\"key\": [1, 2.5e-3, null]}",
)
#: Texts that begin as few do: transformers spells them otherwise than sentencepiece in some of its versions.
_RARE_TEXTS: Final = (" one space before", "  two spaces before", "\u2581underlined", "ends with a space ")


class Converted(msgspec.Struct, frozen=True, tag=True):
    """What a conversion gives."""

    tokenizer: bytes
    warnings: tuple[str, ...]


class NotConverted(msgspec.Struct, frozen=True, tag=True):
    """Why there is no conversion: the file, what is wrong with it, and what would be accepted."""

    file: str
    detail: str
    accepted: str


class OutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """That the conversion needed more memory than it may take."""


Answer = Converted | NotConverted | OutOfMemory


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """What to convert: `directory` holds the tokenizer's files and `config.json`, and nothing else."""

    kind: str
    directory: Path
    classes: tuple[str, ...]


class _UnconvertibleError(Exception):
    def __init__(self, file: str, detail: str, accepted: str) -> None:
        super().__init__(detail)
        self.answer = NotConverted(file, detail, accepted)


def convert_files(max_memory_bytes: int, order_fd: int, answer_fd: int) -> None:
    """Converts a tokenizer: the order is a `Conversion`, the answer an `Answer`. The limit is on memory that the
    process may take beyond what it begins with.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    confine(msgspec.structs.replace(TEXT, data_bytes=measure_data() + max_memory_bytes))

    serve_order(order_fd, answer_fd, lambda order: convert(decode(order, Conversion)))


def convert(given: Conversion) -> Answer:
    """Converts a tokenizer, without limits."""
    convert_kind = {SENTENCEPIECE.kind: _convert_sentencepiece, BYTE_LEVEL.kind: _convert_byte_level}[given.kind]
    try:
        return convert_kind(given.directory, _list_classes(given.directory, given.classes))
    except _UnconvertibleError as error:
        return error.answer
    except MemoryError:
        return OutOfMemory()


def _convert_sentencepiece(directory: Path, classes: Sequence[str]) -> Converted:
    (file,) = SENTENCEPIECE.files
    accepted = f"a sentencepiece model of kind {' or '.join(_MODEL_TYPES)}, or a {TOKENIZER_FILE} beside it"
    data = (directory / file).read_bytes()
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(data)
        reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    except Exception as error:
        _raise_memory_error(error)
        raise _UnconvertibleError(file, f"no sentencepiece model ({_describe(error)})", accepted) from error
    if not model.pieces:
        raise _UnconvertibleError(file, "no sentencepiece model (it has no pieces)", accepted)
    model_type = model.trainer_spec.ModelType.Name(model.trainer_spec.model_type)
    if model_type not in _MODEL_TYPES:
        raise _UnconvertibleError(file, f"a sentencepiece model of kind {model_type}", accepted)

    def find_fault(tokenizer: PreTrainedTokenizerFast) -> str | None:
        if len(tokenizer) < len(model.pieces):
            return f"has {len(tokenizer)} tokens, the file {len(model.pieces)}"
        text = next(_list_differences(tokenizer, reference, _TEXTS), None)
        return None if text is None else f"spells {text!r} otherwise than sentencepiece"

    tokenizer = _choose_tokenizer(directory, file, [*classes, _PLAIN_CLASS], find_fault, accepted)
    warnings = []
    if differences := list(_list_differences(tokenizer, reference, _RARE_TEXTS)):
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
    return Converted(_write(tokenizer), tuple(warnings))


def _convert_byte_level(directory: Path, classes: Sequence[str]) -> Converted:
    file, merges = BYTE_LEVEL.files
    accepted = f"a vocabulary and merges of byte-level BPE, as GPT-2 has, or a {TOKENIZER_FILE} beside them"
    vocabulary = _read_object(directory / file)
    if not vocabulary or not all(isinstance(token_id, int) for token_id in vocabulary.values()):
        raise _UnconvertibleError(file, "no JSON object of token ids", accepted)

    def find_fault(tokenizer: PreTrainedTokenizerFast) -> str | None:
        vocab = tokenizer.get_vocab()
        if any(vocab.get(token) != token_id for token, token_id in vocabulary.items()):
            return f"gives other ids than {file}"
        for text in _TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if tokenizer.decode(ids, clean_up_tokenization_spaces=False).removeprefix(" ") != text:
                return f"loses characters of {text!r}"
        return None

    tokenizer = _choose_tokenizer(directory, f"{file}, {merges}", classes, find_fault, accepted)
    return Converted(_write(tokenizer), ())


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
            _raise_memory_error(error)
            fault = f"cannot read it ({_describe(error)})"
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


def _write(tokenizer: PreTrainedTokenizerFast) -> bytes:
    return str(tokenizer.backend_tokenizer.to_str()).encode()


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one if the file holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _raise_memory_error(error: BaseException) -> None:
    """Raises MemoryError in place of what libraries raise if an allocation is refused."""
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        raise MemoryError from error


def _describe(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_MAX_DETAIL_CHARACTERS]
