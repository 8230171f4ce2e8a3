"""A bundle's tokenizer as one file, from which a router makes the same tokenizer."""

from __future__ import annotations

import io
import zipfile
from typing import Final

from bundle.manifest import Tokenizer
from bundle.reader import Bundle

#: The name under which routers look for a chat template first.
CHAT_TEMPLATE_TITLE: Final = "chat_template.jinja"


def make_tokenizer_archive(bundle: Bundle, tokenizer: Tokenizer) -> bytes:
    """Returns a ZIP archive with the tokenizer's files and the chat template. Slow: call it in a thread.

    Equal tokenizers give equal bytes, so that a router sees which runtimes agree.

    Args:
        bundle: An open bundle.
        tokenizer: The tokenizer in its manifest.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(title: str, data: bytes) -> None:
            # Of a constant time: ZipInfo's default.
            archive.writestr(zipfile.ZipInfo(title), data, zipfile.ZIP_DEFLATED)

        for file in sorted(tokenizer.files, key=lambda file: file.title):
            if file.title != CHAT_TEMPLATE_TITLE:
                add(file.title, bundle.blob_path(file.blob).read_bytes())
        # The manifest's, whatever file it came from: Kiln renders chats with it.
        if tokenizer.chat_template is not None:
            add(CHAT_TEMPLATE_TITLE, tokenizer.chat_template.encode())
    return buffer.getvalue()
