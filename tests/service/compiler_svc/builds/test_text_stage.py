"""Which tokenizers and chat templates a build refuses, in a text process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tokenizers

from bundle.manifest import Tokens
from compiler_svc.builds.text_stage import check_text
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from execution.forkserver.client import Forkserver
from execution.text.handle import TextLimits, make_forkserver
from tests.checkpoints.tokenizer_files import byte_level

LIMITS = TextLimits(timeout_s=1.0, max_memory_bytes=300 << 20)
TOKENS = Tokens(vocab_size=512, bos=1, eos=(2,), pad=0)
TOKENIZER = byte_level().to_str()
TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message.content }}{% endfor %}"


Check = Callable[..., tuple[str, ...]]


@pytest.fixture(scope="module")
def texts() -> Iterator[Forkserver]:
    with closing(make_forkserver()) as forkserver:
        yield forkserver


@pytest.fixture
def check(home: Path, texts: Forkserver) -> Check:
    """Checks the checkpoint, with a tokenizer and a template unless they stay as they are."""

    def check(template: str = TEMPLATE, tokenizer: str = TOKENIZER) -> tuple[str, ...]:
        model = home / "models/tiny"
        (model / "tokenizer.json").write_text(tokenizer)
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return check_text(Checkpoint.open(model), TOKENS, texts, LIMITS)

    return check


def backtracking() -> str:
    tokenizer = byte_level()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"(?:(a+)+)+\1b"), "isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    return tokenizer.to_str()


def test_what_serves_passes(check: Check) -> None:
    assert check() == ()


def test_a_template_may_refuse_chats(check: Check) -> None:
    (warning,) = check("{% if messages | length > 1 %}{{ raise_exception('one turn at a time') }}{% endif %}")
    assert warning.endswith("3 turns that users have: one turn at a time")


@pytest.mark.parametrize(
    ("template", "detail"),
    [
        ("{{ 9 ** (9 ** 9) }}", "**"),
        ("{{ ('a' * 3000000000) | length }}", "a repetition"),
        ("{{ '{:>3000000000}'.format(1) }}", "a width"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took more than"),
        ("{% for", "line 1"),
    ],
    ids=["power", "repetition", "width", "loops", "syntax"],
)
def test_templates_that_cannot_serve_are_refused(check: Check, template: str, detail: str) -> None:
    with pytest.raises(CheckpointInvalid) as caught:
        check(template)
    assert "chat template" in caught.value.subject
    assert detail in caught.value.violations[0].value


def test_every_template_is_tried(check: Check, home: Path) -> None:
    folder = home / "models/tiny/additional_chat_templates"
    folder.mkdir()
    (home / "models/tiny/chat_template.jinja").write_text(TEMPLATE)
    (folder / "rag.jinja").write_text("{{ raise_exception('no documents') }}")
    assert check() == tuple(
        f"the chat template 'rag' refuses a chat of {count} turns that users have: no documents" for count in (1, 3)
    )
    (folder / "rag.jinja").write_text("{{ 9 ** (9 ** 9) }}")
    with pytest.raises(CheckpointInvalid, match="chat template"):
        check()


@pytest.mark.parametrize("data", [TOKENIZER[:2000], "{}", backtracking()], ids=["truncated", "empty", "backtracking"])
def test_tokenizers_that_cannot_serve_are_refused(check: Check, data: str) -> None:
    with pytest.raises(CheckpointInvalid) as caught:
        check(tokenizer=data)
    assert "tokenizer" in caught.value.subject
