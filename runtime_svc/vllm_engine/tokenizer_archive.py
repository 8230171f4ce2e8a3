"""A bundle's tokenizer as one file, from which a router makes the same tokenizer."""

from __future__ import annotations

import io
import json
import re
import zipfile

from bundle.reader import Bundle


def make_tokenizer_archive(bundle: Bundle) -> bytes:
    """Returns a ZIP archive of the tokenizer's files. Slow: call it in a thread.

    Beside the files of the checkpoint it has what the manifest says: the chat templates, and the tokens that end a
    sequence, whose text routers leave out. Equal tokenizers give equal bytes.

    Args:
        bundle: An open bundle that has a tokenizer.
    """
    manifest = bundle.manifest
    assert manifest.tokenizer is not None
    files = {file.title: bundle.blob_path(file.blob).read_bytes() for file in manifest.tokenizer.files}
    # Routers look here for images that a model takes. Of a file that is missing they ask the Hub, SMG at every chat.
    files["config.json"] = b"{}"
    files["generation_config.json"] = json.dumps({"eos_token_id": manifest.tokens.eos}).encode()
    if manifest.tokenizer.chat_template is not None:
        files["chat_template.jinja"] = manifest.tokenizer.chat_template.encode()
    for number, (name, source) in enumerate(sorted(manifest.tokenizer.chat_templates.items())):
        # A name of a configuration may be none for a file.
        title = name if re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII) else str(number)
        files[f"additional_chat_templates/{title}.jinja"] = source.encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for title, data in sorted(files.items()):
            # ZipInfo has a constant time; of a plain name, the archive would take the time of now.
            archive.writestr(zipfile.ZipInfo(title), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
