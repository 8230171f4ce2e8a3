"""Reads a checkpoint's chat templates as transformers does: files, or else those in `tokenizer_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bundle.manifest import DEFAULT_CHAT_TEMPLATE
from compiler_svc.weights.directory import MAX_TEXT_BYTES, CheckpointDirectory
from compiler_svc.weights.errors import CheckpointInvalid

DEFAULT_FILE: Final = "chat_template.jinja"
#: Folder of the files of further templates, which their names are made of.
FOLDER: Final = "additional_chat_templates"
SUFFIX: Final = ".jinja"
#: Templates of one checkpoint, and characters of a name.
MAX_TEMPLATES: Final = 32
MAX_NAME_CHARACTERS: Final = 128

_CONFIG: Final = "tokenizer_config.json"
_SUBJECT: Final = f"{_CONFIG}: chat_template"


def list_template_files(directory: CheckpointDirectory) -> dict[str, Path]:
    """Lists the files of templates other than the default, by the template's name."""
    if not (directory.path / FOLDER).is_dir():
        return {}
    names = [name for name in directory.list_names(FOLDER) if name.endswith(SUFFIX)]
    files = directory.files(f"{FOLDER}/{name}" for name in names if directory.has(f"{FOLDER}/{name}"))
    return {path.name.removesuffix(SUFFIX): path for path in files.values()}


def read_chat_templates(directory: CheckpointDirectory) -> Mapping[str, str]:
    """Reads the Jinja source of each chat template by name; the default's name is `default`."""
    templates = {name: directory.read_text(f"{FOLDER}/{name}{SUFFIX}") for name in list_template_files(directory)}
    if directory.has(DEFAULT_FILE):
        templates[DEFAULT_CHAT_TEMPLATE] = directory.read_text(DEFAULT_FILE)
    return check_templates(directory.path, templates or _read_configured(directory))


def check_templates(path: Path, templates: Mapping[str, str]) -> Mapping[str, str]:
    """Checks that a checkpoint's templates are not too many or too long, and have names that can be shown."""
    size = sum(map(len, templates.values()))
    if len(templates) > MAX_TEMPLATES or size > MAX_TEXT_BYTES:
        value = f"{len(templates)} chat templates of {size} characters"
        accepted = f"at most {MAX_TEMPLATES} of {MAX_TEXT_BYTES} characters together"
        raise CheckpointInvalid(path, "chat templates", value, accepted)
    for name in templates:
        if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            accepted = f"a name of at most {MAX_NAME_CHARACTERS} characters"
            raise CheckpointInvalid(path, "chat templates", repr(name[: 2 * MAX_NAME_CHARACTERS]), accepted)
    return templates


def _read_configured(directory: CheckpointDirectory) -> dict[str, str]:
    template = directory.read_optional_json(_CONFIG).get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {DEFAULT_CHAT_TEMPLATE: template}
    entries = template if isinstance(template, list) else [template]
    pairs = [(one.get("name"), one.get("template")) if isinstance(one, dict) else (None, None) for one in entries]
    named = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    if not isinstance(template, list) or len(named) < len(entries):
        kind = "a list with other entries" if isinstance(template, list) else f"a {type(template).__name__}"
        accepted = "Jinja source, or a list of {name, template} with different names"
        raise CheckpointInvalid(directory.path, _SUBJECT, kind, accepted)
    return named
