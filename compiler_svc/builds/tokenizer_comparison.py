"""Compares the tokenizer that a runtime reads from a checkpoint's files with the one that transformers makes of them.

transformers reads more of the files, and classes of its own have defaults. Where both give equal ids and texts, the
checkpoint's files go into the bundle as they are. It writes others, and adds tokens that the model has no rows for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compiler_svc.builds.tokenizer_orders import Comparison, Made, NotMade
from compiler_svc.weights.tokenizer_sources import TOKENIZER_CONFIG, TOKENIZER_FILE
from execution.text.bundle_text import find_special_tokens
from execution.text.chat_template import ChatTemplate
from execution.text.control import Load
from execution.text.tokenizer import Tokenizer

#: Texts that every tokenizer spells as its reference does.
TEXTS: Final = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog, and no one has ever counted its 1234567890 steps.",
    "def add(left, right):\n    if left is None:\n\t\treturn right  # nothing to add\n    return left + right\n",
    "Ça coûte 3,50 €. Grüße aus Köln; Привет, мир! 你好，世界。 こんにちは 안녕하세요 مرحبا 🙂👩‍👩‍👧",
    "https://example.org/a_b?c=d&e=%20 <tag attribute='value'> {\"key\": [1, 2.5e-3, null]}",
)
#: Texts that begin as few do: transformers spells them otherwise than sentencepiece in some of its versions.
RARE_TEXTS: Final = (" one space before", "  two spaces before", "\u2581underlined", "ends with a space ")
#: What is compared besides: characters that normal forms change, runs, and chats with tools in the usual spellings.
_MORE_TEXTS: Final = (
    "",
    " ",
    "\n\n\tlines\r\n  and   runs\x00",
    "e\u0301 \ufb01 \u2460 \u200b\u00a0\ufeff I'll we'VE 3.14 10000 __init__ ...",
    "a" * 100,
    "<|im_start|>user\nWeather in Paris?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n<tool_response>\n7 °C',
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|python_tag|>call()<|eom_id|>",
    '<s>[INST] Hi [/INST] Hello!</s>[AVAILABLE_TOOLS] [{"type": "function"}][/AVAILABLE_TOOLS][TOOL_CALLS]',
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<eos><pad><unk>[UNK][CLS][SEP]",
    "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n<|endoftext|></s>",
)
#: Sequences of ids at random, whose texts are compared, and the length of each.
_NUM_RANDOM: Final = 32
_MAX_DETAIL_CHARACTERS: Final = 300
_MAX_SHOWN_CHARACTERS: Final = 80
#: What errors show of two sequences before the place where they part.
_NUM_SHOWN_BEFORE: Final = 3
#: How protobuf and the system say that an allocation is refused.
_OUT_OF_MEMORY: Final = ("alloc failed", "bad_alloc", "out of memory")
_BOTH: Final = f"{TOKENIZER_FILE} and {TOKENIZER_CONFIG}"


def compare(given: Comparison) -> Made | NotMade:
    """Compares both tokenizers; if they differ, gives the files that make a runtime read that of transformers."""
    kept = Made({}, ())
    try:
        own = Reading.of(given.load)
        if not own.tokenizer.max_token_bytes:
            # It makes no token of any text.
            return kept
        return _follow(given, own, _make_reference(given.directory)) or kept
    # transformers may raise anything; panics of tokenizers' library are no Exception.
    except BaseException as error:  # noqa: BLE001 - as above
        raise_memory_error(error)
        reason = describe_error(error, str(given.directory))
        return Made({}, (f"{TOKENIZER_FILE}: transformers makes no tokenizer of it ({reason}), so {_BOTH} decide",))


def _make_reference(directory: Path) -> PreTrainedTokenizerFast:
    reference = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if not isinstance(reference, PreTrainedTokenizerFast):
        raise TypeError(f"{type(reference).__name__} has no form in {TOKENIZER_FILE}")
    return reference


def _follow(given: Comparison, own: Reading, reference: PreTrainedTokenizerFast) -> Made | NotMade | None:
    # Comparing changes what is written.
    written = _write_tokenizer(own, reference, given.vocab_size)
    in_text = own.find_text_difference(reference, given.vocab_size)
    difference = in_text or own.find_token_difference(reference, given.vocab_size)
    if difference is None:
        return None
    name = f"{type(reference).__name__} of transformers {transformers.__version__}"
    files = {TOKENIZER_FILE: written} if in_text is not None else {}
    if own.special_tokens != own.list_special_tokens(reference, given.vocab_size):
        files[TOKENIZER_CONFIG] = own.write_config(reference, given.vocab_size)
    supplied = Reading.of(write_files(given.load, files, given.directory))
    left = supplied.find_text_difference(reference, given.vocab_size)
    left = left or supplied.find_token_difference(reference, given.vocab_size)
    if left is not None:
        detail = f"{name} does what no {TOKENIZER_FILE} says: {left}"
        return NotMade(TOKENIZER_FILE, detail, "a tokenizer of which it makes an equal one")
    return Made(files, (f"{', '.join(files)}: the bundle has those of {name}; with the checkpoint's, {difference}",))


@dataclass(frozen=True)
class Reading:
    """A tokenizer as a runtime reads it.

    Attributes:
        special_tokens: What chat templates get, by name.
        token_names: Names that the templates use.
        config: `tokenizer_config.json`.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    token_names: frozenset[str]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, load: Load) -> Self:
        """Reads the files of a `Load`; raises ValueError or ChatTemplateError if a runtime could not read one."""
        tokenizer = Tokenizer(Path(load.tokenizer))
        templates = [ChatTemplate(source, {}) for source in load.chat_templates.values()]
        return cls(
            tokenizer=tokenizer,
            special_tokens=find_special_tokens(load, tokenizer),
            token_names=frozenset(chain.from_iterable(template.token_names for template in templates)),
            config=json.loads(Path(load.tokenizer_config).read_bytes()) if load.tokenizer_config else {},
        )

    def find_text_difference(self, reference: PreTrainedTokenizerFast, num_rows: int) -> str | None:
        """Describes the first text, or sequence of ids, of which both make something else; None if there is none.

        Ids beyond the model's rows fit nothing, so texts that have them in the reference do not count.
        """
        added = dict.fromkeys(chain(self.tokenizer.list_added(), reference.get_added_vocab()))
        plain = (*TEXTS, *RARE_TEXTS, *_MORE_TEXTS)
        around = [form for token in added for form in (f"a{token} b", f" {token}{token}\n")]
        sequences = []
        for texts, add_special_tokens in ((around, False), (plain, True), (plain, False)):
            if not texts:
                continue
            encoded = reference(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
            for text, theirs in zip(texts, encoded, strict=True):
                if any(token_id >= num_rows for token_id in theirs):
                    continue
                ours = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
                if ours != theirs:
                    return f"{_cut(repr(text))} has the ids {_contrast(ours, theirs)}"
                sequences.append(theirs)
        return self._find_decoded_difference(reference, [*sequences, *_draw_sequences(num_rows)])

    def _find_decoded_difference(
        self, reference: PreTrainedTokenizerFast, sequences: Sequence[list[int]]
    ) -> str | None:
        for ids in sequences:
            for skips in (True, False):
                ours = self.tokenizer.decode(ids, skip_special_tokens=skips)
                theirs = reference.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
                if ours != theirs:
                    special = "without" if skips else "with"
                    return f"{_cut(str(ids))} have the text {_contrast(ours, theirs)}, {special} special tokens"
        return None

    def find_token_difference(self, reference: PreTrainedTokenizerFast, num_rows: int) -> str | None:
        """Describes the first special token that a chat template uses and gets otherwise; None if there is none."""
        theirs = self.list_special_tokens(reference, num_rows)
        for name in sorted(self.token_names):
            if self.special_tokens.get(name) != theirs.get(name):
                ours, token = self.special_tokens.get(name, ""), theirs.get(name, "")
                return f"chat templates get the {name} {_cut(repr(ours))}, not {_cut(repr(token))}"
        return None

    def write_config(self, reference: PreTrainedTokenizerFast, num_rows: int) -> bytes:
        """Writes `tokenizer_config.json` with the special tokens of the reference."""
        others = {name: value for name, value in self.config.items() if name not in self.special_tokens}
        tokens = self.list_special_tokens(reference, num_rows)
        return json.dumps(others | tokens, ensure_ascii=False, indent=2).encode()

    def list_special_tokens(self, reference: PreTrainedTokenizerFast, num_rows: int) -> dict[str, str]:
        """The reference's special tokens by name, or ours where the model has no row for its."""
        tokens = reference.special_tokens_map
        beyond = {name for name, text in tokens.items() if reference.convert_tokens_to_ids(text) >= num_rows}
        ours = {name: text for name, text in self.special_tokens.items() if name in beyond}
        return {name: text for name, text in tokens.items() if name not in beyond} | ours


def write_files(load: Load, files: Mapping[str, bytes], directory: Path) -> Load:
    """Writes files into a new folder, and describes them with those that the load has already."""
    made = directory / "made"
    made.mkdir()
    for name, data in files.items():
        (made / name).write_bytes(data)
    changed = {TOKENIZER_FILE: "tokenizer", TOKENIZER_CONFIG: "tokenizer_config"}
    return msgspec.structs.replace(load, **{changed[name]: str(made / name) for name in files})


def _write_tokenizer(own: Reading, reference: PreTrainedTokenizerFast, num_rows: int) -> bytes:
    """Writes the reference's `tokenizer.json`, without tokens that it adds beyond the model's rows."""
    written = str(reference.backend_tokenizer.to_str())
    known = set(own.tokenizer.list_added())
    beyond = {token for token, token_id in reference.get_added_vocab().items() if token_id >= num_rows} - known
    if beyond:
        document = json.loads(written)
        document["added_tokens"] = [one for one in document["added_tokens"] if one["content"] not in beyond]
        written = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return written.encode()


def _draw_sequences(num_rows: int) -> Iterator[list[int]]:
    chosen = random.Random(0)
    for _ in range(_NUM_RANDOM):
        yield [chosen.randrange(num_rows) for _ in range(_NUM_RANDOM)]


def raise_memory_error(error: BaseException) -> None:
    """Raises MemoryError in place of what libraries raise if an allocation is refused."""
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        raise MemoryError from error


def describe_error(error: BaseException, scratch: str = "") -> str:
    """Names an error and the first line of what it says, in which `scratch`, a path, becomes a word."""
    text = str(error).replace(scratch, "directory") if scratch else str(error)
    lines = text.splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_MAX_DETAIL_CHARACTERS]


def _contrast(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Shows two different sequences of one kind from shortly before they part."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    parting = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    start = max(0, parting - _NUM_SHOWN_BEFORE)
    before = "…" if start else ""
    return f"{before}{_cut(repr(ours[start:]))}, not {before}{_cut(repr(theirs[start:]))}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"
