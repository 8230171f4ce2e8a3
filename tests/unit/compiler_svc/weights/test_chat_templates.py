"""Chat templates of files and configurations, chosen as transformers chooses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bundle.manifest import choose_template
from compiler_svc.weights.chat_templates import MAX_TEMPLATES
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid
from tests.checkpoints.random_weights import write_checkpoint
from tests.checkpoints.tokenizer_files import byte_level

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*, config: Any = None, **files: str) -> Path:
        path = write_checkpoint(tmp_path / "tiny")
        (path / "tokenizer.json").write_text(byte_level().to_str())
        written = {} if config is None else {"chat_template": config}
        (path / "tokenizer_config.json").write_text(json.dumps(written))
        for name, source in files.items():
            folder = path if name == "chat_template" else path / "additional_chat_templates"
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.jinja").write_text(source)
        return path

    return write


SEVERAL = [
    {"name": "default", "template": "D"},
    {"name": "tool_use", "template": "T"},
    {"name": "rag", "template": "R"},
]
WITHOUT_DEFAULT = [{"name": "rag", "template": "R"}, {"name": "x y/z", "template": "X"}]


@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
@pytest.mark.parametrize("name", [None, "default", "tool_use", "rag", "x y/z"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"config": "C"},
        {"config": SEVERAL},
        {"config": WITHOUT_DEFAULT},
        {"chat_template": "F"},
        {"chat_template": "F", "config": SEVERAL},
        {"chat_template": "F", "rag": "FR", "config": SEVERAL},
        {"rag": "FR", "tool_use": "FT", "config": SEVERAL},
    ],
)
def test_what_transformers_chooses(
    write: Write, given: dict[str, Any], name: str | None, tools: list[dict[str, str]] | None
) -> None:
    path = write(**given)
    templates = Checkpoint.open(path).chat_templates
    chosen = choose_template(templates, name or "", has_tools=tools is not None)
    reference = PreTrainedTokenizerFast.from_pretrained(path)
    # It has no names for a single template, and takes what names none for a template.
    held = reference.chat_template if isinstance(reference.chat_template, dict) else {}
    if name is not None and name not in held:
        assert (chosen is None) == (name not in templates)
        return
    try:
        expected = reference.get_chat_template(name, tools)
    except ValueError:
        assert chosen is None
        return
    assert chosen is not None
    assert templates[chosen] == expected


@pytest.mark.parametrize("config", [3, [3], [{"name": "a"}], [{"name": "a", "template": "x"}] * 2, {"a": "b"}])
def test_configurations_that_are_none(write: Write, config: Any) -> None:
    with pytest.raises(CheckpointInvalid, match=r"Jinja source, or a list of \{name, template\}"):
        Checkpoint.open(write(config=config))


def test_too_many(write: Write) -> None:
    path = write(**{f"t{number}": "x" for number in range(MAX_TEMPLATES)})
    assert len(Checkpoint.open(path).chat_templates) == MAX_TEMPLATES
    (path / "additional_chat_templates/more.jinja").write_text("x")
    with pytest.raises(CheckpointInvalid, match=f"got {MAX_TEMPLATES + 1} chat templates"):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
def test_names_that_are_none(write: Write, name: str) -> None:
    with pytest.raises(CheckpointInvalid, match="a name of at most 128 characters"):
        Checkpoint.open(write(config=[{"name": name, "template": "x"}]))


def test_links_stay_within_the_roots(write: Write, tmp_path: Path) -> None:
    path = write(rag="R")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (path / "additional_chat_templates" / "more.jinja").symlink_to(secret)
    with pytest.raises(CheckpointInvalid, match=r"more\.jinja: got a link out of the model roots"):
        Checkpoint.open(path, roots=[path])
