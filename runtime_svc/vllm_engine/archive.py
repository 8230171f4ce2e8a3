"""The archive of a tokenizer's files that routers make tokens and chats with."""

from __future__ import annotations

import io
import json
import re
import zipfile
from typing import Final

from bundle.store.reader import Bundle

#: SMG shows templates a content of null as none, which many print, a content of no parts as a list, and reasoning under
#: one name. Only assistants have a content of null. A line break behind a block is left out, and the template's own
#: first line stays the first of its kind.
_PREPARED_TURNS: Final = """\
{%- set kiln = namespace(turns=[], turn={}) %}
{%- for turn in messages %}
    {%- set kiln.turn = turn %}
    {%- if turn.content is none %}
        {%- set kiln.turn = dict(role=turn.role) %}
        {%- if turn.name %}{% set kiln.turn = dict(kiln.turn, name=turn.name) %}{% endif %}
        {%- if turn.tool_calls %}{% set kiln.turn = dict(kiln.turn, tool_calls=turn.tool_calls) %}{% endif %}
    {%- elif turn.content == [] %}
        {%- set kiln.turn = dict(turn, content="") %}
    {%- endif %}
    {%- if turn.reasoning_content is string %}
        {%- set reasoning = turn.reasoning_content %}
        {%- set kiln.turn = dict(kiln.turn, reasoning_content=reasoning, thinking=reasoning) %}
    {%- endif %}
    {%- set kiln.turns = kiln.turns + [kiln.turn] %}
{%- endfor %}
{%- set messages = kiln.turns %}
"""


def prepare_turns(template: str) -> bytes:
    """Returns a chat template that prepares the turns, and then does what it did."""
    return (_PREPARED_TURNS + template).encode()


def make_tokenizer_archive(bundle: Bundle) -> bytes:
    """Returns a ZIP archive of the tokenizer's files. Slow: call it in a thread.

    Beside the files of the checkpoint it has what the manifest says: the chat templates, and the tokens that end a
    sequence, whose text routers leave out. Templates begin with what prepares turns as `ChatTemplate.render` does.
    Equal tokenizers give equal bytes.
    """
    manifest = bundle.manifest
    assert manifest.tokenizer is not None
    files = {file.title: bundle.blob_path(file.blob).read_bytes() for file in manifest.tokenizer.files}
    # Routers look here for images that a model takes. Of a file that is missing they ask the Hub, SMG at every chat.
    files["config.json"] = b"{}"
    files["generation_config.json"] = json.dumps({"eos_token_id": manifest.tokens.eos}).encode()
    if manifest.tokenizer.chat_template is not None:
        files["chat_template.jinja"] = prepare_turns(manifest.tokenizer.chat_template)
    for number, (name, source) in enumerate(sorted(manifest.tokenizer.chat_templates.items())):
        # A name of a configuration may be none for a file.
        title = name if re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII) else str(number)
        files[f"additional_chat_templates/{title}.jinja"] = prepare_turns(source)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for title, data in sorted(files.items()):
            # ZipInfo has a constant time; of a plain name, the archive would take the time of now.
            archive.writestr(zipfile.ZipInfo(title), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
