"""How long a test waits for what must happen, before it says that it does not."""

from __future__ import annotations

from typing import Final

#: In seconds. It says nothing of how quick anything is: a busy machine can stand still for seconds, and only a test
#: that fails waits for so long. Shorter limits are for what a test asserts of time.
HANG_S: Final = 60.0
