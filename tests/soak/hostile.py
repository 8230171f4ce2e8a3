"""Bundles whose chat templates do harm, made of a bundle that works: no build would publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from bundle.layout import Layout
from bundle.reader import open_bundle
from bundle.transfer import copy_bundle
from bundle.verification import BlobVerifier
from tests.bundles.newer import publish_newer

#: What each does: computes without end, at once or in loops, or takes gigabytes.
TEMPLATES: Final = (
    "{{ 9 ** (9 ** 9) }}",
    "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "{{ ('a' * 3000000000) | length }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ '%99999999999d' % 1 }}",
)


def publish_hostile(source: Layout, digest: str, directory: Path) -> list[str]:
    """Publishes a copy of a bundle with each template in a layout of its own; returns the digests."""
    layout = Layout.create(directory)
    copy_bundle(source, layout, digest, verifier=BlobVerifier(None))
    tokenizer = json.loads(open_bundle(layout, digest).manifest_json)["tokenizer"]
    return [publish_newer(layout, digest, tokenizer=tokenizer | {"chat_template": one}) for one in TEMPLATES]
