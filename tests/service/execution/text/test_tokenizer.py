"""Tokenizer files of bundles."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from execution.text.detokenizer import REPLACEMENT
from execution.text.tokenizer import Tokenizer, read_special_tokens
from runtime_svc.text.codec import NoText, SequenceText
from tests.checkpoints.tokenizer_files import byte_fallback, byte_level


def save(tokenizer: tokenizers.Tokenizer, directory: Path) -> Tokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory / "tokenizer.json")


def test_special_tokens_are_added_and_left_out(tmp_path: Path) -> None:
    tokenizer = save(byte_level(), tmp_path)
    token_ids = tokenizer.encode("a cat", add_special_tokens=True)
    assert token_ids == [1, *tokenizer.encode("a cat", add_special_tokens=False)]
    assert tokenizer.decode(token_ids) == "a cat"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>a cat"
    assert tokenizer.encode("<s>a", add_special_tokens=False)[0] == 1, "rendered chats carry their special tokens"
    assert (tokenizer.token_of(2), tokenizer.token_of(10**6)) == ("</s>", None)


@pytest.mark.parametrize(
    ("template", "before", "behind"),
    [("<s> $A", [1], []), ("$A </s>", [], [2]), ("<s> <pad> $A </s> </s>", [1, 0], [2, 2]), ("$A", [], [])],
)
def test_what_is_added_to_a_text_is_known(tmp_path: Path, template: str, before: list[int], behind: list[int]) -> None:
    library = byte_level()
    special = [("<pad>", 0), ("<s>", 1), ("</s>", 2)]
    library.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer = save(library, tmp_path)
    assert tokenizer.list_surrounding() == (before, behind)
    for text in ("a cat", "a", " ", ""):
        bare = tokenizer.encode(text, add_special_tokens=False)
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))(text)["input_ids"]
        assert [*before, *bare, *behind] == theirs


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=9)
    tokenizer = save(library, tmp_path)
    assert len(tokenizer.encode("a", add_special_tokens=True)) == 2
    assert len(tokenizer.encode("zqzqzqzqzqzq", add_special_tokens=True)) > 9


def test_token_by_itself(tmp_path: Path) -> None:
    tokenizer = save(byte_level(), tmp_path)
    space_a = tokenizer.encode(" a", add_special_tokens=False)
    assert [tokenizer.token_text(one) for one in space_a] == [" a"]
    assert tokenizer.token_text(2) == ""
    assert all(tokenizer.token_text(one) == REPLACEMENT for one in tokenizer.encode("🙃", add_special_tokens=False))
    fallback = byte_fallback()
    tokenizer = save(fallback, tmp_path)
    assert tokenizer.token_text(fallback.token_to_id("▁a")) == " a", "a first space is not stripped from a lone token"
    assert tokenizer.token_text(fallback.token_to_id("a")) == "a"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"model": {"type": "Nonsense"}}'])
def test_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_encoding_a_long_text_lets_other_threads_run(tmp_path: Path) -> None:
    tokenizer = save(byte_level(), tmp_path)
    longest_s, stop = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest_s
        while not stop.is_set():
            # Processor time, which passes only while the text is encoded.
            start = time.process_time()
            time.sleep(0.001)
            longest_s = max(longest_s, time.process_time() - start)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.process_time()
    tokenizer.encode("Once upon a time there was " * 60_000, add_special_tokens=False)
    duration_s = time.process_time() - start
    stop.set()
    thread.join()
    assert duration_s > 0.2, "too short to prove anything"
    assert longest_s < duration_s / 2


def test_special_tokens_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        '{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "unk_token": null, '
        '"add_bos_token": true, "model_max_length": 5}'
    )
    assert read_special_tokens(path) == {"bos_token": "<s>", "eos_token": "</s>"}
    path.write_text("[]")
    with pytest.raises(ValueError, match="object"):
        read_special_tokens(path)


def test_sequence_text_joins_detokenizer_and_stop_strings(tmp_path: Path) -> None:
    tokenizer = save(byte_level(), tmp_path)
    text = SequenceText(tokenizer, ["🙂!"])
    out = "".join(text.push(one) for one in tokenizer.encode("cat 🙂", add_special_tokens=False))
    assert out == "cat "
    assert text.stop_string is None
    assert "".join(text.push(one) for one in tokenizer.encode("! dog", add_special_tokens=False)) == ""
    assert text.stop_string == "🙂!"
    assert text.flush() == ""


def test_unfinished_bytes_can_complete_a_stop_string(tmp_path: Path) -> None:
    tokenizer = save(byte_level(), tmp_path)
    text = SequenceText(tokenizer, [REPLACEMENT])
    for one in tokenizer.encode("a🙃", add_special_tokens=False)[:-1]:
        text.push(one)
    assert text.flush() == ""
    assert text.stop_string == REPLACEMENT


def test_bundle_without_tokenizer_has_no_text() -> None:
    text = NoText()
    assert (text.push(5), text.flush(), text.token_text(5), text.stop_string) == ("", "", "", None)
