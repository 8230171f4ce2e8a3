"""What a request id is, in metadata and in fields of requests."""

from __future__ import annotations

import re
from typing import Final

#: The key of metadata that carries the id, in both directions.
REQUEST_ID_KEY: Final = "x-request-id"
#: Matches an id in full: it must fit metadata and a line of a log.
REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
#: How errors name what REQUEST_ID matches.
ACCEPTED_REQUEST_ID: Final = "1 to 128 printable characters of ASCII, no spaces"
