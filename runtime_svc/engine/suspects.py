"""Remembers the prompts that ranks computed when they were lost, and refuses those that did it.

Ranks are lost when they die, hang or fail a step; all requests of the steps under way are there, and one of them may be
the cause. The rule:

- A prompt is quarantined if ranks were lost `MAX_LOSSES` times over it, the last time over it alone.
- A prompt that was there as often, but never alone, runs alone when it comes again, until it is past the token at which
  the ranks were lost. So the next loss has one cause, and what only was in bad company passes.
- A prompt that ends well is forgotten.

Prompts are computed alone anyway unless the bundle takes several at once, so few ever wait for a turn of their own.
"""

from __future__ import annotations

import hmac
import os
from array import array
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from runtime_svc.engine.request import Request
from runtime_svc.errors import PromptQuarantined

#: Losses of ranks after which a prompt is refused, or runs alone.
MAX_LOSSES: Final = 2
#: Prompts that are remembered; the oldest are forgotten first.
MAX_SUSPECTS: Final = 1024
#: Seconds after its last loss for which a prompt is remembered.
EXPIRY_S: Final = 3600.0
#: A step may have been called behind the one under way, so the loss may have come a token later.
_MAX_STEPS_UNDER_WAY: Final = 2


@dataclass(slots=True)
class _Suspect:
    #: When it is forgotten, by the event loop's clock.
    expires_s: float
    losses: int = 0
    is_quarantined: bool = False
    #: Tokens that the furthest of its requests had when ranks were lost.
    num_tokens: int = 0


class SuspectPrompts:
    """The suspects of one deployment, while its executables and weights stay the same.

    Prompts are known by a keyed digest of what shapes their computation, so the memory holds no text and its digests
    tell nothing to others. Which random numbers a request has, and when it ends, does not make it another prompt.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)
        #: By digest, the newest last. The way of a request looks here only if there are any.
        self.entries: OrderedDict[bytes, _Suspect] = OrderedDict()

    def note_loss(self, requests: Collection[Request], now_s: float) -> None:
        """Takes in that ranks were lost while they computed these requests."""
        num_tokens: dict[bytes, int] = {}
        for request in requests:
            digest = self._digest(request)
            num_tokens[digest] = max(request.num_tokens, num_tokens.get(digest, 0))
        for digest, count in num_tokens.items():
            suspect = self._find(digest, now_s) or _Suspect(now_s)
            suspect.expires_s = now_s + EXPIRY_S
            suspect.losses += 1
            suspect.num_tokens = max(suspect.num_tokens, count)
            suspect.is_quarantined |= len(num_tokens) == 1 and suspect.losses >= MAX_LOSSES
            self.entries[digest] = suspect
            self.entries.move_to_end(digest)
        while len(self.entries) > MAX_SUSPECTS:
            self.entries.popitem(last=False)

    def admit(self, request: Request, now_s: float) -> None:
        """Refuses a request, lets it run alone for a while, or lets it pass."""
        digest = self._digest(request)
        suspect = self._find(digest, now_s)
        if suspect is None or suspect.losses < MAX_LOSSES:
            return
        if suspect.is_quarantined:
            raise PromptQuarantined(digest.hex()[:16], suspect.losses, suspect.expires_s - now_s)
        request.num_tokens_alone = suspect.num_tokens + _MAX_STEPS_UNDER_WAY

    def forget(self, request: Request) -> None:
        """Takes in that a request has ended well."""
        self.entries.pop(self._digest(request), None)

    def _find(self, digest: bytes, now_s: float) -> _Suspect | None:
        suspect = self.entries.get(digest)
        if suspect is not None and suspect.expires_s <= now_s:
            return None
        return suspect

    def _digest(self, request: Request) -> bytes:
        shape = (
            replace(request.sampling, seed=0),
            *(request.top_logprobs, request.wants_logits, request.adapter_digest),
        )
        text = array("q", request.prompt_token_ids).tobytes() + repr(shape).encode()
        return hmac.digest(self._key, text, "sha256")
